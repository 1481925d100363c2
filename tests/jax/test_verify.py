"""verify says exact if a loss is, and names the cause if it is not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bigbatch import BatchError, GradientError, LossError, OptionError
from bigbatch.jax import verify
from tests.problems import problems, samples, tokens

from .training import LOSSES, WEIGHTS, classifier, language, make_params, squares_loss, tokens_loss

BATCH = samples(13)[0]


def float32(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float32) if leaf.dtype.kind == "f" else leaf, tree)


@pytest.mark.parametrize("kind", ["samples", "tokens", "terms"])
def test_exact(kind):
    problem = next(problem for problem in problems() if problem.kind == kind)
    batch = problem.batches[0]
    found = verify(float32(make_params(problem)), float32(batch), LOSSES[kind], 2, weight=WEIGHTS[kind])
    assert found.is_exact, found
    assert 0 < found.max_error < 1e-12
    assert not found.causes


def test_names_are_paths():
    assert set(verify(classifier(), BATCH, squares_loss, 4).errors) == {
        "first.bias", "first.kernel", "second.bias", "second.kernel"
    }  # fmt: skip
    assert set(verify(jnp.ones(64), BATCH["x"], lambda w, x: (x @ w).mean(), 4).errors) == {"parameters"}


def test_weight_that_disagrees_with_the_loss():
    found = verify(language(), tokens(3, 60, 17, 40, 5), tokens_loss, 2)
    assert not found.is_exact
    assert "return from `weight` the number of samples or tokens the loss averages over" in found.causes[0]


def test_a_sum():
    found = verify(classifier(), BATCH, lambda params, batch: 13 * squares_loss(params, batch), 13)
    assert found.is_exact
    found = verify(classifier(), BATCH, lambda params, batch: len(batch["y"]) * squares_loss(params, batch), 4)
    assert 'pass reduction="sum"' in found.causes[0]
    assert verify(classifier(), BATCH, lambda p, b: len(b["y"]) * squares_loss(p, b), 4, reduction="sum").is_exact


def test_batch_norm_is_named():
    def loss(params, batch):
        x = (batch["x"] - batch["x"].mean(0)) / jnp.sqrt(batch["x"].var(0) + 1e-3)
        return squares_loss(params, {**batch, "x": x})

    found = verify(classifier(), BATCH, loss, 4)
    assert not found.is_exact
    assert "couples the samples" in found.causes[0]
    assert "BatchNorm" in found.causes[0]


def test_dropout():
    def loss(params, batch, key):
        keep = jax.random.bernoulli(key, 0.5, batch["x"].shape)
        return squares_loss(params, {**batch, "x": batch["x"] * keep})

    found = verify(classifier(), BATCH, loss, 4, args=(jax.random.key(0),))
    assert found.is_exact, found
    assert "was switched off for the comparison" in found.causes[0]
    found = verify(classifier(), BATCH, jax.jit(loss), 4, args=(jax.random.key(0),), weight=lambda batch: 1)
    assert not found.is_exact
    assert "but `weight` says" in found.causes[1]
    masks = jax.random.bernoulli(jax.random.key(0), 0.5, (100,))
    assert 0 < masks.sum() < 100

    def by_sample(params, batch, keys):
        keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (64,)))(keys)
        return squares_loss(params, {**batch, "x": batch["x"] * keep})

    found = verify(classifier(), BATCH, by_sample, 4, args=(jax.random.key(0),), rng="per_sample")
    assert found.is_exact, found
    assert not found.causes


def test_noise():
    def loss(params, batch, key):
        return squares_loss(params, {**batch, "x": batch["x"] + jax.random.normal(key, batch["x"].shape)})

    found = verify(classifier(), BATCH, loss, 4, args=(jax.random.key(0),))
    assert found.is_exact, found
    assert "draws random numbers" in found.causes[0]


def test_a_compiled_loss_keeps_its_dropout():
    """verify must not switch dropout off in functions that the user compiled."""

    @jax.jit
    def loss(params, batch, key):
        keep = jax.random.bernoulli(key, 0.5, batch["x"].shape)
        return squares_loss(params, {**batch, "x": batch["x"] * keep})

    verify(classifier(), BATCH, loss, 4, args=(jax.random.key(0),))
    assert loss(classifier(), BATCH, jax.random.key(0)) != loss(classifier(), BATCH, jax.random.key(1))


def test_further_arguments_of_the_loss():
    def loss(params, x, y, *, scale):
        return squares_loss(params, {"x": x, "y": y}) * scale.sum(), {"logits": x}

    more = {"args": (BATCH["y"],), "kwargs": {"scale": np.ones(3)}}
    assert verify(classifier(), BATCH["x"], loss, 4, has_aux=True, **more).is_exact


def test_foreign_loop():
    def mean_of_means(params, micro_batches):
        found = [jax.jit(jax.grad(squares_loss))(params, micro_batch) for micro_batch in micro_batches]
        return jax.tree.map(lambda *gradients: sum(gradients) / len(gradients), *found)

    found = verify(classifier(), BATCH, squares_loss, 4, step=mean_of_means)
    assert not found.is_exact
    assert "divided by the number of micro-batches (4)" in found.causes[0]

    def right(params, micro_batches):
        found = [jax.jit(jax.grad(squares_loss))(params, micro_batch) for micro_batch in micro_batches]
        sizes = [len(micro_batch["y"]) for micro_batch in micro_batches]
        return jax.tree.map(lambda *gradients: sum(g * n for g, n in zip(gradients, sizes, strict=True)) / 13, *found)

    assert verify(classifier(), BATCH, squares_loss, 4, step=right).is_exact


def test_lower_precision_is_reported():
    def loss(params, batch):
        return squares_loss(float32_traced(params), batch)

    def float32_traced(params):
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)

    found = verify(classifier(), float32(BATCH), loss, 4)
    assert found.is_exact
    assert found.precision == "float64 with parts in float32"
    assert "something in the model or the loss computes in float32" in found.causes[0]
    assert not verify(classifier(), float32(BATCH), loss, 4, tolerance=1e-9).is_exact
    assert "but `weight` says" in verify(classifier(), float32(BATCH), loss, 4, weight=lambda batch: 1).causes[0]


def test_settings_of_the_user_stay():
    with jax.enable_x64(False):
        assert verify(float32(classifier()), float32(BATCH), squares_loss, 4).max_error < 1e-12
        assert jnp.ones(1).dtype == jnp.float32


def test_one_sentence():
    with pytest.raises(OptionError, match="micro_batch_size is 0"):
        verify(classifier(), BATCH, squares_loss, 0)
    with pytest.raises(OptionError, match="reduction='max'"):
        verify(classifier(), BATCH, squares_loss, 4, reduction="max")
    with pytest.raises(BatchError, match="has 13 samples but"):
        verify(classifier(), {**BATCH, "y": BATCH["y"][:5]}, squares_loss, 4)
    with pytest.raises(LossError, match="a real scalar"):
        verify(classifier(), BATCH, lambda params, batch: batch["x"], 4)


# --- common losses and loops ----------------------------------------------------------------------


def pops(params, batch):
    """Pops the labels from the batch, as the examples of Hugging Face do."""
    y = batch.pop("y")
    return squares_loss(params, {**batch, "y": y})


def weighted(params, micro_batches, loss=squares_loss):
    found = [jax.jit(jax.grad(loss))(params, micro_batch) for micro_batch in micro_batches]
    sizes = [len(jax.tree.leaves(micro_batch)[0]) for micro_batch in micro_batches]
    return jax.tree.map(lambda *gradients: sum(g * n for g, n in zip(gradients, sizes, strict=True)) / 13, *found)


def test_a_loss_that_pops_from_its_batch():
    assert verify(classifier(), BATCH, pops, 4).is_exact
    assert verify(classifier(), BATCH, pops, 4, weight=lambda batch: len(batch.pop("y"))).is_exact
    assert set(BATCH) == {"x", "y"}

    def popping(params, micro_batches):
        sizes = [len(micro_batch["y"]) for micro_batch in micro_batches]
        found = [jax.grad(lambda p, b, y: squares_loss(p, {**b, "y": y}))(params, b, b.pop("y")) for b in micro_batches]
        return jax.tree.map(lambda *gradients: sum(g * n for g, n in zip(gradients, sizes, strict=True)) / 13, *found)

    assert verify(classifier(), BATCH, squares_loss, 4, step=popping).is_exact


def test_loop_that_donates_its_arguments():
    apply = jax.jit(lambda params, grads: jax.tree.map(jnp.subtract, params, grads), donate_argnums=0)

    def donating(params, micro_batches):
        grads = weighted(params, micro_batches)
        apply(params, grads)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params))
        return grads

    assert verify(classifier(), BATCH, squares_loss, 4, step=donating).is_exact


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda params, value: None, r"the loss returned None: return a mean"),
        (lambda params, value: {"loss": value}, r"\{'loss': 'float64\[\]'\}"),
        (lambda params, value: value * jnp.ones(3), r"the loss returned float64\[3\]"),
        (lambda params, value: value.astype(int), r"the loss returned int64\[\]"),
        (lambda params, value: (value, {"accuracy": value}), "has_aux=True"),
        (lambda params, value: jax.lax.stop_gradient(value), "gradient of the whole batch is zero everywhere"),
        (lambda params, value: 3.0, "gradient of the whole batch is zero everywhere"),
    ],
)
def test_bad_returns(returned, message):
    with pytest.raises(LossError, match=message):
        verify(classifier(), BATCH, lambda p, b: returned(p, squares_loss(p, b)), 4)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda params: None, "step returned PyTreeDef.None. but the parameters are"),
        (lambda params: (jnp.ones(()), params), "in their form"),
        (lambda params: {}, "in their form"),
        (
            lambda params: jax.tree.map(lambda p: p[..., None], params),
            r"shape \(24, 1\) for first.bias of shape \(24,\)",
        ),
    ],
)
def test_bad_returns_of_a_loop(returned, message):
    with pytest.raises(GradientError, match=message):
        verify(classifier(), BATCH, squares_loss, 4, step=lambda params, micro_batches: returned(params))


def summed_in_float32(params, batch):
    """A scan with a float32 carry, which JAX refuses in float64."""
    total, _ = jax.lax.scan(lambda sums, x: (sums + x, None), jnp.zeros(64, jnp.float32), batch["x"])
    return squares_loss(params, batch) + (total @ params["first"]["kernel"]).sum() / len(batch["x"]) / 100


def convolved_in_float32(params, batch):
    kernel = jnp.array([0.25, 0.5, 0.25], jnp.float32)[None, None]
    x = jax.lax.conv_general_dilated(batch["x"][:, None], kernel, (1,), "SAME")[:, 0]
    return squares_loss(params, {**batch, "x": x})


def switched_in_float32(params, batch):
    scale = jax.lax.cond(batch["x"][0, 0] > 0, lambda: jnp.float32(0.5), lambda: batch["x"][0, 0] * 0 + 0.5)
    return squares_loss(params, batch) * scale


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "loss",
    [pytest.param(summed_in_float32, marks=SLOW), convolved_in_float32, pytest.param(switched_in_float32, marks=SLOW)],
)
def test_a_loss_that_only_runs_in_float32(loss):
    params, batch = jax.tree.map(lambda p: p.astype(jnp.float32), classifier()), float32(BATCH)
    found = verify(params, batch, loss, 4)
    assert found.is_exact, found
    assert 1e-9 < found.max_error < found.tolerance < 1e-3
    assert "does not run in float64" in found.causes[0]
    wrong = verify(params, batch, loss, 4, weight=lambda batch: 1)
    assert not wrong.is_exact
    assert wrong.max_error > 1e-2
    assert verify(params, batch, loss, 4, step=lambda p, m: weighted(p, m, loss)).is_exact


def test_error_of_the_loss_is_not_taken_for_a_dtype_error():
    with pytest.raises(ValueError, match="Incompatible shapes"):
        verify(classifier(), BATCH, lambda p, b: squares_loss(p, b) + (b["x"] + jnp.ones(3)).sum(), 4)


def draws_inside(draw):
    def loss(params, batch):
        return squares_loss(params, {**batch, "x": draw(batch["x"])})

    return loss


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: x * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape),
        lambda x: x + jax.random.normal(jax.random.PRNGKey(3), x.shape),
        lambda x: jax.lax.cond(x[0, 0] > 5, lambda: x, lambda: x * jax.random.normal(jax.random.key(1), x.shape)),
        lambda x: x[:, jax.random.permutation(jax.random.key(len(x)), 64)],
    ],
    ids=["dropout", "raw key", "in a branch", "by size"],
)  # fmt: skip
def test_key_created_in_the_loss(draw):
    found = verify(classifier(), BATCH, draws_inside(draw), 4)
    assert not found.is_exact
    assert len(found.causes) == 1
    assert "a key that is not among its arguments" in found.causes[0]


def test_draws_shared_by_all_samples_are_exact():
    """A fixed projection that the loss draws is the same for every micro-batch and for the whole batch."""
    found = verify(classifier(), BATCH, draws_inside(lambda x: x * jax.random.normal(jax.random.key(0), (64,))), 4)
    assert found.is_exact
    assert not found.causes


def bent(change):
    """The identity, with this function applied to the gradient in the backward pass."""
    function = jax.custom_vjp(lambda x: x)
    function.defvjp(lambda x: (x, None), lambda _, gradient: (change(gradient),))
    return function


@pytest.mark.parametrize(
    "change",
    [
        lambda g: jnp.clip(g, -1e-3, 1e-3),
        pytest.param(jnp.sign, marks=SLOW),
        pytest.param(lambda g: g / (1e-9 + jnp.linalg.norm(g)), marks=SLOW),
    ],
)
def test_nonlinear_backward_pass(change):
    found = verify(classifier(), BATCH, draws_inside(lambda x: x), 4)
    assert found.is_exact

    def loss(params, batch):
        return squares_loss({**params, "second": jax.tree.map(bent(change), params["second"])}, batch)

    found = verify(classifier(), BATCH, loss, 4)
    assert not found.is_exact
    assert len(found.causes) == 1
    assert "something in the backward pass sees the micro-batch" in found.causes[0]


def test_linear_backward_pass():
    def loss(params, batch):
        return squares_loss(jax.tree.map(bent(lambda g: 0.1 * g), params), batch)

    assert verify(classifier(), BATCH, loss, 4).is_exact


def test_numpy_noise_is_not_taken_for_a_nonlinear_backward_pass():
    draw = np.random.default_rng(0)

    def loss(params, batch):
        return squares_loss(params, {**batch, "x": batch["x"] + draw.normal(size=batch["x"].shape)})

    (cause,) = verify(classifier(), BATCH, loss, 4).causes
    assert "another gradient each time" in cause


@pytest.mark.parametrize(("of_x", "what"), [pytest.param(False, "loss", marks=SLOW), (True, "gradient")])
def test_micro_batch_of_one_sample_without_a_deviation(of_x, what):
    def loss(params, batch):
        if of_x:
            x = batch["x"].sum(1) * params["first"]["bias"].sum()
            return squares_loss(params, batch) / (x.std() + 1e-3)
        return squares_loss(params, batch) / batch["y"].std()

    params = jax.tree.map(lambda leaf: leaf + 0.1, classifier())
    (cause,) = verify(params, BATCH, loss, 4).causes
    assert cause.startswith(f"the {what} of micro-batch 4 alone is not finite")
    assert "standard deviation of one sample" in cause
