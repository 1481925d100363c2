"""Flax's BatchNorm: running statistics after a step are those of the whole batch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import NamedSharding, PartitionSpec

from bigbatch import OptionError
from bigbatch.jax import micro_batch_stats, pooled_batch_stats, value_and_grad

SIZE = 13
MOMENTUM = 0.9


def make_batch(size=SIZE):
    generator = np.random.default_rng(0)
    drift = np.linspace(-4, 4, size)[:, None]  # so that the means of micro-batches differ
    x = generator.normal(size=(size, 5)) * np.linspace(0.5, 2, 5) + drift + 30
    return {"x": jnp.asarray(x), "y": jnp.asarray(generator.integers(0, 3, size))}


class Net(linen.Module):
    """Its first layer is a BatchNorm, so its statistics do not depend on where the batch is cut; the second's do."""

    @linen.compact
    def __call__(self, x):
        def norm(momentum):
            return linen.BatchNorm(use_running_average=False, momentum=momentum, dtype=x.dtype, param_dtype=x.dtype)

        x = linen.Dense(7, param_dtype=x.dtype)(norm(MOMENTUM)(x))
        return linen.Dense(3, param_dtype=x.dtype)(norm(0.5)(linen.tanh(x)))


MOMENTA = {"BatchNorm_0": MOMENTUM, "BatchNorm_1": 0.5}


def cross_entropy(logits, y):
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def made(model=None):
    """A model that has seen something already, its parameters and its statistics."""
    model = model or Net()
    variables = model.init(jax.random.key(0), make_batch()["x"])
    stats = jax.tree.map(lambda leaf: leaf.astype(jnp.float64) + 0.3, variables["batch_stats"])
    return model, variables["params"], stats


def apply(model, params, stats, x):
    logits, updated = model.apply({"params": params, "batch_stats": stats}, x, mutable=["batch_stats"])
    return logits, updated["batch_stats"]


def loss_of(model):
    def loss(params, batch, stats):
        logits, after = apply(model, params, stats, batch["x"])
        return cross_entropy(logits, batch["y"]), micro_batch_stats(stats, after)

    return loss


def error(found, wanted):
    return max(
        jax.tree.leaves(jax.tree.map(lambda a, b: float(jnp.abs(a - b).max() / jnp.abs(b).max()), found, wanted))
    )


@pytest.mark.parametrize("size", [2, 3, SIZE - 1, SIZE])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_statistics_are_those_of_full_batch_training(size, is_compiled):
    model, params, stats = made()

    def step(params, stats, batch):
        (_, found), _ = value_and_grad(loss_of(model), size, has_aux=True)(params, batch, stats=stats)
        return pooled_batch_stats(stats, found, MOMENTA), found

    after, found = (jax.jit(step) if is_compiled else step)(params, stats, make_batch())
    full = apply(model, params, stats, make_batch()["x"])[1]
    assert error(after["BatchNorm_0"], full["BatchNorm_0"]) <= 1e-10
    assert jax.tree.structure(after) == jax.tree.structure(stats)
    if size < SIZE:
        plain = found.after["BatchNorm_0"]
        assert error(plain["mean"], full["BatchNorm_0"]["mean"]) <= 1e-10
        assert error(plain["var"], full["BatchNorm_0"]["var"]) > 1e-3  # without the variance between


def parts_of(x, size):
    """The micro-batches that value_and_grad cuts: strided, and a shorter last one."""
    num = len(x) // size
    whole = num * size
    return [x[k:whole:num] for k in range(num)] + ([x[whole:]] if whole < len(x) else [])


def activations(model, params, stats, x):
    """What each BatchNorm is given."""
    seen = {}

    def keep(call, args, kwargs, context):
        if isinstance(context.module, linen.BatchNorm):
            seen[context.module.name] = np.asarray(args[0])
        return call(*args, **kwargs)

    with linen.intercept_methods(keep):
        apply(model, params, stats, x)
    return seen


def test_every_layer_has_the_statistics_of_its_activations_in_all_micro_batches():
    """Three epochs, against float64 NumPy on the recorded activations."""
    model, params, stats = made()
    wanted = jax.tree.map(np.asarray, stats)
    plain = wanted
    step = jax.jit(lambda stats, batch: value_and_grad(loss_of(model), 4, has_aux=True)(params, batch, stats=stats)[0])
    for epoch in range(3):
        batch = make_batch()
        batch["x"] = batch["x"] * (1 + epoch)
        parts = parts_of(batch["x"], 4)
        seen = [activations(model, params, stats, part) for part in parts]
        for part in parts:
            plain = apply(model, params, plain, part)[1]
        stats = pooled_batch_stats(stats, step(stats, batch)[1], MOMENTA)
        for name, momentum in MOMENTA.items():
            whole = np.concatenate([each[name] for each in seen])
            for kind, value in (("mean", whole.mean(0)), ("var", whole.var(0))):
                wanted[name][kind] = momentum * wanted[name][kind] + (1 - momentum) * value
    assert error(stats, wanted) <= 1e-10
    assert error(plain, wanted) > 0.1  # an update for each micro-batch


@pytest.mark.parametrize("num_devices", [2, 4])
def test_devices_share_the_batch(num_devices):
    model, params, stats = made()
    batch = make_batch(16)
    full = apply(model, params, stats, batch["x"])[1]
    mesh = jax.make_mesh((num_devices,), ("data",), devices=jax.devices()[:num_devices])
    sharded = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))
    params, stats = jax.device_put((params, stats), NamedSharding(mesh, PartitionSpec()))

    @jax.jit
    def step(params, stats, batch):
        (_, found), _ = value_and_grad(loss_of(model), 8, has_aux=True)(params, batch, stats=stats)
        return pooled_batch_stats(stats, found, MOMENTA)

    assert error(step(params, stats, sharded)["BatchNorm_0"], full["BatchNorm_0"]) <= 1e-10


def test_statistics_count_like_the_loss():
    """Padded samples, masked in the BatchNorm: micro-batches have other numbers of real ones."""
    norm = linen.BatchNorm(use_running_average=False, momentum=MOMENTUM, dtype=jnp.float64)
    x = make_batch()["x"]
    is_real = jnp.arange(SIZE) % 5 < 3
    stats = {"mean": jnp.full(5, 0.3), "var": jnp.full(5, 1.3)}
    params = norm.init(jax.random.key(0), x)["params"]

    def run(x, is_real):
        variables = {"params": params, "batch_stats": stats}
        out, updated = norm.apply(variables, x, mask=is_real[:, None], mutable=["batch_stats"])
        return out, updated["batch_stats"]

    def loss(scale, x, is_real):
        out, after = run(x, is_real)
        return scale * (out.sum(1) * is_real).sum() / is_real.sum(), micro_batch_stats(stats, after)

    def found(weight):
        (_, found), _ = value_and_grad(loss, 4, weight=weight, has_aux=True)(1.0, x, is_real)
        return pooled_batch_stats(stats, found, MOMENTUM)

    full = run(x, is_real)[1]
    assert error(found(lambda x, is_real: is_real), full) <= 1e-10
    assert error(found(None), full) > 1e-4  # by samples, padded ones too


def test_nnx():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.BatchNorm(5, momentum=MOMENTUM, dtype=jnp.float64, param_dtype=jnp.float64, rngs=rngs)
            self.dense = nnx.Linear(5, 3, param_dtype=jnp.float64, rngs=rngs)

        def __call__(self, x):
            return self.dense(self.norm(x, use_running_average=False))

    model, batch = Model(nnx.Rngs(0)), make_batch()
    nnx.update(model, jax.tree.map(lambda leaf: leaf.astype(jnp.float64), nnx.state(model, nnx.BatchStat)))
    graph, params, stats = nnx.split(model, nnx.Param, nnx.BatchStat)

    def loss(params, batch, stats):
        model = nnx.merge(graph, params, stats, copy=True)
        value = cross_entropy(model(batch["x"]), batch["y"])
        return value, micro_batch_stats(stats, nnx.state(model, nnx.BatchStat))

    @jax.jit
    def step(params, stats, batch):
        (_, found), _ = value_and_grad(loss, 3, has_aux=True)(params, batch, stats=stats)
        return pooled_batch_stats(stats, found, MOMENTUM), found

    after, found = step(params, stats, batch)
    model(batch["x"])
    full = nnx.state(model, nnx.BatchStat)
    assert error(after, full) <= 1e-10
    assert error(found.after, full) > 1e-3
    nnx.update(model, after)  # it has the structure of the model's own

    def without_copy(params, batch, stats):
        model = nnx.merge(graph, params, stats)
        value = cross_entropy(model(batch["x"]), batch["y"])
        return value, micro_batch_stats(stats, nnx.state(model, nnx.BatchStat))

    with pytest.raises(OptionError, match=r"are the same arrays: merge an NNX model with nnx\.merge\(…, copy=True\)"):
        value_and_grad(without_copy, 3, has_aux=True)(params, batch, stats=stats)


def test_the_variance_of_equal_means_is_not_negative():
    stats = {"norm": {"mean": jnp.full(3, 1e4), "var": jnp.zeros(3)}}
    after = {"norm": {"mean": jnp.full(3, 1e4 + 0.1), "var": jnp.zeros(3)}}
    found = micro_batch_stats(stats, after)
    assert (pooled_batch_stats(stats, found, 0.9)["norm"]["var"] >= 0).all()


@pytest.mark.parametrize("momentum", [1.0, -0.1, True, None, {"BatchNorm_0": 0.9}, {"BatchNorm_0": "0.9"}])
def test_a_momentum_that_cannot_be(momentum):
    stats = made()[2]
    with pytest.raises(OptionError, match="momentum"):
        pooled_batch_stats(stats, micro_batch_stats(stats, jax.tree.map(jnp.negative, stats)), momentum)


def test_other_statistics_are_refused():
    stats = {"SpectralNorm_0": {"Dense_0/kernel/u": jnp.ones(3)}}
    with pytest.raises(OptionError, match="have a mean and a var for each BatchNorm"):
        micro_batch_stats(stats, stats)
    with pytest.raises(OptionError, match="have 'norm/var', but"):
        micro_batch_stats({"norm": {"var": jnp.ones(3)}}, {"norm": {"var": jnp.ones(3)}})


def test_what_is_not_from_micro_batch_stats_is_refused():
    stats = {"norm": {"mean": jnp.zeros(3), "var": jnp.ones(3)}}
    found = micro_batch_stats(stats, jax.tree.map(jnp.copy, stats))
    with pytest.raises(OptionError, match=r"found is a dict, .*: pass its item 'stats'$"):
        pooled_batch_stats(stats, {"stats": found, "accuracy": jnp.ones(())}, 0.9)
    with pytest.raises(OptionError, match=r"found is a dict, .*: let the loss return micro_batch_stats"):
        pooled_batch_stats(stats, stats, 0.9)
    with pytest.raises(OptionError, match=r"found is a dict, .*: pass it as the second argument"):
        pooled_batch_stats(found, stats, 0.9)


def test_statistics_of_other_layers_are_refused():
    stats = {"norm": {"mean": jnp.zeros(3), "var": jnp.ones(3)}}
    updated = {"batch_stats": jax.tree.map(jnp.copy, stats)}
    with pytest.raises(OptionError, match=r"not of the same layers .*: pass updated\[\"batch_stats\"\]"):
        micro_batch_stats(stats, updated)
    found = micro_batch_stats(stats, updated["batch_stats"])
    with pytest.raises(OptionError, match="not of the same layers"):
        pooled_batch_stats({"batch_stats": stats}, found, 0.9)
