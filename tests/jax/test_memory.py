"""The memory of a window, according to the compiler."""

import jax
import jax.numpy as jnp

from bigbatch.jax import value_and_grad

from .training import apply, dense


def deep(num_layers=12, width=64):
    return [dense(key, width, width) for key in jax.random.split(jax.random.key(0), num_layers)]


def loss(params, x):
    """A loss whose activations dominate: 16 positions for each sample."""
    for layer in params:
        x = jnp.tanh(apply(layer, x))
    return jnp.square(x).mean()


def temp_bytes(function, num_samples):
    x = jax.ShapeDtypeStruct((num_samples, 16, 64), jnp.float32)
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), deep())
    return jax.jit(function).lower(params, x).compile().memory_analysis().temp_size_in_bytes


def test_memory_is_that_of_a_micro_batch():
    full = temp_bytes(jax.value_and_grad(loss), 512)
    of_16, of_64 = (temp_bytes(value_and_grad(loss, 512 // num), 512) for num in (16, 64))
    assert of_16 < full / 5
    assert of_64 <= of_16


def test_memory_does_not_grow_with_the_number_of_micro_batches():
    sizes = [temp_bytes(value_and_grad(loss, 32), 32 * num) for num in (16, 32, 64)]
    assert max(sizes) < 1.05 * min(sizes)


def test_short_last_micro_batch():
    """It runs after the loop and reuses its memory."""
    assert temp_bytes(value_and_grad(loss, 32), 512 + 17) < 1.1 * temp_bytes(value_and_grad(loss, 32), 512)
