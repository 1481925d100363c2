"""Handwritten digits with JAX and optax: `jax.value_and_grad` of the full batch, and ours in micro-batches of 32.

The loss histories agree to the last digit shown and the weights to rounding.
"""

import os
from collections.abc import Callable

os.environ.setdefault("JAX_ENABLE_X64", "1")  # float64: what is left of a difference is rounding

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from bigbatch.jax import value_and_grad, verify

BATCH_SIZE, MICRO_BATCH_SIZE, EPOCHS = 384, 32, 15

images, classes = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(images))
x, y = images[order] / 16.0, classes[order]
x_train, y_train, x_test, y_test = x[:1500], y[:1500], x[1500:], y[1500:]
Params = list[tuple[jax.Array, jax.Array]]
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def make_params() -> Params:
    init = jax.nn.initializers.he_normal(dtype=float)
    keys = jax.random.split(jax.random.key(0))
    return [(init(keys[0], (64, 64)), jnp.zeros(64)), (init(keys[1], (64, 10)), jnp.zeros(10))]


def logits(params: Params, x: jax.Array) -> jax.Array:
    (w1, b1), (w2, b2) = params
    return jax.nn.relu(x @ w1 + b1) @ w2 + b2


def loss(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, x), y).mean()


def train(gradient_of: Callable) -> tuple[Params, list[float]]:
    @jax.jit
    def step(params, state, x, y):
        value, grads = gradient_of(params, x, y)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params = make_params()
    state, losses = optimizer.init(params), []
    for _ in range(EPOCHS):
        total = 0.0
        for start in range(0, len(x_train), BATCH_SIZE):  # the last batch is smaller, and does not divide
            rows = slice(start, start + BATCH_SIZE)
            params, state, value = step(params, state, x_train[rows], y_train[rows])
            total += value * len(y_train[rows])
        losses.append(total / len(x_train))
    return params, losses


full, full_losses = train(jax.value_and_grad(loss))
ours, our_losses = train(value_and_grad(loss, micro_batch_size=MICRO_BATCH_SIZE))

print(f"batch of {BATCH_SIZE}, in micro-batches of {MICRO_BATCH_SIZE}")
print("epoch   full batch   accumulated")
for epoch, (a, b) in enumerate(zip(full_losses, our_losses, strict=True), 1):
    print(f"{epoch:5}   {a:.8f}   {b:.8f}")
pairs = zip(jax.tree.leaves(full), jax.tree.leaves(ours), strict=True)
gap = max(jnp.linalg.norm(a - b) / jnp.linalg.norm(a) for a, b in pairs)
accuracy = jnp.mean(logits(ours, x_test).argmax(1) == y_test)
print(f"the weights are {gap:.1e} apart, relative; accuracy on held-out digits: {accuracy:.1%}")
print()
print(verify(ours, x_train[:BATCH_SIZE], loss, MICRO_BATCH_SIZE, args=(y_train[:BATCH_SIZE],)))
