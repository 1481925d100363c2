"""Checks the weight that a user passed and adds it up to one tensor, in eager code and in graphs."""

from typing import Any

import numpy as np
import tensorflow as tf

from ..core.errors import WeightError
from ..core.weight import check_weight
from .internals import is_for_xla

WEIGHT = tf.float64  # counts are exact in it
BAD_WEIGHT = (
    "the weight of a micro-batch is negative or not finite: a weight says over how many samples or tokens "
    "the loss is a mean, so it must be a finite number of at least 0"
)


def where(condition: Any, value: Any, other: Any) -> tf.Tensor:
    """The `where` for core/weight.py: tf.where does not mix Python numbers and float64 tensors."""
    return tf.where(condition, tf.cast(value, WEIGHT), tf.cast(other, WEIGHT))


def as_weight(weight: Any) -> tf.Tensor:
    """The weight that a user passed, as one number. A bad one is refused; in a graph, when the graph runs."""
    if not isinstance(weight, tf.Tensor | np.ndarray):
        return as_tensor(check_weight((weight,), of="this micro-batch")[0])
    summed, is_good = summed_weight(weight)
    if tf.executing_eagerly():
        if not is_good:
            bad = [float(w) for w in np.ravel(weight) if not (np.isfinite(w) and w >= 0)]
            check_weight((bad[0] if bad else float(summed),), of="this micro-batch")
        return summed
    return checked(summed, is_good)


def as_tensor(weight: Any) -> Any:
    """A plain number as a tensor. tf.cast takes it through float32."""
    return weight if tf.is_tensor(weight) else tf.constant(weight, WEIGHT)


def summed_weight(weight: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """The sum of a weight or of weights per sample, and whether all of them are finite and at least 0."""
    if isinstance(weight, tf.RaggedTensor | tf.SparseTensor | tf.IndexedSlices):
        raise WeightError(f"the weight is a {type(weight).__name__}: pass a number, or a dense tensor")
    weight = tf.convert_to_tensor(weight)
    if not (weight.dtype.is_floating or weight.dtype.is_integer or weight.dtype.is_bool):
        raise WeightError(f"the weight is a tensor of {weight.dtype.name}: pass numbers, of at least 0")
    wide = tf.cast(weight, WEIGHT)
    summed = tf.reduce_sum(wide)
    return summed, tf.reduce_all(wide >= 0) & tf.math.is_finite(summed)


def checked(value: tf.Tensor, is_good: tf.Tensor) -> tf.Tensor:
    """The weight, with a check in the graph. `checks.explained` turns it into a WeightError.

    XLA drops checks: there a bad weight becomes NaN, and the step is skipped.
    """
    if is_for_xla():
        return tf.where(is_good, value, tf.constant(np.nan, value.dtype))
    with tf.control_dependencies([tf.debugging.Assert(is_good, [BAD_WEIGHT])]):
        return tf.identity(value)
