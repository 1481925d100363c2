"""Trains on handwritten digits with Flax Linen, one micro-batch of 32 at a time and a step every twelve."""

import jax
import optax
from flax import linen as nn
from sklearn import datasets, model_selection

from bigbatch.jax import multi_steps

images, classes = datasets.load_digits(return_X_y=True)
x, x_test, y, y_test = model_selection.train_test_split(images / 16, classes, test_size=297, random_state=0)
model = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(10)])
params = model.init(jax.random.key(0), x[:1])
optimizer = multi_steps(optax.adamw(1e-2), accumulation_steps=12)
state = optimizer.init(params)


@jax.jit
def step(params, state, x, y):
    def loss(params):
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, x), y).mean()

    value, grads = jax.value_and_grad(loss)(params)
    updates, state = optimizer.update(grads, state, params, value=value, weight=len(y))
    return optax.apply_updates(params, updates), state


for epoch in range(15):
    for start in range(0, len(x), 32):  # the last micro-batch has 28 samples
        params, state = step(params, state, x[start : start + 32], y[start : start + 32])
    updates, state = optimizer.flush(state, params)  # the last window has eleven micro-batches
    params = optax.apply_updates(params, updates)
    print(f"epoch {epoch + 1:2}: {state.step} steps, loss of the last {state.weight:.0f} samples {state.value:.6f}")
print(f"accuracy on held-out digits: {(model.apply(params, x_test).argmax(1) == y_test).mean():.1%}")
