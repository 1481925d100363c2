"""Arguments, keys, aux, transformations: all that a stand-in for jax.value_and_grad is asked."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bigbatch import BatchError, LossError, OptionError, WeightError
from bigbatch.jax import grad, value_and_grad
from tests.problems import samples

from .training import assert_equal, classifier, gap, logits_of, samples_loss

BATCH = samples(13)[0]
X, Y = BATCH["x"], BATCH["y"]


def loss_xy(params, x, y):
    return samples_loss(params, {"x": x, "y": y})


# --- arguments ---------------------------------------------------------------------------------------------------


def test_several_batch_arguments():
    params = classifier()
    assert_equal(value_and_grad(loss_xy, 3)(params, X, Y), jax.value_and_grad(loss_xy)(params, X, Y))


def test_weight_of_several_batch_arguments():
    params, y = classifier(), np.where(np.arange(13) % 5 == 1, -1, Y)

    def loss(params, x, y):
        each = optax.softmax_cross_entropy_with_integer_labels(logits_of(params, x), jnp.maximum(y, 0))
        return (each * (y >= 0)).sum() / (y >= 0).sum()

    found = value_and_grad(loss, 3, weight=lambda x, y: (y >= 0).sum())(params, X, y)
    assert_equal(found, jax.value_and_grad(loss)(params, X, y))
    assert gap(value_and_grad(loss, 3)(params, X, y), jax.value_and_grad(loss)(params, X, y)) > 1e-3


@pytest.mark.parametrize("argnums", [0, 2, -2, (0, 2), (2, 0), (0,), (0, -2)])
def test_argnums(argnums):
    def loss(params, x, scale, y):
        return loss_xy(params, x * scale["by"], y)

    args = classifier(), X, {"by": jnp.asarray(1.5)}, Y
    numbers = argnums if isinstance(argnums, tuple) else (argnums,)
    if 0 not in numbers:
        ours = value_and_grad(loss, 3, argnums=argnums, batch_argnums=(1, 3))
    else:
        ours = value_and_grad(loss, 3, argnums=argnums)
    assert_equal(ours(*args), jax.value_and_grad(loss, argnums)(*args))


def test_extra_arguments():
    """Scalars and non-arrays are passed whole, and so are keyword arguments, even with as many rows as the batch."""
    params, table = classifier(), np.linspace(0.5, 2.0, 13)

    def loss(params, batch, scale, mode, *, by, flag=False):
        assert mode in ("a", "b")
        assert flag is True
        assert len(by) == 13
        found = samples_loss(params, batch) * scale * by.sum()
        return found * 2 if mode == "b" else found

    for mode in ("a", "b"):
        ours = value_and_grad(loss, 3)(params, BATCH, jnp.asarray(0.7), mode, by=table, flag=True)
        right = jax.value_and_grad(loss)(params, BATCH, 0.7, mode, by=table, flag=True)
        assert_equal(ours, right)
    traced = jax.jit(value_and_grad(loss, 3), static_argnums=3, static_argnames="flag")
    assert_equal(traced(params, BATCH, 0.7, "b", by=table, flag=True), right)


def test_static_arguments_are_told_apart_by_type():
    """1, 1.0 and True are equal and yet no loss takes one for the other."""

    def loss(w, x, how):
        return (w * x).mean() * {bool: 1, int: 2, float: 3}[type(how)]

    ours = value_and_grad(loss, 2)
    found = [float(ours(2.0, jnp.ones(5), how)[0]) for how in (1, True, 1.0, 1)]
    assert found == [4.0, 2.0, 6.0, 4.0]


def test_arguments_that_cannot_be_hashed():
    class Options:
        __hash__ = None
        scale = 2.0

    def loss(params, batch, options):
        return samples_loss(params, batch) * options.scale

    args = classifier(), BATCH, Options()
    assert_equal(value_and_grad(loss, 3)(*args), jax.value_and_grad(loss)(*args))


TRACES = []


def traced_loss(params, batch):
    TRACES.append(1)
    return samples_loss(params, batch), {"a": jnp.ones(())}


@pytest.mark.parametrize("is_made_anew", [True, False])
def test_nothing_is_compiled_twice(is_made_anew):
    """Outside of jit too, and also where the function is made in every round of a loop."""
    params = classifier()
    options = {"has_aux": True, "aux": {"a": "mean"}}
    ours = value_and_grad(traced_loss, 3, **options)
    ours(params, BATCH)
    num = len(TRACES)
    for _ in range(3):
        (value_and_grad(traced_loss, 3, **options) if is_made_anew else ours)(params, BATCH)
    assert len(TRACES) == num


def test_nothing_stale_is_kept():
    """What a loss holds, and what it is handed, may change between two calls."""

    class Scaled:
        scale = 1.0

        def loss(self, w, x):
            return (w * x).mean() * self.scale

    model = Scaled()
    first = value_and_grad(model.loss, 2)(2.0, jnp.ones(5))[0]
    model.scale = 3.0
    assert value_and_grad(model.loss, 2)(2.0, jnp.ones(5))[0] == 3 * first

    ours = value_and_grad(lambda w, x, config: (w * x).mean() * config.scale, 2)
    assert ours(2.0, jnp.ones(5), model)[0] == 6
    model.scale = 1.0
    assert ours(2.0, jnp.ones(5), model)[0] == 2

    sign = value_and_grad(lambda w, x, zero: (w * x).mean() * np.copysign(1.0, zero), 2)
    assert [float(sign(2.0, jnp.ones(5), zero)[0]) for zero in (0.0, -0.0)] == [2.0, -2.0]


def test_what_a_loss_closes_over_is_let_go():
    class Big:
        pass

    def call():
        big = Big()
        value_and_grad(lambda w, x: (w * x).mean() * (big is not None), 2)(2.0, jnp.ones(5))
        return weakref.ref(big)

    gone = call()
    gc.collect()
    assert gone() is None


def test_parameters_of_any_kind():
    def loss(w, x):
        return (w * x).mean()

    assert float(grad(loss, 2)(3.0, jnp.arange(5.0))) == 2.0
    assert float(grad(loss, 2)(np.float32(3), np.arange(5.0))) == 2.0
    found = grad(lambda p, x: (p[0] * x).mean(), 2)([jnp.ones(()), None], jnp.arange(5.0))
    assert found == [2.0, None]


def test_batches_of_any_kind():
    params = classifier()
    right = jax.value_and_grad(samples_loss)(params, BATCH)

    def loss(params, batch):
        (x, [y]), nothing, name, scale = batch
        assert nothing is None
        assert name == "digits"
        return samples_loss(params, {"x": x, "y": y}) * scale

    for stack in (np.asarray, jnp.asarray):
        batch = (stack(X), [stack(Y)]), None, "digits", 1.0
        assert_equal(value_and_grad(loss, 4)(params, batch), right)
    named = {**BATCH, "id": np.array(["a"] * 13)}  # what JAX cannot hold
    assert_equal(value_and_grad(samples_loss, 4)(params, named), right)


# --- keys --------------------------------------------------------------------------------------------------------


def dropout(params, batch, key):
    keep = jax.random.bernoulli(key, 0.5, batch["x"].shape)
    return samples_loss(params, {**batch, "x": batch["x"] * keep})


def dropout_by_sample(params, batch, keys):
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, batch["x"].shape[1:]))(keys)
    return samples_loss(params, {**batch, "x": batch["x"] * keep})


@pytest.mark.each_value
@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 5, 12, 13])
def test_keys_by_sample_make_dropout_exact(make_key, micro_batch_size):
    params, key = classifier(), make_key(3)
    right = jax.value_and_grad(dropout_by_sample)(params, BATCH, jax.random.split(key, 13))
    ours = value_and_grad(dropout_by_sample, micro_batch_size, rng="per_sample")
    assert_equal(ours(params, BATCH, key), right)
    assert_equal(jax.jit(ours)(params, BATCH, key), right)
    other = jax.value_and_grad(dropout_by_sample)(params, BATCH, jax.random.split(make_key(4), 13))
    assert gap(other, right) > 0.01


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_each_micro_batch_has_a_key_of_its_own(make_key):
    """Seen from outside: what each micro-batch drew."""

    def loss(w, x, key, *, rngs):
        drawn = jnp.full(len(x), jax.random.uniform(key)), jnp.full(len(x), jax.random.uniform(rngs["dropout"]))
        return (w * x).mean(), drawn

    ours = value_and_grad(loss, 3, has_aux=True)
    (_, drawn), _ = ours(1.0, jnp.ones(13), make_key(0), rngs={"dropout": make_key(1)})
    for each in drawn:
        assert sorted(np.unique(np.asarray(each), return_counts=True)[1]) == [1, 3, 3, 3, 3]
    (_, again), _ = ours(1.0, jnp.ones(13), make_key(0), rngs={"dropout": make_key(1)})
    assert np.array_equal(drawn[0], again[0])
    (_, same), _ = value_and_grad(loss, 3, has_aux=True, rng=None)(
        1.0, jnp.ones(13), make_key(0), rngs={"dropout": make_key(1)}
    )
    assert len(np.unique(np.asarray(same[0]))) == 1


def test_one_micro_batch_is_the_full_batch():
    params, key = classifier(), jax.random.key(0)
    ours = value_and_grad(dropout, 13)(params, BATCH, key)
    assert_equal(ours, jax.value_and_grad(dropout)(params, BATCH, key))


def test_keys_of_the_users_are_cut():
    params, keys = classifier(), jax.random.split(jax.random.key(0), 13)
    right = jax.value_and_grad(dropout_by_sample)(params, BATCH, keys)
    assert_equal(value_and_grad(dropout_by_sample, 3)(params, BATCH, keys), right)


def test_a_key_or_labels():
    def loss(w, x, y=None, *, size=None):
        return (w * x).mean()

    with pytest.raises(OptionError, match="a batch of 2 samples, may be a key or labels"):
        value_and_grad(loss, 2)(1.0, jnp.ones(2), jnp.ones(2, jnp.uint32))
    with pytest.raises(OptionError, match="the argument size, 2 unsigned integers, may be a key or numbers"):
        value_and_grad(loss, 2)(1.0, jnp.ones(5), size=jnp.ones(2, jnp.uint32))


@pytest.mark.parametrize("rng", ["per_micro_batch", "per_sample"])
def test_arrays_of_keys(rng):
    """A key for each of three layers, by keyword: in every micro-batch, or for every sample, other ones."""

    def loss(w, x, *, layers):
        if rng == "per_sample":
            assert layers.shape == (len(x), 3)
            return (w * x).mean(), jax.vmap(jax.vmap(jax.random.uniform))(layers)
        assert layers.shape == (3,)
        return (w * x).mean(), jnp.broadcast_to(jax.vmap(jax.random.uniform)(layers), (len(x), 3))

    ours = value_and_grad(loss, 5, has_aux=True, rng=rng)
    (_, drawn), _ = ours(1.0, jnp.ones(13), layers=jax.random.split(jax.random.key(0), 3))
    assert len(np.unique(drawn)) == (39 if rng == "per_sample" else 9)


def test_raw_keys_of_another_kind():
    def loss(w, x, *, rng):
        return (w * x).mean(), jnp.full(len(x), jax.random.uniform(rng))

    with jax.default_prng_impl("rbg"):
        (_, drawn), _ = value_and_grad(loss, 5, has_aux=True)(1.0, jnp.ones(13), rng=jax.random.PRNGKey(0))
    assert len(np.unique(drawn)) == 3


# --- aux ---------------------------------------------------------------------------------------------------------


def with_aux(params, batch):
    logits = logits_of(params, batch["x"])
    is_right = logits.argmax(1) == batch["y"]
    aux = {"logits": logits, "accuracy": is_right.astype(float).mean(), "num": is_right.sum(), "mean": logits.mean(0)}
    return samples_loss(params, batch), aux


@pytest.mark.parametrize("micro_batch_size", [1, 2, 10, 12, 13])
def test_aux_is_that_of_the_full_batch(micro_batch_size):
    """Also where micro-batches have as many rows (10) as there are classes."""
    params = classifier()
    right = jax.value_and_grad(with_aux, has_aux=True)(params, BATCH)
    assert_equal(value_and_grad(with_aux, micro_batch_size, has_aux=True)(params, BATCH), right)
    gradient, aux = grad(with_aux, micro_batch_size, has_aux=True)(params, BATCH)
    assert_equal(((right[0][0], aux), gradient), right)


def test_aux_as_asked():
    params = classifier()
    ways = {"logits": "concatenate", "accuracy": "sum", "num": "mean", "mean": "auto"}
    (_, aux), _ = value_and_grad(with_aux, 3, has_aux=True, aux=ways)(params, BATCH)
    (_, right), _ = jax.value_and_grad(with_aux, has_aux=True)(params, BATCH)
    parts = [BATCH["y"][k] == right["logits"][k].argmax() for k in range(13)]
    assert_equal(aux["logits"], right["logits"])
    assert aux["num"].dtype == jnp.float64
    assert 0 < float(aux["num"]) <= 3
    assert float(aux["accuracy"]) >= sum(parts) / 13
    (_, means), _ = value_and_grad(lambda p, b: (samples_loss(p, b), {"l": samples_loss(p, b)}), 3, has_aux=True,
                                   aux="mean")(params, BATCH)  # fmt: skip
    assert_equal(means["l"], samples_loss(params, BATCH))


def test_plain_numbers():
    """A term that is switched off, and aux that is no array."""

    def loss(params, batch):
        return (samples_loss(params, batch), 0.0), {"scale": 2.0, "num": 1, "nothing": None, "of": {}}

    (value, aux), grads = value_and_grad(loss, 3, has_aux=True)(classifier(), BATCH)
    assert_equal((value, grads), jax.value_and_grad(samples_loss)(classifier(), BATCH))
    assert aux == {"scale": 2.0, "num": 5, "nothing": None, "of": {}}


def test_aux_that_cannot_be_as_asked():
    params = classifier()
    for way, sentence in (
        ("concatenate", r"aux\['accuracy'\] of shape \(\) has no row for each sample"),
        ("mean", r"aux\['logits'\] has a row for each sample"),
        ("median", "aux='median' is unknown"),
        ({"logit": "mean"}, "aux is {'logit': 'mean'} but the loss returns"),
    ):
        with pytest.raises(OptionError, match=sentence):
            value_and_grad(with_aux, 3, has_aux=True, aux=way)(params, BATCH)
    for odd in (
        lambda x: x.reshape(-1),
        lambda x: x.T,
        lambda x: x[1:],
        lambda x: x @ x.T,
        lambda x: jnp.repeat(x, 2, 0),
    ):
        with pytest.raises(OptionError, match="the samples, and nothing else, along its leading axis"):
            value_and_grad(lambda w, x, odd=odd: ((w * x).mean(), odd(x)), 3, has_aux=True)(1.0, X)
    with pytest.raises(OptionError, match=r"aux\['ok'\] is true or false for each micro-batch"):
        value_and_grad(lambda w, x: ((w * x).mean(), {"ok": jnp.all(x > 0)}), 3, has_aux=True)(1.0, X)
    counted = value_and_grad(lambda w, x: ((w * x).mean(), jnp.all(x >= 0)), 3, has_aux=True, aux="sum")(1.0, X)
    assert counted[0][1] == 5
    with pytest.raises(LossError, match=r"must return \(loss, aux\), but it returned"):
        value_and_grad(samples_loss, 3, has_aux=True)(params, BATCH)


# --- transformations -----------------------------------------------------------------------------------------------


def test_vmap():
    """A gradient for each of several tasks."""
    params = classifier()
    xs, ys = np.stack([X[:6], X[6:12]]), np.stack([Y[:6], Y[6:12]])
    found = jax.jit(jax.vmap(value_and_grad(loss_xy, 4), (None, 0, 0)))(params, xs, ys)
    assert_equal(found, jax.jit(jax.vmap(jax.value_and_grad(loss_xy), (None, 0, 0)))(params, xs, ys))


def test_vmap_over_parameters_with_counted_terms():
    params = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), classifier())

    def loss(params, batch):
        return samples_loss(params, batch), jnp.square(logits_of(params, batch["x"])).mean()

    def total(params, batch):
        return sum(loss(params, batch))

    ours = value_and_grad(loss, 4, weight=lambda batch: (batch["y"].shape[0], jnp.sum(batch["y"] >= 0)))
    found = jax.jit(jax.vmap(ours, (0, None)))(params, BATCH)
    assert_equal(found, jax.jit(jax.vmap(jax.value_and_grad(total), (0, None)))(params, BATCH))


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_checkpoint(where):
    params = classifier()
    right = jax.value_and_grad(samples_loss)(params, BATCH)
    if where == "inside":
        ours = value_and_grad(jax.checkpoint(samples_loss), 3)
    else:
        ours = jax.checkpoint(value_and_grad(samples_loss, 3))
    assert_equal(jax.jit(ours)(params, BATCH), right)


def test_second_derivatives():
    params = classifier(4)

    def norm(gradient_of):
        return lambda params: sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(gradient_of(params, BATCH)))

    found = jax.jit(jax.grad(norm(grad(samples_loss, 3))))(params)
    assert_equal(found, jax.jit(jax.grad(norm(jax.grad(samples_loss))))(params))


def test_donated_buffers():
    """A training step whose parameters and state are updated in place."""
    optimizer = optax.adam(1e-2)

    def step(params, state, batch):
        value, grads = value_and_grad(samples_loss, 3)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params = classifier()
    donated = jax.jit(step, donate_argnums=(0, 1))
    before = params, optimizer.init(params)
    right = jax.jit(step)(*before, BATCH)
    compiled = donated.lower(*before, BATCH).compile()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(before))
    assert compiled.memory_analysis().alias_size_in_bytes == size
    assert_equal(donated(*before, BATCH), right)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))


def test_in_a_scan_over_batches():
    params = classifier()
    batches = jax.tree.map(lambda array: jnp.asarray(array[:12]).reshape(3, 4, *array.shape[1:]), BATCH)

    def train(gradient_of):
        def step(params, batch):
            value, grads = gradient_of(params, batch)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

        return jax.jit(lambda params: jax.lax.scan(step, params, batches))(params)

    assert_equal(train(value_and_grad(samples_loss, 3)), train(jax.value_and_grad(samples_loss)))


# --- what cannot work ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda p: value_and_grad(samples_loss, 0), OptionError, "micro_batch_size is 0"),
        (lambda p: value_and_grad(samples_loss, 2.5), OptionError, "micro_batch_size is 2.5"),
        (lambda p: value_and_grad(samples_loss, reduction="max"), OptionError, "reduction='max'"),
        (lambda p: value_and_grad(samples_loss, rng="each"), OptionError, "rng='each'"),
        (lambda p: value_and_grad(samples_loss, argnums="p"), OptionError, "argnums is 'p'"),
        (lambda p: value_and_grad(samples_loss, argnums=4)(p, BATCH), OptionError, "argument 4 .* 2 positional"),
        (lambda p: value_and_grad(loss_xy)(p, X, Y[:5]), BatchError, "argument 1 has 13 samples but argument 2 has 5"),
        (lambda p: value_and_grad(samples_loss)(p, {"x": X, "y": Y[:5]}), BatchError, r"argument 1\['y'\] has 5"),
        (lambda p: value_and_grad(samples_loss)(p), BatchError, "without an array that can be cut"),
        (lambda p: value_and_grad(loss_xy)(p, X[:0], Y[:0]), BatchError, "has 0 samples"),
        (lambda p: value_and_grad(lambda p, x: x, 2)(p, X), LossError, "a real scalar"),
        (
            lambda p: value_and_grad(loss_xy, 1)(p, X, y=Y),
            BatchError,
            "is passed whole .* has 13 rows, as many as the batch",
        ),
        (lambda p: value_and_grad(samples_loss)({**p, "f": jnp.tanh}, BATCH), OptionError, "the parameters have a"),
        (lambda p: value_and_grad(loss_xy, 2, weight=lambda x, y: [1])(p, X, Y), WeightError, r"is \[1\]"),
        (lambda p: value_and_grad(lambda p, x: (x.sum(), 3), 2)(p, X), LossError, "a real scalar"),
        (lambda p: value_and_grad(loss_xy, 2, weight=lambda x, y: -1)(p, X, Y), WeightError, "is -1"),
        (lambda p: value_and_grad(loss_xy, 2, weight=lambda x, y: np.nan)(p, X, Y), WeightError, "is nan"),
        (lambda p: value_and_grad(loss_xy, 2, weight=lambda x, y: (1, 2))(p, X, Y), LossError, "1 term but .* has 2"),
    ],
)
def test_one_sentence(call, error, sentence):
    with pytest.raises(error, match=sentence):
        call(classifier())


def test_sparse_arrays_are_not_cut():
    from jax.experimental.sparse import BCOO

    with pytest.raises(BatchError, match="a sparse array cannot be cut"):
        value_and_grad(lambda w, x: (x @ w).mean(), 2)(jnp.ones(64), BCOO.fromdense(X))
    dense = np.asarray(X)

    def loss(w, x, *, by):
        return (x * (by @ w).sum()).mean()

    found = value_and_grad(loss, 2)(jnp.ones(64), jnp.ones(5), by=BCOO.fromdense(dense))
    assert_equal(found, value_and_grad(loss, 2)(jnp.ones(64), jnp.ones(5), by=dense))
