"""Handwritten digits with Flax Linen, fed one micro-batch of 32 at a time: a step every 12 of them.

The same training with the full batch leads to the same weights.
"""

import os

os.environ.setdefault("JAX_ENABLE_X64", "1")  # float64: what is left of a difference is rounding

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state
from sklearn.datasets import load_digits

from bigbatch.jax import multi_steps

MICRO_BATCH_SIZE, ACCUMULATION_STEPS, EPOCHS = 32, 12, 15

images, classes = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(images))
x, y = images[order] / 16.0, classes[order]
x_train, y_train, x_test, y_test = x[:1500], y[:1500], x[1500:], y[1500:]
model = nn.Sequential([nn.Dense(64, param_dtype=float), nn.relu, nn.Dense(10, param_dtype=float)])


class TrainState(train_state.TrainState):
    """Passes the weight on to the optimizer, and ends a window."""

    def apply_gradients(self, *, grads, **extra):
        return self.updated(self.tx.update(grads, self.opt_state, self.params, **extra))

    @jax.jit
    def flush(self):
        return self.updated(self.tx.flush(self.opt_state, self.params))

    def updated(self, found):
        updates, opt_state = found
        params = optax.apply_updates(self.params, updates)
        return self.replace(step=self.step + 1, params=params, opt_state=opt_state)


def begin(optimizer: optax.GradientTransformation) -> TrainState:
    params = model.init(jax.random.key(0), x_train[:1])
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.with_extra_args_support(optimizer))


@jax.jit
def train(state: TrainState, x: jax.Array, y: jax.Array) -> TrainState:
    def loss(params):
        return optax.softmax_cross_entropy_with_integer_labels(state.apply_fn(params, x), y).mean()

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads, value=value, weight=len(y))


def train_accumulated() -> TrainState:
    state = begin(multi_steps(optax.adamw(1e-2), ACCUMULATION_STEPS))
    for epoch in range(EPOCHS):
        for start in range(0, len(x_train), MICRO_BATCH_SIZE):  # the last micro-batch has 28
            rows = slice(start, start + MICRO_BATCH_SIZE)
            state = train(state, x_train[rows], y_train[rows])
        state = state.flush()  # the last window of an epoch is shorter
        last = state.opt_state
        print(f"epoch {epoch + 1:2}: {last.step} steps, loss of the last batch of {last.weight:.0f}: {last.value:.4f}")
    return state


def train_full() -> TrainState:
    """The plain loop, with nothing of bigbatch in it."""
    state, size = begin(optax.adamw(1e-2)), MICRO_BATCH_SIZE * ACCUMULATION_STEPS
    for _ in range(EPOCHS):
        for start in range(0, len(x_train), size):
            state = train(state, x_train[start : start + size], y_train[start : start + size])
    return state


ours, full = train_accumulated().params, train_full().params
pairs = zip(jax.tree.leaves(full), jax.tree.leaves(ours), strict=True)
gap = max(jnp.linalg.norm(a - b) / jnp.linalg.norm(a) for a, b in pairs)
accuracy = jnp.mean(model.apply(ours, x_test).argmax(1) == y_test)
print(f"the weights are {gap:.1e} apart, relative; accuracy on held-out digits: {accuracy:.1%}")
