"""Handwritten digits with a small convolutional net. It has no BatchNorm, so accumulation is exact.

Recognises 98% of the held-out digits after 20 epochs.
"""

from typing import Any

import keras
import tensorflow as tf

from bigbatch.tasks.keras.digits import batches, defaults, evaluate, model

__all__ = ["batches", "defaults", "evaluate", "loss", "model"]

Batch = tuple[Any, Any]


def loss(model: keras.Model, batch: Batch) -> tf.Tensor:
    x, y = batch
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True)))
