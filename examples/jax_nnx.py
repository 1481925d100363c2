"""Trains on handwritten digits with Flax NNX: 384 samples in micro-batches of 32, with the full batch's dropout."""

import jax
import optax
from flax import nnx
from sklearn import datasets, model_selection

from bigbatch.jax import value_and_grad, verify

images, classes = datasets.load_digits(return_X_y=True)
x, x_test, y, y_test = model_selection.train_test_split(images / 16, classes, test_size=297, random_state=0)
rngs, optimizer = nnx.Rngs(0), optax.adam(1e-2)
model = nnx.Sequential(nnx.Linear(64, 64, rngs=rngs), nnx.relu, nnx.Dropout(0.2), nnx.Linear(64, 10, rngs=rngs))
graph, params = nnx.split(model)
state = optimizer.init(params)


def loss(params, batch, keys):  # one key per sample
    logits = jax.vmap(lambda x, key: nnx.merge(graph, params)(x, rngs=key))(batch[0], keys)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()


@jax.jit
def step(params, state, batch, key):
    value, grads = value_and_grad(loss, micro_batch_size=32, rng="per_sample")(params, batch, key)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


for epoch in range(20):
    for start in range(0, len(x), 384):  # the last batch has 348 samples: ten micro-batches of 32, and one of 28
        params, state, value = step(params, state, (x[start : start + 384], y[start : start + 384]), rngs())
    print(f"epoch {epoch + 1:2}: loss of the last batch {value:.6f}")
model = nnx.view(nnx.merge(graph, params), deterministic=True)
print(f"accuracy on held-out digits: {(model(x_test).argmax(1) == y_test).mean():.1%}")
print(verify(params, (x, y), loss, micro_batch_size=32, rng="per_sample", args=(rngs(),)))
