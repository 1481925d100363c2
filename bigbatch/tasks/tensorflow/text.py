"""The text of Python's help topics, byte by byte, with a small GPT.

Texts differ in length, so micro-batches differ in weight: `weight` counts the bytes that each predicts.
Reaches 2.2 bits per byte on held-out paragraphs after 6 epochs (guessing costs 8).
"""

from typing import Any

import keras
import tensorflow as tf

from bigbatch.tasks import data
from bigbatch.tasks.keras.text import batches, defaults, evaluate, model

__all__ = ["batches", "defaults", "evaluate", "loss", "model", "weight"]

Batch = tuple[Any, Any]


def loss(model: keras.Model, batch: Batch) -> tf.Tensor:
    x, y = batch
    is_counted = y != data.IGNORED
    logits = tf.boolean_mask(model(x, training=True), is_counted)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(tf.boolean_mask(y, is_counted), logits))


def weight(micro_batch: Batch) -> tf.Tensor:
    return tf.math.count_nonzero(micro_batch[1] != data.IGNORED)
