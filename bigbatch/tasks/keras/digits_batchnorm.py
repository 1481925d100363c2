"""Handwritten digits with a small convolutional net that has BatchNorm, so accumulation is not exact.

BatchNorm normalises by what it is fed: the micro-batch, not the batch. That can train as well (98% to 99% of the
held-out digits), but it is another training than that of the full batch.
"""

import keras
from keras import layers

from bigbatch.tasks import data

defaults = {"batch_size": 256, "micro_batch_size": 32, "epochs": 20, "lr": 1e-2}

loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def model() -> keras.Model:
    return keras.Sequential(
        [
            layers.Input((8, 8)),
            layers.Reshape((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", use_bias=False),
            layers.BatchNormalization(momentum=0.9, epsilon=1e-5),
            layers.Activation("gelu"),
            layers.Conv2D(16, 3, padding="same", use_bias=False),
            layers.BatchNormalization(momentum=0.9, epsilon=1e-5),
            layers.Activation("gelu"),
            layers.Conv2D(32, 3, strides=2, use_bias=False),
            layers.BatchNormalization(momentum=0.9, epsilon=1e-5),
            layers.Activation("gelu"),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


def batches(batch_size: int, epoch: int, seed: int) -> list[tuple[data.Array, data.Array]]:
    return data.digits().batches(batch_size, epoch, seed)


def evaluate(model: keras.Model) -> dict[str, float]:
    return {"accuracy": data.accuracy(model.predict_on_batch)}
