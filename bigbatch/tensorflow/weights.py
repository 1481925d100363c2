"""Ready-made weights: how many tokens, or which sum of class weights, a loss averages over.

    from bigbatch.tensorflow import Accumulator, weights

    accumulator = Accumulator(model, optimizer, loss, micro_batch_size=8, weight=weights.tokens("y"))

They work in graphs and in eager code.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from ..core import labels as core_labels
from ..core.labels import IGNORED, Where
from .weight import WEIGHT

__all__ = ["causal_lm_tokens", "class_weights", "sample_weights", "tokens"]

Weight = Callable[[Any], tf.Tensor]
_without_autograph = tf.autograph.experimental.do_not_convert


@_without_autograph
def causal_lm_tokens(batch: Any) -> tf.Tensor:
    """The number of tokens that a causal language model predicts, if the model shifts the labels itself.

        weight = tf.math.count_nonzero(batch["labels"][..., 1:] != -100)

    Hugging Face's causal models do: position t predicts label t + 1, so the first label of a sequence is never a
    target. KerasHub's preprocessors shift the labels beforehand, so those are not for this function. For labels
    elsewhere, or another `ignore_index`, use `tokens(…, shift=True)`.

    Args:
        batch: A mapping with "labels", or an object with that attribute.
    """
    return _num_tokens("labels", IGNORED, True, batch)


def tokens(labels: Where = "labels", ignore_index: int = IGNORED, *, shift: bool = False) -> Weight:
    """Returns a weight function that counts the labels that are not ignored.

        weight = lambda batch: tf.math.count_nonzero(batch[labels] != ignore_index)

    This is what a Keras cross-entropy with `ignore_class` divides by.

    Args:
        labels: The key or attribute of the labels, their index in a tuple, or a function of the batch.
        ignore_index: The label that does not count.
        shift: Whether position t predicts label t + 1, so that the first label of each sequence does not count.
    """
    return partial(_num_tokens, labels, ignore_index, shift)


def class_weights(
    weights: Any, labels: Where = "labels", ignore_index: int = IGNORED, *, shift: bool = False
) -> Weight:
    """Returns a weight function for a cross-entropy that divides by the class weights of its labels.

        weight = lambda batch: tf.reduce_sum(tf.gather(weights, batch[labels]))      # without ignored labels

    Keras's `class_weight` divides by the number of samples instead, and needs no weight.

    Args:
        weights: The weight of each class.
        labels: The key or attribute of the labels, their index in a tuple, or a function of the batch.
        ignore_index: The label that does not count.
        shift: Whether position t predicts label t + 1, so that the first label of each sequence does not count.
    """
    table = np.asarray(weights, WEIGHT.as_numpy_dtype)
    core_labels.check_table(table.shape, is_good=bool(np.all(np.isfinite(table) & (table >= 0))))
    return partial(_of_classes, table, labels, ignore_index, shift)


def sample_weights(where: Where = "sample_weight") -> Weight:
    """Returns a weight function that adds up the weights, or the mask, that the batch holds.

        weight = lambda batch: tf.reduce_sum(batch[where])

    It is right for losses that divide by this sum. Keras's losses divide by it with
    `reduction="mean_with_sample_weight"`; by default they divide by the number of samples, and need no weight.

    Args:
        where: The key or attribute of the weights, their index in a tuple, or a function of the batch.
    """
    return partial(_of_samples, where)


@_without_autograph
def _num_tokens(where: Where, ignore_index: int, shift: bool, batch: Any) -> tf.Tensor:
    return tf.math.count_nonzero(_labels(batch, where, shift) != ignore_index)


@_without_autograph
def _of_classes(table: np.ndarray, where: Where, ignore_index: int, shift: bool, batch: Any) -> tf.Tensor:
    found = _labels(batch, where, shift)
    num = len(table)
    is_counted = found != ignore_index
    is_known = (found >= 0) & (found < num)
    if tf.executing_eagerly() and len(counted := found.numpy()[(is_counted & ~is_known).numpy()]):
        raise core_labels.out_of_range(int(counted.min()), int(counted.max()), num)
    # in a graph a label without a weight gives NaN, which the accumulator refuses when the graph runs
    each = tf.where(is_known, tf.gather(table, tf.clip_by_value(found, 0, num - 1)), np.nan)
    return tf.reduce_sum(tf.where(is_counted, each, 0))


@_without_autograph
def _of_samples(where: Where, batch: Any) -> tf.Tensor:
    return tf.convert_to_tensor(core_labels.find_weights(batch, where))  # the accumulator adds them up


def _labels(batch: Any, where: Where, shift: bool) -> tf.Tensor:
    found = core_labels.find_labels(batch, where, shift=shift)
    if isinstance(found, tf.RaggedTensor):
        found = found[..., 1:].flat_values if shift else found.flat_values
        shift = False
    found = tf.convert_to_tensor(found)
    core_labels.check_labels(found.dtype.name, found.shape, is_integer=found.dtype.is_integer, shift=shift)
    found = tf.cast(found, tf.int64)  # -100 is 156 in uint8
    return found[..., 1:] if shift else found
