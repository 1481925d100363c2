"""Handwritten digits with a small convolutional net that has BatchNorm, so accumulation is not exact.

BatchNorm normalises by what it is fed: the micro-batch, not the batch. That can train as well (98% to 99% of the
held-out digits), but it is another training than that of the full batch.
"""

import keras
from keras import layers

from bigbatch.tasks.keras.digits import batches, defaults, evaluate, loss

__all__ = ["batches", "defaults", "evaluate", "loss", "model"]


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
