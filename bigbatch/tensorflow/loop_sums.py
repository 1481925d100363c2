"""What the loop over micro-batches adds up: dense gradients as they are, sparse ones of large tables as entries."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from . import gradients
from .distributed import replicas
from .gradients import Gradient


def sums_for(like: Sequence[Gradient], variables: Sequence[Any], num: Any) -> "dict[int, Sum]":
    """The sums of a window of `num` micro-batches, whose gradients are like these, by the variables' places."""
    return {
        place: SparseSum(g, v, num) if is_kept_sparse(g, v) else DenseSum(g, v)
        for place, (g, v) in enumerate(zip(like, variables, strict=True))
        if g is not None
    }


def is_kept_sparse(gradient: Gradient, variable: Any) -> bool:
    return gradients.is_kept_sparse(gradient, variable) and not replicas.is_shared()


class DenseSum:
    """Adds up inside of a loop."""

    def __init__(self, gradient: Gradient, variable: Any) -> None:
        self.shape, self.dtype = variable.shape, gradient.dtype

    def start(self) -> tf.Tensor:
        return tf.zeros(self.shape, self.dtype)

    def add(self, state: tf.Tensor, k: tf.Tensor, gradient: Gradient) -> tf.Tensor:
        return state + dense(gradient, self.shape)

    def skip(self, state: tf.Tensor, k: tf.Tensor) -> tf.Tensor:
        return state

    def finished(self, state: tf.Tensor) -> Gradient:
        return state


class SparseSum:
    """Strings the entries together inside of a loop; those of the same row are added up at the end."""

    def __init__(self, gradient: tf.IndexedSlices, variable: Any, num: Any) -> None:
        self.shape = variable.shape
        self.dtypes = gradient.values.dtype, gradient.indices.dtype
        self.num = num

    def start(self) -> Any:
        """With an empty entry behind the last: of a list without any, TensorFlow does not know how long it is."""
        row = self.shape[1:]
        return tuple(
            tf.TensorArray(dtype, size=self.num + 1, element_shape=[None, *each], infer_shape=False).write(
                self.num, tf.zeros([0, *each], dtype)
            )
            for dtype, each in zip(self.dtypes, (row, []), strict=True)
        )

    def add(self, state: Any, k: tf.Tensor, gradient: Gradient) -> Any:
        return state[0].write(k, gradient.values), state[1].write(k, gradient.indices)

    def skip(self, state: Any, k: tf.Tensor) -> Any:
        """TensorFlow strings no list together in which one is missing."""
        values, indices = self.dtypes
        return state[0].write(k, tf.zeros([0, *self.shape[1:]], values)), state[1].write(k, tf.zeros([0], indices))

    def finished(self, state: Any) -> Gradient:
        shape = tf.constant(self.shape.as_list(), tf.int64)
        return gradients.without_repeats(tf.IndexedSlices(state[0].concat(), state[1].concat(), shape))


Sum = DenseSum | SparseSum


def dense(gradient: Gradient, shape: tf.TensorShape) -> tf.Tensor:
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, shape[0])  # XLA wants to know how many rows
