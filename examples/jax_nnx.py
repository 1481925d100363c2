"""Handwritten digits with Flax NNX and dropout, in micro-batches of 32 and with the full batch.

With rng="per_sample" every sample has a key of its own, so that dropout is the same however the batch is cut.
"""

import os
from collections.abc import Callable

os.environ.setdefault("JAX_ENABLE_X64", "1")  # float64: what is left of a difference is rounding

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

from bigbatch.jax import value_and_grad

BATCH_SIZE, MICRO_BATCH_SIZE, EPOCHS = 384, 32, 20

images, classes = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(images))
x, y = images[order] / 16.0, classes[order]
x_train, y_train, x_test, y_test = x[:1500], y[:1500], x[1500:], y[1500:]


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(64, 64, param_dtype=jnp.float64, rngs=rngs)
        self.dropout = nnx.Dropout(0.2)
        self.out = nnx.Linear(64, 10, param_dtype=jnp.float64, rngs=rngs)

    def __call__(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        hidden = nnx.relu(self.hidden(x))
        return self.out(self.dropout(hidden, deterministic=key is None, rngs=key))


graph, start = nnx.split(Model(nnx.Rngs(0)))
optimizer = optax.adam(1e-2)


def loss(params: nnx.State, x: jax.Array, y: jax.Array, keys: jax.Array) -> jax.Array:
    logits = jax.vmap(nnx.merge(graph, params))(x, keys)  # a key for each sample
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def plain(params: nnx.State, x: jax.Array, y: jax.Array, key: jax.Array) -> tuple[jax.Array, nnx.State]:
    """The full batch, with nothing of bigbatch in it."""
    return jax.value_and_grad(loss)(params, x, y, jax.random.split(key, len(x)))


def train(gradient_of: Callable) -> nnx.State:
    @jax.jit
    def step(params, state, x, y, key):
        value, grads = gradient_of(params, x, y, key)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params, state, key = start, optimizer.init(start), jax.random.key(0)
    for epoch in range(EPOCHS):
        for first in range(0, len(x_train), BATCH_SIZE):  # the last batch is smaller, and does not divide
            rows = slice(first, first + BATCH_SIZE)
            key, drawn = jax.random.split(key)
            params, state, value = step(params, state, x_train[rows], y_train[rows], drawn)
        print(f"epoch {epoch + 1:2}: loss of the last batch {value:.8f}")
    return params


print("full batch")
full = train(plain)
print(f"batch of {BATCH_SIZE}, in micro-batches of {MICRO_BATCH_SIZE}")
ours = train(value_and_grad(loss, micro_batch_size=MICRO_BATCH_SIZE, rng="per_sample"))

pairs = zip(jax.tree.leaves(full), jax.tree.leaves(ours), strict=True)
gap = max(jnp.linalg.norm(a - b) / jnp.linalg.norm(a) for a, b in pairs)
accuracy = jnp.mean(nnx.merge(graph, ours)(x_test).argmax(1) == y_test)
print(f"the weights are {gap:.1e} apart, relative; accuracy on held-out digits: {accuracy:.1%}")
