"""Gradient sums: in at least float32, dense or sparse, then finished as one gradient."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

Gradient = Any  # tf.Tensor, tf.IndexedSlices or None

# A table with more rows than this keeps its gradient sparse: adding it up densely would touch all of them for
# every micro-batch. Entries of the same row are added up before they reach the optimizer, since Keras 3.15's Adam
# is off on repeated rows.
MANY_ROWS = 10_000


def wide_dtype(dtype: tf.DType) -> tf.DType:
    return tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype


def widened(gradient: Gradient, shape: tf.TensorShape | None = None) -> Gradient:
    """A gradient in the dtype in which it is added up, and of the variable's shape, which tf.py_function forgets."""
    if shape is not None and isinstance(gradient, tf.Tensor):
        gradient.set_shape(shape)
    if gradient is None or gradient.dtype == wide_dtype(gradient.dtype):
        return gradient
    return tf.cast(gradient, wide_dtype(gradient.dtype))


def dense(gradient: Gradient) -> Gradient:
    return tf.convert_to_tensor(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient


def is_kept_sparse(gradient: Gradient, variable: tf.Variable) -> bool:
    return isinstance(gradient, tf.IndexedSlices) and variable.shape[0] > MANY_ROWS


def without_repeats(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Entries of the same row added up."""
    rows, place = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, place, tf.shape(rows)[0])
    return tf.IndexedSlices(values, rows, slices.dense_shape)


def values(gradients: Sequence[Gradient]) -> list[tf.Tensor]:
    """The numbers in the gradients, wherever there are any."""
    return [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients if g is not None]


def mapped(change: Callable[[tf.Tensor], tf.Tensor], gradients: Sequence[Gradient]) -> list[Gradient]:
    """The gradients with their numbers changed."""

    def one(g: Gradient) -> Gradient:
        if g is None:
            return None
        if isinstance(g, tf.IndexedSlices):
            return tf.IndexedSlices(change(g.values), g.indices, g.dense_shape)
        return change(g)

    return [one(g) for g in gradients]


def scaled(gradients: Sequence[Gradient], factor: tf.Tensor) -> list[Gradient]:
    return mapped(lambda g: g * tf.cast(factor, g.dtype), gradients)


def weighted(gradients: Sequence[Gradient], weight: tf.Tensor) -> list[Gradient]:
    """What counts nothing is left out, even if it is not a number (0/0)."""
    return mapped(lambda g: tf.math.multiply_no_nan(g, tf.cast(weight, g.dtype)), gradients)


def added(one: Gradient, other: Gradient) -> Gradient:
    """The sum of two; entries of sparse ones behind each other."""
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, tf.IndexedSlices) and isinstance(other, tf.IndexedSlices):
        both = one, other
        values, indices = (tf.concat(each, 0) for each in ([g.values for g in both], [g.indices for g in both]))
        return tf.IndexedSlices(values, indices, one.dense_shape)
    return dense(one) + dense(other)


def norm(gradients: Sequence[Gradient]) -> tf.Tensor:
    """The norm over all of them, in float64."""
    numbers = values(gradients)
    squares = sum_of_squares(numbers)

    def wide() -> tf.Tensor:
        """Finite numbers may have squares that are too large for float32."""
        return sum_of_squares([tf.cast(tf.abs(g), tf.float64) for g in numbers])

    return tf.sqrt(tf.cond(tf.math.is_finite(squares), lambda: squares, wide))


def first_not_finite(gradients: Sequence[Gradient]) -> tf.Tensor:
    """The place of the first gradient that is not finite; -1 if all are."""
    present = [k for k, g in enumerate(gradients) if g is not None]
    is_bad = tf.stack([~tf.reduce_all(tf.math.is_finite(tf.abs(numbers))) for numbers in values(gradients)])
    return tf.where(tf.reduce_any(is_bad), tf.gather(present, tf.argmax(is_bad)), -1)


def sum_of_squares(numbers: Sequence[tf.Tensor]) -> tf.Tensor:
    """Over all of them, in float64: one pass over each, and what follows once for each dtype, not for each tensor."""
    halves = [tf.nn.l2_loss(tf.abs(n) if n.dtype.is_complex else n) for n in numbers]
    alike = [tf.stack([half for half in halves if half.dtype == dtype]) for dtype in {half.dtype for half in halves}]
    return 2 * tf.add_n([tf.reduce_sum(tf.cast(each, tf.float64)) for each in alike])


def clipped(
    gradients: Sequence[Gradient], total_norm: tf.Tensor, clip_norm: float | None, clip_value: float | None, unit: Any
) -> list[Gradient]:
    """By the norm over all as tf.clip_by_global_norm does it, then by value.

    `unit` is the scale of the loss, which the gradients have and their norm has not.
    """
    result = list(gradients)
    if clip_norm is not None:
        limit = tf.constant(clip_norm, tf.float64)  # tf.cast takes a plain number through float32
        factor = limit / tf.maximum(total_norm, limit)
        # what is not finite stays where it is, so that it can be named
        result = scaled(result, tf.where(tf.math.is_finite(total_norm), factor, tf.ones_like(factor)))
    if clip_value is not None:

        def clip(g: tf.Tensor) -> tf.Tensor:
            limit = tf.constant(clip_value, g.dtype) * tf.cast(unit, g.dtype)
            # what is not finite stays so: an optimizer that scales the loss must see it
            return tf.where(tf.math.is_finite(g), tf.clip_by_value(g, -limit, limit), g)

        result = mapped(clip, result)
    return result
