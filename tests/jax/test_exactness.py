"""value_and_grad against jax.value_and_grad of the plain full batch, in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bigbatch.jax import grad, value_and_grad
from tests.problems import problems, samples, tokens

from .training import LOSSES, WEIGHTS, assert_equal, full_batch, gap, language, make_params, samples_loss, tokens_loss

PROBLEMS = pytest.mark.parametrize("problem", problems(), ids=lambda problem: problem.name)


@pytest.mark.each_value
@PROBLEMS
@pytest.mark.parametrize("wrapped", [jax.jit, lambda f: f], ids=["jit", "plain"])
def test_problems(problem, wrapped):
    params = make_params(problem)
    ours = wrapped(value_and_grad(LOSSES[problem.kind], problem.micro_batch_size, weight=WEIGHTS[problem.kind]))
    for batch in problem.batches:
        assert_equal(ours(params, batch), full_batch(problem, params, batch))


@PROBLEMS
def test_negative_control_mean_of_means(problem):
    params = make_params(problem)
    loss, num = LOSSES[problem.kind], 2 if problem.kind == "terms" else 1
    equal = value_and_grad(loss, problem.micro_batch_size, weight=lambda batch: (1,) * num)
    batch = problem.batches[-1]
    is_even = len(batch["x"]) % problem.micro_batch_size == 0 and problem.kind == "samples"
    if problem.micro_batch_size < len(batch["x"]) and not is_even and problem.micro_batch_size > 1:
        assert gap(equal(params, batch), full_batch(problem, params, batch)) > 1e-3
    elif problem.kind == "samples":
        assert_equal(equal(params, batch), full_batch(problem, params, batch))


@pytest.mark.each_value
@pytest.mark.parametrize("size", [7, 50, 64])
@pytest.mark.parametrize("micro", ["1", "2", "3", "n - 1", "n", "2 * n"])
def test_sizes(size, micro):
    problem = problems()[0]
    params, batch = make_params(problem), samples(size, first=100)[0]
    ours = value_and_grad(samples_loss, eval(micro, {"n": size}))
    assert_equal(ours(params, batch), full_batch(problem, params, batch))


def test_term_with_weight_zero_in_a_micro_batch():
    """The mean of that term and its gradient are 0/0, so only the other term counts."""
    problem = next(problem for problem in problems() if problem.kind == "terms")
    batch, params = tokens(0, 0, 60, 17, 0), language()
    ours = value_and_grad(LOSSES["terms"], 1, weight=WEIGHTS["terms"])
    assert_equal(jax.jit(ours)(params, batch), full_batch(problem, params, batch))


def test_term_with_weight_zero_everywhere():
    batch, params = tokens(0, 0, 0, width=8), language()
    value, grads = value_and_grad(LOSSES["terms"], 2, weight=WEIGHTS["terms"])(params, batch)
    second = jax.value_and_grad(lambda params, batch: LOSSES["terms"](params, batch)[1])(params, batch)
    assert_equal((value, grads), second)


def test_total_weight_of_zero():
    """The loss is NaN, and the gradient changes nothing."""
    batch, params = tokens(0, 0, 0, width=8), language()
    value, grads = value_and_grad(tokens_loss, 2, weight=WEIGHTS["tokens"])(params, batch)
    assert np.isnan(value)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(grads))


def test_sum():
    params, batch = make_params(problems()[0]), samples(7)[0]

    def loss(params, batch):
        return samples_loss(params, batch) * len(batch["y"])

    assert_equal(value_and_grad(loss, 2, reduction="sum")(params, batch), jax.value_and_grad(loss)(params, batch))
    assert gap(value_and_grad(loss, 2)(params, batch), jax.value_and_grad(loss)(params, batch)) > 0.1


def test_weights_per_sample_are_summed():
    params, batch = make_params(problems()[0]), samples(7)[0]
    batch["weight"] = np.linspace(0.0, 2.0, 7)

    def loss(params, batch):
        each = jax.vmap(lambda x, y: samples_loss(params, {"x": x, "y": y}))(batch["x"], batch["y"])
        return (each * batch["weight"]).sum() / batch["weight"].sum()

    ours = value_and_grad(loss, 2, weight=lambda batch: batch["weight"])
    assert_equal(ours(params, batch), jax.value_and_grad(loss)(params, batch))


# --- dtypes ------------------------------------------------------------------------------------------------------


def test_sums_of_bf16_are_kept_in_float32():
    """1024 gradients of one; their sum in bf16 would be 256."""
    ones = jnp.ones((1024, 1), jnp.bfloat16)
    found = grad(lambda w, x: (x @ w).sum(), 1, reduction="sum")(jnp.ones(1, jnp.bfloat16), ones)
    assert found.dtype == jnp.bfloat16
    assert float(found[0]) == 1024

    peer = optax.microbatching.microbatch(jax.grad(lambda w, x: (x @ w).sum()), argnums=1, microbatch_size=1)
    assert float(peer(jnp.ones(1, jnp.bfloat16), ones)[0]) == 256


def test_drift_of_bf16():
    params, batch = make_params(problems()[0]), samples(64)[0]
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (params, batch["x"]))
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), narrow)
    right = jax.grad(samples_loss)(wide[0], {"x": wide[1], "y": batch["y"]})
    found = grad(samples_loss, 1)(narrow[0], {"x": narrow[1], "y": batch["y"]})
    assert gap(jax.tree.map(lambda leaf: leaf.astype(jnp.float64), found), right) < 5e-3


def test_dtypes_are_those_of_jax():
    params, batch = make_params(problems()[0]), samples(7)[0]
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64):
        given = jax.tree.map(lambda leaf, dtype=dtype: leaf.astype(dtype), params)
        cast = {**batch, "x": batch["x"].astype(dtype)}
        found = jax.eval_shape(value_and_grad(samples_loss, 2), given, cast)
        assert found == jax.eval_shape(jax.value_and_grad(samples_loss), given, cast)


def test_accumulate_dtype():
    params, batch = make_params(problems()[0]), samples(7)[0]
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    text = str(jax.make_jaxpr(partial(grad(samples_loss, 2, accumulate_dtype=jnp.float64)))(params, batch))
    assert "f64[64,24] = scan" in text.replace("\n", " ") or "f64[64,24]" in text


def test_complex_parameters():
    rng = np.random.default_rng(0)
    w, x = rng.normal(size=3) + 1j * rng.normal(size=3), rng.normal(size=(7, 3))

    def loss(w, x):
        return jnp.mean(jnp.abs(x @ w) ** 2)

    assert_equal(value_and_grad(loss, 2)(jnp.asarray(w), x), jax.value_and_grad(loss)(jnp.asarray(w), x))


# --- optax --------------------------------------------------------------------------------------------------


def test_optax_multi_steps_is_not_exact():
    """With sizes 2, 2, 2, 1, every micro-batch counts the same."""
    params, batch = make_params(problems()[0]), samples(7)[0]
    optimizer = optax.MultiSteps(optax.sgd(1.0), 4)
    state = optimizer.init(params)
    for start in range(0, 7, 2):
        micro = {name: array[start : start + 2] for name, array in batch.items()}
        updates, state = optimizer.update(jax.grad(samples_loss)(params, micro), state, params)
    found = jax.tree.map(lambda update: -update, updates)
    assert 0.05 < gap(found, jax.grad(samples_loss)(params, batch)) < 1.5


def test_optax_microbatch_refuses_what_does_not_divide():
    params, batch = make_params(problems()[0]), samples(7)[0]
    peer = optax.microbatching.microbatch(jax.grad(samples_loss), argnums=1, microbatch_size=2)
    with pytest.raises(ValueError, match="7"):
        peer(params, batch)
    assert_equal(grad(samples_loss, 2)(params, batch), jax.grad(samples_loss)(params, batch))
