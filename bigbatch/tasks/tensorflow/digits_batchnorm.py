"""Handwritten digits with a small convolutional net that has BatchNorm, so accumulation is not exact.

BatchNorm normalises by what it is fed: the micro-batch, not the batch. That can train as well (98% to 99% of the
held-out digits), but it is another training than that of the full batch.
"""

from typing import Any

import keras
import tensorflow as tf
from keras import layers

from bigbatch.tasks import data

Batch = tuple[Any, Any]

defaults = {"batch_size": 256, "micro_batch_size": 32, "epochs": 20, "lr": 1e-2}


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


def batches(batch_size: int, epoch: int, seed: int) -> list[Batch]:
    return data.digits().batches(batch_size, epoch, seed)


def loss(model: keras.Model, batch: Batch) -> tf.Tensor:
    x, y = batch
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True)))


def evaluate(model: keras.Model) -> dict[str, float]:
    return {"accuracy": data.accuracy(model.predict_on_batch)}
