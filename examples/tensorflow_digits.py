"""Trains on handwritten digits in a loop with a GradientTape: micro-batches of 32, and a step every 12.

Training with the full batch gives the same weights.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from bigbatch.tensorflow import Accumulator

MICRO_BATCH_SIZE, ACCUMULATION_STEPS, EPOCHS = 32, 12, 15

images, classes = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(images))
x = (images[order] / 16.0).astype("float32").reshape(-1, 8, 8, 1)
y = classes[order]
x_train, y_train, x_test, y_test = x[:1500], y[:1500], x[1500:], y[1500:]
cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def make_model() -> keras.Model:
    keras.utils.set_random_seed(0)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.Conv2D(32, 3, strides=2, activation="relu"),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


def train_accumulated() -> keras.Model:
    model = make_model()
    accumulator = Accumulator(model, keras.optimizers.Adam(1e-2), accumulation_steps=ACCUMULATION_STEPS)

    @tf.function(reduce_retracing=True)
    def micro_step(x: tf.Tensor, y: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = cross_entropy(y, model(x, training=True))
        accumulator.add(tape.gradient(loss, model.trainable_variables), weight=tf.shape(y)[0], loss=loss)

    data = tf.data.Dataset.from_tensor_slices((x_train, y_train)).batch(MICRO_BATCH_SIZE)
    for epoch in range(EPOCHS):
        for micro_batch in data:
            micro_step(*micro_batch)
        step = accumulator.flush() or accumulator.last_step  # the last window of an epoch is shorter
        print(f"epoch {epoch + 1:2}: loss of the last batch {step.loss:.4f}, {step.num_micro_batches} micro-batches")
    return model


def train_full() -> keras.Model:
    """The plain loop, without bigbatch."""
    model = make_model()
    optimizer = keras.optimizers.Adam(1e-2)
    size = MICRO_BATCH_SIZE * ACCUMULATION_STEPS
    for _ in range(EPOCHS):
        for start in range(0, len(x_train), size):
            rows = slice(start, start + size)
            with tf.GradientTape() as tape:
                loss = cross_entropy(y_train[rows], model(x_train[rows], training=True))
            variables = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    return model


ours, full = train_accumulated(), train_full()
gap = max(
    np.linalg.norm(a - b) / np.linalg.norm(a) for a, b in zip(full.get_weights(), ours.get_weights(), strict=True)
)
accuracy = np.mean(np.argmax(ours(x_test), 1) == y_test)
print(f"the weights are {gap:.0e} apart, relative (float32); accuracy on held-out digits: {accuracy:.1%}")
