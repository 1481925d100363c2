"""Trains on handwritten digits with JAX and optax: a batch of 384 in the memory of a micro-batch of 32."""

import jax
import optax
from sklearn import datasets, model_selection

from bigbatch.jax import value_and_grad, verify

images, classes = datasets.load_digits(return_X_y=True)
x, x_test, y, y_test = model_selection.train_test_split(images / 16, classes, test_size=297, random_state=0)
params = [jax.random.normal(jax.random.key(size), (64, size)) / 8 for size in (64, 10)]
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
state = optimizer.init(params)


def predict(params, x):
    return jax.nn.relu(x @ params[0]) @ params[1]


def loss(params, batch):
    return optax.softmax_cross_entropy_with_integer_labels(predict(params, batch[0]), batch[1]).mean()


@jax.jit
def step(params, state, batch):
    value, grads = value_and_grad(loss, micro_batch_size=32)(params, batch)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


for epoch in range(15):
    for start in range(0, len(x), 384):  # the last batch has 348 samples: ten micro-batches of 32, and one of 28
        params, state, value = step(params, state, (x[start : start + 384], y[start : start + 384]))
    print(f"epoch {epoch + 1:2}: loss of the last batch {value:.6f}")
print(f"accuracy on held-out digits: {(predict(params, x_test).argmax(1) == y_test).mean():.1%}")
print(verify(params, (x, y), loss, micro_batch_size=32))
