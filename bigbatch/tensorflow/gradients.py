"""Gradients, dense or sparse: added up in at least float32, scaled, measured and clipped."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

Gradient = Any  # tf.Tensor, tf.IndexedSlices or None


def wide_dtype(dtype: tf.DType) -> tf.DType:
    return tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype


def widened(gradient: Gradient, shape: tf.TensorShape | None = None) -> Gradient:
    """A gradient in the dtype of its sum, and with the variable's shape, which tf.py_function forgets."""
    if shape is not None and isinstance(gradient, tf.Tensor):
        gradient.set_shape(shape)
    if gradient is None or gradient.dtype == wide_dtype(gradient.dtype):
        return gradient
    return tf.cast(gradient, wide_dtype(gradient.dtype))


def dense(gradient: Gradient) -> Gradient:
    return tf.convert_to_tensor(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient


def without_repeats(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Adds up the entries of the same row, because Keras 3.15's Adam is wrong on repeated rows."""
    rows, place = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, place, tf.shape(rows)[0])
    return tf.IndexedSlices(values, rows, slices.dense_shape)


def values(gradients: Sequence[Gradient]) -> list[tf.Tensor]:
    """The values of all gradients that are not None."""
    return [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients if g is not None]


def mapped(change: Callable[[tf.Tensor], tf.Tensor], gradients: Sequence[Gradient]) -> list[Gradient]:
    """Applies a function to the values of each gradient."""

    def one(g: Gradient) -> Gradient:
        if g is None:
            return None
        if isinstance(g, tf.IndexedSlices):
            return tf.IndexedSlices(change(g.values), g.indices, g.dense_shape)
        return change(g)

    return [one(g) for g in gradients]


def cast(gradient: Gradient, dtype: tf.DType) -> Gradient:
    """A gradient in another dtype."""
    return mapped(lambda g: tf.cast(g, dtype), [gradient])[0]


def scaled(gradients: Sequence[Gradient], factor: tf.Tensor) -> list[Gradient]:
    return mapped(lambda g: g * tf.cast(factor, g.dtype), gradients)


def weighted(gradients: Sequence[Gradient], weight: tf.Tensor) -> list[Gradient]:
    """Gradients times a weight; 0 where the weight is 0, even if the gradient is NaN (0/0)."""
    return mapped(lambda g: tf.math.multiply_no_nan(g, tf.cast(weight, g.dtype)), gradients)


def added(one: Gradient, other: Gradient) -> Gradient:
    """The sum of two; if both are sparse, their entries are concatenated."""
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
    squares = _sum_of_squares(numbers)

    def wide() -> tf.Tensor:
        """The squares of finite numbers may overflow in float32."""
        return _sum_of_squares([tf.cast(tf.abs(g), tf.float64) for g in numbers])

    return tf.sqrt(tf.cond(tf.math.is_finite(squares), lambda: squares, wide))


def first_not_finite(gradients: Sequence[Gradient]) -> tf.Tensor:
    """The index of the first gradient that is not finite; -1 if all are."""
    present = [k for k, g in enumerate(gradients) if g is not None]
    is_bad = tf.stack([~tf.reduce_all(tf.math.is_finite(tf.abs(numbers))) for numbers in values(gradients)])
    return tf.where(tf.reduce_any(is_bad), tf.gather(present, tf.argmax(is_bad)), -1)


def _sum_of_squares(numbers: Sequence[tf.Tensor]) -> tf.Tensor:
    """In float64: one pass over each tensor, then one sum for each dtype."""
    halves = [tf.nn.l2_loss(tf.abs(n) if n.dtype.is_complex else n) for n in numbers]
    alike = [tf.stack([half for half in halves if half.dtype == dtype]) for dtype in {half.dtype for half in halves}]
    return 2 * tf.add_n([tf.reduce_sum(tf.cast(each, tf.float64)) for each in alike])


def clipped_by_norm(gradients: Sequence[Gradient], norm: tf.Tensor, limit: float) -> list[Gradient]:
    """Scaled down to this norm over all of them, as tf.clip_by_global_norm does.

    If the norm is not finite, they stay as they are, so that the first bad one can be named.
    """
    wide = tf.constant(limit, tf.float64)  # tf.cast takes a plain number through float32
    factor = wide / tf.maximum(norm, wide)
    return scaled(gradients, tf.where(tf.math.is_finite(norm), factor, tf.ones_like(factor)))


def clipped_by_value(gradients: Sequence[Gradient], limit: float, loss_scale: tf.Tensor) -> list[Gradient]:
    """Each value clamped to the limit times the loss scale, which the gradients have.

    Values that are not finite stay: an optimizer that scales the loss must see them.
    """

    def clip(g: tf.Tensor) -> tf.Tensor:
        bound = tf.constant(limit, g.dtype) * tf.cast(loss_scale, g.dtype)
        return tf.where(tf.math.is_finite(g), tf.clip_by_value(g, -bound, bound), g)

    return mapped(clip, gradients)
