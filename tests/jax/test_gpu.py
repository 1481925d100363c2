"""Tests on a GPU: run them with JAX_PLATFORMS=cuda."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bigbatch.jax import multi_steps, value_and_grad, verify
from tests.problems import problems, samples

from .training import LOSSES, WEIGHTS, assert_equal, classifier, full_batch, make_params, samples_loss

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("problem", problems(), ids=lambda problem: problem.name)
def test_problems(problem):
    params = make_params(problem)
    ours = jax.jit(value_and_grad(LOSSES[problem.kind], problem.micro_batch_size, weight=WEIGHTS[problem.kind]))
    for batch in problem.batches:
        assert_equal(ours(params, batch), full_batch(problem, params, batch), 1e-11)


def test_no_transfer_to_the_host_within_a_window():
    batch, params = jax.device_put((samples(53)[0], classifier()))
    optimizer = multi_steps(optax.adam(1e-2), 4)
    state = optimizer.init(params)
    weight = jnp.asarray(13)
    ours = jax.jit(value_and_grad(samples_loss, 16, weight=lambda batch: (batch["y"] >= 0).sum()))
    step = jax.jit(lambda grads, state, params: optimizer.update(grads, state, params, weight=weight))
    _, grads = ours(params, batch)
    step(grads, state, params)
    with jax.transfer_guard("disallow"):
        _, grads = ours(params, batch)
        jax.block_until_ready(step(grads, state, params))


def test_sums_of_bf16():
    ones = jnp.ones((1024, 1), jnp.bfloat16)
    _, found = value_and_grad(lambda w, x: (x @ w).sum(), 1, reduction="sum")(jnp.ones(1, jnp.bfloat16), ones)
    assert float(found[0]) == 1024


def test_memory_is_that_of_a_micro_batch():
    def loss(params, x):
        for kernel in params:
            x = jnp.tanh(x @ kernel)
        return jnp.square(x).mean()

    def temp(function):
        params = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 12
        lowered = jax.jit(function).lower(params, jax.ShapeDtypeStruct((512, 16, 64), jnp.float32))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    full = temp(jax.value_and_grad(loss))
    of_16, of_64 = (temp(value_and_grad(loss, 512 // num)) for num in (16, 64))
    assert of_16 < full / 5
    assert of_64 <= of_16


def test_verify():
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), classifier())
    found = verify(params, samples(13)[0], samples_loss, 4)
    assert found.is_exact, found
