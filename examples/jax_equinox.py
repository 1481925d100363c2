"""Handwritten digits with Equinox: a model that is a tree of arrays and other things, in micro-batches of 32.

`value_and_grad` gives the gradient of its arrays; the same training with the full batch leads to the same weights.
"""

import os
from collections.abc import Callable

os.environ.setdefault("JAX_ENABLE_X64", "1")  # float64: what is left of a difference is rounding

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from bigbatch.jax import value_and_grad

BATCH_SIZE, MICRO_BATCH_SIZE, EPOCHS = 384, 32, 15

images, classes = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(images))
x, y = images[order].reshape(-1, 1, 8, 8) / 16.0, classes[order]
x_train, y_train, x_test, y_test = x[:1500], y[:1500], x[1500:], y[1500:]


def make_model() -> eqx.Module:
    keys = jax.random.split(jax.random.key(0), 3)
    return eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(1, 16, 3, padding=1, key=keys[0]), eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.Conv2d(16, 32, 3, stride=2, key=keys[1]), eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.Lambda(jnp.ravel), eqx.nn.Linear(32 * 3 * 3, 10, key=keys[2]),
        ]
    )  # fmt: skip


arrays, others = eqx.partition(make_model(), eqx.is_inexact_array)
optimizer = optax.adam(1e-2)


def loss(arrays: eqx.Module, x: jax.Array, y: jax.Array) -> jax.Array:
    logits = jax.vmap(eqx.combine(arrays, others))(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def train(gradient_of: Callable) -> eqx.Module:
    @jax.jit
    def step(arrays, state, x, y):
        value, grads = gradient_of(arrays, x, y)
        updates, state = optimizer.update(grads, state, arrays)
        return eqx.apply_updates(arrays, updates), state, value

    trained, state = arrays, optimizer.init(arrays)
    for epoch in range(EPOCHS):
        for start in range(0, len(x_train), BATCH_SIZE):  # the last batch is smaller, and does not divide
            rows = slice(start, start + BATCH_SIZE)
            trained, state, value = step(trained, state, x_train[rows], y_train[rows])
        print(f"epoch {epoch + 1:2}: loss of the last batch {value:.8f}")
    return trained


print("full batch")
full = train(jax.value_and_grad(loss))
print(f"batch of {BATCH_SIZE}, in micro-batches of {MICRO_BATCH_SIZE}")
ours = train(value_and_grad(loss, micro_batch_size=MICRO_BATCH_SIZE))

pairs = zip(jax.tree.leaves(full), jax.tree.leaves(ours), strict=True)
gap = max(jnp.linalg.norm(a - b) / jnp.linalg.norm(a) for a, b in pairs)
accuracy = jnp.mean(jax.vmap(eqx.combine(ours, others))(x_test).argmax(1) == y_test)
print(f"the weights are {gap:.1e} apart, relative; accuracy on held-out digits: {accuracy:.1%}")
