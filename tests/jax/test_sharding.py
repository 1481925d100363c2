"""Batches on several devices are exact, reduced once after the loop, and stay where they are."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from bigbatch import BatchError, LossError, OptionError
from bigbatch.jax import grad, pad, value_and_grad
from tests.collectives import collectives
from tests.problems import samples, tokens

from .training import WEIGHTS, assert_equal, classifier, gap, language, logits_of, samples_loss, terms_loss, tokens_loss

P = PartitionSpec
REPLICATED = P()
EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto
MESHES = {
    "two devices": ((2,), ("data",), P("data")),
    "four devices": ((4,), ("data",), P("data")),
    "two axes": ((2, 2), ("data", "fsdp"), P(("data", "fsdp"))),
    "one axis of two": ((2, 2), ("data", "model"), P("data")),
}
KINDS = pytest.mark.parametrize("kind", [EXPLICIT, AUTO], ids=["explicit", "auto"])


def make_mesh(name, kind):
    shape, axes, spec = MESHES[name]
    mesh = jax.make_mesh(shape, axes, axis_types=(kind,) * len(axes), devices=jax.devices()[: np.prod(shape)])
    return mesh, NamedSharding(mesh, spec)


def on(mesh, tree, spec=REPLICATED):
    return jax.device_put(tree, NamedSharding(mesh, spec))


def padded_tokens(*lengths, multiple):
    """Uneven texts, padded with texts that count zero."""
    batch, is_real = pad(tokens(*lengths), multiple)
    return {**batch, "y": np.where(is_real[:, None] == 1, batch["y"], -100)}


@pytest.mark.each_value
@KINDS
@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("wrapped", [jax.jit, lambda f: f], ids=["jit", "plain"])
def test_tokens(name, kind, wrapped):
    """13 texts on 2 or 4 devices, of which the last have only padding, in micro-batches of 8 and the rest."""
    mesh, sharding = make_mesh(name, kind)
    params, batch = language(), padded_tokens(3, 60, 17, 40, 0, 5, 21, 8, 0, 33, 2, 60, 1, multiple=20)
    right = jax.jit(jax.value_and_grad(tokens_loss))(params, tokens(3, 60, 17, 40, 0, 5, 21, 8, 0, 33, 2, 60, 1))
    ours = wrapped(
        value_and_grad(tokens_loss, 8, weight=WEIGHTS["tokens"], sharding=sharding if kind == AUTO else None)
    )
    placed = on(mesh, params), jax.device_put(batch, sharding)
    assert_equal(ours(*placed), right)


@pytest.mark.each_value
@KINDS
@pytest.mark.parametrize("name", MESHES)
def test_one_reduction_outside_of_the_loop(name, kind):
    mesh, sharding = make_mesh(name, kind)
    params, batch = on(mesh, classifier()), jax.device_put(samples(48)[0], sharding)
    ours = value_and_grad(samples_loss, 8, sharding=sharding if kind == AUTO else None)
    assert collectives(ours, params, batch) == ({"all-reduce": 1}, {})
    ragged = value_and_grad(samples_loss, 20, sharding=sharding if kind == AUTO else None)
    assert collectives(ragged, params, batch) == ({"all-reduce": 1}, {})
    assert_equal(
        jax.jit(ragged)(params, batch), jax.jit(jax.value_and_grad(samples_loss))(classifier(), samples(48)[0])
    )


def test_one_reduction_with_weights():
    mesh, sharding = make_mesh("four devices", EXPLICIT)
    params, batch = on(mesh, language()), jax.device_put(padded_tokens(3, 60, 17, 40, 0, 5, multiple=8), sharding)
    ours = value_and_grad(tokens_loss, 4, weight=WEIGHTS["tokens"])
    assert collectives(ours, params, batch) == ({"all-reduce": 1}, {})


def test_negative_control_plain_scan_reduces_in_the_loop():
    """A plain scan over a batch on automatic axes reduces in every iteration."""
    mesh, sharding = make_mesh("four devices", AUTO)
    params, batch = on(mesh, classifier()), jax.device_put(samples(48)[0], sharding)

    def by_hand(params, batch):
        def body(sums, micro):
            return jax.tree.map(jnp.add, sums, jax.grad(samples_loss)(params, micro)), None

        micros = jax.tree.map(lambda leaf: leaf.reshape(8, 6, *leaf.shape[1:]).swapaxes(0, 1), batch)
        return lax.scan(body, jax.tree.map(jnp.zeros_like, params), micros)[0]

    _, inside = collectives(by_hand, params, batch)
    assert inside.get("all-reduce", 0) > 0


@pytest.mark.parametrize(
    ("shape", "axes", "spec"),
    [((4,), ("a",), P("a")), ((2, 2), ("data", "model"), P("data")), ((2, 2), ("dp", "fsdp"), P(("dp", "fsdp")))],
    ids=str,
)
def test_automatic_axes_without_sharding(shape, axes, spec):
    """Inside jit JAX does not know what is sharded over them, so an only axis, or one with a usual name, is assumed."""
    mesh = Mesh(np.array(jax.devices()).reshape(shape), axes)
    batch = jax.device_put(samples(48)[0], NamedSharding(mesh, spec))
    params = on(mesh, classifier())
    ours = value_and_grad(samples_loss, 8)
    assert collectives(ours, params, batch) == ({"all-reduce": 1}, {})
    assert_equal(jax.jit(ours)(params, batch), jax.jit(jax.value_and_grad(samples_loss))(classifier(), samples(48)[0]))


@pytest.mark.parametrize("how", ["odd names", "a constraint", "told not to", "sizes"])
def test_automatic_axes_left_to_the_compiler(how):
    """The result is exact and the batch is not gathered, but gradients are reduced in every iteration."""
    names = ("a", "b") if how == "odd names" else ("data", "b")
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), names)
    sharding = NamedSharding(mesh, P(names[0]))
    batch, params = jax.device_put(samples(48)[0], sharding), on(mesh, classifier())

    def loss(params, batch):
        if how == "a constraint":
            x = jax.checkpoint(lambda x: lax.with_sharding_constraint(x, sharding))(batch["x"])
            batch = {**batch, "x": x}
        return samples_loss(params, batch)

    ours = value_and_grad(loss, 3 if how == "sizes" else 8, sharding=P() if how == "told not to" else None)
    with jax.set_mesh(mesh):
        outside, inside = collectives(ours, params, batch)
        found = jax.jit(ours)(params, batch)
    assert inside.get("all-reduce", 0) + inside.get("all-gather", 0) > 0 or how == "sizes"
    if how != "sizes":
        assert "all-gather" not in outside | inside
    assert_equal(found, jax.jit(jax.value_and_grad(samples_loss))(classifier(), samples(48)[0]))


def test_mesh_of_set_mesh():
    mesh, sharding = make_mesh("four devices", AUTO)
    params, batch = on(mesh, classifier()), jax.device_put(samples(48)[0], sharding)
    right = jax.jit(jax.value_and_grad(samples_loss))(classifier(), samples(48)[0])
    with jax.set_mesh(mesh):
        for told in (P("data"), "data", ("data",)):
            ours = value_and_grad(samples_loss, 8, sharding=told)
            assert_equal(jax.jit(ours)(params, batch), right)
            assert collectives(ours, params, batch) == ({"all-reduce": 1}, {})


@KINDS
def test_terms(kind):
    """Terms with their own counts are counted over all devices first: one more reduction, of a few numbers."""
    mesh, sharding = make_mesh("four devices", kind)
    lengths = 3, 60, 17, 40, 0, 0, 0, 8, 0, 33, 2, 60

    def total(params, batch):
        return sum(terms_loss(params, batch))

    ours = value_and_grad(terms_loss, 4, weight=WEIGHTS["terms"], sharding=sharding if kind == AUTO else None)
    placed = on(mesh, language()), jax.device_put(tokens(*lengths), sharding)
    assert_equal(jax.jit(ours)(*placed), jax.jit(jax.value_and_grad(total))(language(), tokens(*lengths)))
    assert collectives(ours, *placed) == ({"all-reduce": 2}, {})


@KINDS
def test_aux(kind):
    mesh, sharding = make_mesh("two axes", kind)

    def loss(params, batch):
        logits = logits_of(params, batch["x"])
        hits = logits.argmax(1) == batch["y"]
        return samples_loss(params, batch), {
            "logits": logits,
            "hits": hits.sum(),
            "accuracy": hits.astype(float).mean(),
        }

    batch = samples(40)[0]
    ours = value_and_grad(loss, 12, has_aux=True, sharding=sharding if kind == AUTO else None)
    found = jax.jit(ours)(on(mesh, classifier()), jax.device_put(batch, sharding))
    assert_equal(found, jax.value_and_grad(loss, has_aux=True)(classifier(), batch))


@KINDS
def test_keys(kind):
    """With keys per sample, dropout is that of one device; per micro-batch, all devices draw different numbers."""
    mesh, sharding = make_mesh("four devices", kind)
    told = sharding if kind == AUTO else None
    batch, key = samples(40)[0], jax.random.key(5)

    def dropout(params, batch, keys):
        keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (64,)))(keys)
        return samples_loss(params, {**batch, "x": batch["x"] * keep})

    placed = on(mesh, classifier()), jax.device_put(batch, sharding), on(mesh, key)
    found = jax.jit(value_and_grad(dropout, 8, rng="per_sample", sharding=told))(*placed)
    assert_equal(found, jax.jit(jax.value_and_grad(dropout))(classifier(), batch, jax.random.split(key, 40)))

    def drawn(params, batch, key):
        return samples_loss(params, batch), jnp.full(len(batch["x"]), jax.random.uniform(key))

    (_, numbers), _ = jax.jit(value_and_grad(drawn, 8, has_aux=True, sharding=told))(*placed)
    assert np.array_equal(np.unique(numbers, return_counts=True)[1], [2] * 20)


# --- sharded parameters -------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapped", [jax.jit, lambda f: f], ids=["jit", "plain"])
def test_parameters_sharded_over_the_axis_of_the_batch(wrapped):
    """Parameters are gathered once and the gradient is scattered: every device gets the part of its own parameters."""
    mesh, sharding = make_mesh("four devices", EXPLICIT)
    specs = {"first": {"kernel": P(None, "data"), "bias": P("data")}, "second": {"kernel": P("data"), "bias": P()}}
    params = jax.tree.map(partial(on, mesh), classifier(), specs)
    batch = jax.device_put(samples(40)[0], sharding)
    ours = value_and_grad(samples_loss, 12)
    value, grads = wrapped(ours)(params, batch)
    assert_equal((value, grads), jax.jit(jax.value_and_grad(samples_loss))(classifier(), samples(40)[0]))
    assert jax.tree.all(jax.tree.map(lambda g, p: g.sharding.is_equivalent_to(p.sharding, p.ndim), grads, params))
    outside, inside = collectives(ours, params, batch)
    assert inside == {}
    assert outside["reduce-scatter"] >= 1
    assert outside["all-reduce"] == 1


@KINDS
def test_parameters_sharded_over_another_axis(kind):
    """Tensor parallelism over one axis, the batch over the other."""
    mesh, sharding = make_mesh("one axis of two", kind)
    specs = {"first": {"kernel": P(None, "model"), "bias": P("model")}, "second": {"kernel": P("model"), "bias": P()}}
    params = jax.tree.map(partial(on, mesh), classifier(), specs)
    batch = jax.device_put(samples(40)[0], sharding)
    told = sharding if kind == AUTO else None

    def loss(params, batch):
        hidden = jnp.tanh(batch["x"] @ params["first"]["kernel"] + params["first"]["bias"])
        out = None if kind == AUTO else P(*jax.typeof(hidden).sharding.spec[:1], None)
        logits = jnp.einsum("bh,ho->bo", hidden, params["second"]["kernel"], out_sharding=out)
        logits += params["second"]["bias"]
        return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(batch["y"])), batch["y"]])

    with jax.set_mesh(mesh):
        found = jax.jit(value_and_grad(loss, 12, sharding=told))(params, batch)
    right = jax.jit(jax.value_and_grad(samples_loss))(classifier(), samples(40)[0])
    assert_equal(found, right)
    assert found[1]["first"]["kernel"].sharding.spec == P(None, "model")


@pytest.mark.parametrize("spec", [P("data", "model"), P(("data", "model")), P(None, ("model", "data"))], ids=str)
def test_parameters_sharded_over_both_axes(spec):
    mesh, sharding = make_mesh("one axis of two", EXPLICIT)
    w, x = np.linspace(-1, 1, 64 * 4).reshape(64, 4), samples(40)[0]["x"]

    def loss(w, x):
        return jnp.square(jnp.einsum("bi,io->bo", x, jax.reshard(w, P()), out_sharding=P())).mean()

    with jax.set_mesh(mesh):
        value, grads = jax.jit(value_and_grad(loss, 12))(on(mesh, w, spec), jax.device_put(x, sharding))
    assert_equal((value, grads), jax.value_and_grad(lambda w, x: jnp.square(x @ w).mean())(jnp.asarray(w), x))
    assert grads.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)


@KINDS
def test_keyword_arguments_may_be_sharded(kind):
    """A teacher's parameters, sharded over the axis of the batch."""
    mesh, sharding = make_mesh("four devices", kind)

    def loss(params, x, *, teacher):
        return jnp.square(x @ params - x @ teacher).mean()

    w, teacher, x = np.ones((64, 4)), np.linspace(-1, 1, 256).reshape(64, 4), samples(40)[0]["x"]
    ours = jax.jit(value_and_grad(loss, 12, sharding=sharding if kind == AUTO else None))
    found = ours(on(mesh, w), jax.device_put(x, sharding), teacher=on(mesh, teacher, P("data")))
    assert_equal(found, jax.value_and_grad(loss)(jnp.asarray(w), x, teacher=teacher))


@KINDS
def test_loss_with_a_scan(kind):
    """A recurrent net. Its carry starts with zeros, which are the same on all devices."""
    mesh, sharding = make_mesh("four devices", kind)

    def loss(w, x):
        steps = x.reshape(len(x), 8, 8).swapaxes(0, 1)
        hidden, _ = lax.scan(lambda h, xt: (jnp.tanh(xt @ w + h), None), jnp.zeros((len(x), 8)), steps)
        return jnp.square(hidden).mean()

    w, x = jnp.linspace(-1, 1, 64).reshape(8, 8), samples(40)[0]["x"]
    ours = jax.jit(value_and_grad(loss, 12, sharding=sharding if kind == AUTO else None))
    assert_equal(ours(on(mesh, w), jax.device_put(x, sharding)), jax.jit(jax.value_and_grad(loss))(w, x))


# --- inside the user's own shard_map -----------------------------------------------------------------------


@pytest.mark.each_value
@KINDS
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(kind, check_vma):
    """The batch is the device's own part, and micro_batch_size cuts that part."""
    mesh, sharding = make_mesh("four devices", kind)
    batch = padded_tokens(3, 60, 17, 40, 0, 5, 21, 8, 0, 33, 2, 60, 1, multiple=20)
    ours = value_and_grad(tokens_loss, 2, weight=WEIGHTS["tokens"], axes=None if check_vma else "data")
    mapped = jax.jit(jax.shard_map(ours, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=check_vma))
    placed = on(mesh, language()), jax.device_put(batch, sharding)
    assert_equal(mapped(*placed), jax.jit(jax.value_and_grad(tokens_loss))(language(), batch))
    assert collectives(mapped, *placed) == ({"all-reduce": 1}, {})


def test_shard_map_with_keys_by_sample():
    mesh, sharding = make_mesh("four devices", AUTO)
    batch, key = samples(40)[0], jax.random.key(5)

    def dropout(params, batch, keys):
        keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (64,)))(keys)
        return samples_loss(params, {**batch, "x": batch["x"] * keep})

    ours = value_and_grad(dropout, 3, rng="per_sample")
    mapped = jax.shard_map(ours, mesh=mesh, in_specs=(P(), P("data"), P()), out_specs=P())
    found = jax.jit(mapped)(classifier(), jax.device_put(batch, sharding), key)
    assert_equal(found, jax.jit(jax.value_and_grad(dropout))(classifier(), batch, jax.random.split(key, 40)))


def test_one_model_per_device():
    """Every device trains another model. JAX does not show that, so the user passes axes."""
    mesh, _ = make_mesh("four devices", AUTO)
    w, x = np.linspace(-1, 1, 256).reshape(4, 64), samples(40)[0]["x"]

    def loss(w, x):
        return jnp.square(x @ w).mean()

    def train(**options):
        def local(w, x):
            return jax.tree.map(lambda leaf: leaf[None], value_and_grad(loss, 3, **options)(w[0], x))

        return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data")))(w, x)

    with pytest.raises(OptionError, match="parameters differ over 'data' as the batch does"):
        train()
    right = jax.vmap(jax.value_and_grad(loss))(w, x.reshape(4, 10, 64))
    assert_equal(train(axes=()), right)


def test_tensor_parallel_in_a_shard_map():
    """The loss makes the value the same on all devices of the other axis."""
    mesh, _ = make_mesh("one axis of two", AUTO)
    w, x = np.linspace(-1, 1, 256).reshape(64, 4), samples(40)[0]["x"]

    def loss(w, x):
        return lax.psum(jnp.square(x @ w).mean(), "model")

    ours = jax.shard_map(
        value_and_grad(loss, 3), mesh=mesh, in_specs=(P(None, "model"), P("data")), out_specs=(P(), P(None, "model"))
    )
    right = jax.value_and_grad(lambda w, x: 2 * jnp.square(x @ w).mean())(jnp.asarray(w), x)
    assert_equal(jax.jit(ours)(w, x), right)


def test_negative_control_gradients_reduced_twice():
    """JAX has already summed these gradients over the devices, so psum sums them twice."""
    mesh, sharding = make_mesh("four devices", AUTO)
    batch = samples(16)[0]

    def by_hand(params, batch):
        return lax.psum(jax.grad(samples_loss)(params, batch), "data")

    mapped = jax.shard_map(by_hand, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    found = jax.jit(mapped)(classifier(), jax.device_put(batch, sharding))
    assert gap(found, jax.grad(samples_loss)(classifier(), batch)) > 1


def test_loss_that_is_already_reduced():
    mesh, _ = make_mesh("four devices", AUTO)
    ours = value_and_grad(lambda params, batch: lax.pmean(samples_loss(params, batch), "data"), 2)
    mapped = jax.shard_map(ours, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    with pytest.raises(LossError, match="the same on all devices of 'data', so it is already reduced over them"):
        jax.jit(mapped)(classifier(), samples(16)[0])


# --- refusals ------------------------------------------------------------------------------------------------


def test_sizes_that_do_not_divide_by_the_devices():
    mesh, sharding = make_mesh("four devices", AUTO)
    params, batch = on(mesh, classifier()), jax.device_put(samples(48)[0], sharding)
    with pytest.raises(
        OptionError, match=r"micro_batch_size=6 cannot be shared by the 4 devices of data.*multiple of 4"
    ):
        value_and_grad(samples_loss, 6)(params, batch)
    with pytest.raises(BatchError, match="the 4 devices of data cannot share 13 samples evenly"):
        value_and_grad(samples_loss, 4, sharding=sharding)(params, samples(13)[0])


def test_unknown_axes():
    mesh, _ = make_mesh("four devices", AUTO)
    with pytest.raises(OptionError, match="no mesh is set"):
        value_and_grad(samples_loss, 4, sharding=P("data"))(classifier(), samples(48)[0])
    with jax.set_mesh(mesh), pytest.raises(OptionError, match="the axis 'rows' but the mesh has"):
        value_and_grad(samples_loss, 4, sharding=P("rows"))(classifier(), samples(48)[0])


def test_arrays_sharded_over_different_axes():
    mesh, _ = make_mesh("two axes", EXPLICIT)
    batch = samples(48)[0]
    batch = {"x": on(mesh, batch["x"], P("data")), "y": on(mesh, batch["y"], P("fsdp"))}
    with pytest.raises(BatchError, match="spread all of them over the same axes"):
        value_and_grad(samples_loss, 4)(on(mesh, classifier()), batch)


def test_one_array_that_is_not_sharded():
    """Labels are on every device and images are sharded, so the labels are sharded too."""
    for kind in (EXPLICIT, AUTO):
        mesh, sharding = make_mesh("four devices", kind)
        batch = samples(48)[0]
        placed = {"x": jax.device_put(batch["x"], sharding), "y": on(mesh, batch["y"])}
        found = value_and_grad(samples_loss, 8)(on(mesh, classifier()), placed)
        assert_equal(found, jax.jit(jax.value_and_grad(samples_loss))(classifier(), batch))


def test_a_mesh_of_one_device():
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    batch = jax.device_put(samples(13)[0], NamedSharding(mesh, P("data")))
    assert_equal(grad(samples_loss, 4)(classifier(), batch), jax.grad(samples_loss)(classifier(), samples(13)[0]))


# --- padding ---------------------------------------------------------------------------------------------------------


def test_pad():
    batch = {"x": np.arange(6.0).reshape(3, 2), "y": jnp.arange(3), "name": "digits", "scale": 2.0}
    found, is_real = pad(batch, 4)
    assert np.array_equal(found["x"], [[0, 1], [2, 3], [4, 5], [4, 5]])
    assert np.array_equal(found["y"], [0, 1, 2, 2])
    assert (found["name"], found["scale"]) == ("digits", 2.0)
    assert np.array_equal(is_real, [1, 1, 1, 0])
    assert pad(batch, 3)[0]["x"] is batch["x"]
    with pytest.raises(BatchError, match=r"has 3 samples but .* has 5"):
        pad({**batch, "z": np.ones(5)}, 4)
    with pytest.raises(OptionError, match="multiple is 0"):
        pad(batch, 0)


def test_padding_counts_zero():
    def loss(params, batch, is_real):
        each = jax.vmap(lambda x, y: samples_loss(params, {"x": x, "y": y}))(batch["x"], batch["y"])
        return (each * is_real).sum() / is_real.sum()

    mesh, sharding = make_mesh("four devices", EXPLICIT)
    batch, is_real = jax.device_put(pad(samples(13)[0], 16), sharding)
    ours = value_and_grad(loss, 4, weight=lambda batch, is_real: is_real)
    assert_equal(
        ours(on(mesh, classifier()), batch, is_real),
        jax.jit(jax.value_and_grad(samples_loss))(classifier(), samples(13)[0]),
    )
