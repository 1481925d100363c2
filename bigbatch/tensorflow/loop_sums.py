"""What the loop over micro-batches adds up: each large gradient by itself, small ones joined, sparse ones as entries.

Every value that a loop hands on costs operations of its own in each iteration, however small it is: the addition, and
those by which TensorFlow hands it on. Many variables of a model are small: biases, scales.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from . import gradients, replicas
from .gradients import Gradient

SMALL = 4096
"""Numbers that are copied sooner than they are handed on."""


def sums_for(like: Sequence[Gradient], variables: Sequence[Any], num: Any, *, is_joining: bool) -> "list[Sum]":
    """The sums of a window of `num` micro-batches, whose gradients are like these."""
    found: list[Sum] = []
    small: dict[tf.DType, list[int]] = {}
    for place, (gradient, variable) in enumerate(zip(like, variables, strict=True)):
        if gradient is None:
            continue
        if is_kept_sparse(gradient, variable):
            found.append(SparseSum(place, gradient, variable, num))
        elif is_joining and variable.shape.num_elements() <= SMALL:
            small.setdefault(gradient.dtype, []).append(place)
        else:
            found.append(DenseSum([place], [variable.shape], gradient.dtype))
    joined = (DenseSum(places, [variables[p].shape for p in places], dtype) for dtype, places in small.items())
    return [*found, *joined]


def is_kept_sparse(gradient: Gradient, variable: Any) -> bool:
    return gradients.is_kept_sparse(gradient, variable) and not replicas.is_shared()


class DenseSum:
    """The sum of one gradient, or of several, one behind the other."""

    def __init__(self, places: list[int], shapes: list[tf.TensorShape], dtype: tf.DType) -> None:
        self.places, self.shapes, self.dtype = places, shapes, dtype
        self.sizes = [shape.num_elements() for shape in shapes]

    def start(self) -> tf.Tensor:
        return tf.zeros(self.shapes[0] if len(self.shapes) == 1 else [sum(self.sizes)], self.dtype)

    def add(self, state: tf.Tensor, k: tf.Tensor, found: Sequence[Gradient]) -> tf.Tensor:
        parts = [dense(found[place], shape) for place, shape in zip(self.places, self.shapes, strict=True)]
        return state + (parts[0] if len(parts) == 1 else tf.concat([tf.reshape(part, [-1]) for part in parts], 0))

    def finished(self, state: tf.Tensor) -> dict[int, Gradient]:
        if len(self.places) == 1:
            return {self.places[0]: state}
        parts = zip(tf.split(state, self.sizes), self.shapes, strict=True)
        return dict(zip(self.places, itertools.starmap(tf.reshape, parts), strict=True))


class SparseSum:
    """Strings the entries together inside of a loop; those of the same row are added up at the end."""

    def __init__(self, place: int, gradient: tf.IndexedSlices, variable: Any, num: Any) -> None:
        self.place = place
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

    def add(self, state: Any, k: tf.Tensor, found: Sequence[Gradient]) -> Any:
        gradient = found[self.place]
        return state[0].write(k, gradient.values), state[1].write(k, gradient.indices)

    def finished(self, state: Any) -> dict[int, Gradient]:
        shape = tf.constant(self.shape.as_list(), tf.int64)
        slices = tf.IndexedSlices(state[0].concat(), state[1].concat(), shape)
        return {self.place: gradients.without_repeats(slices)}


Sum = DenseSum | SparseSum


def dense(gradient: Gradient, shape: tf.TensorShape) -> tf.Tensor:
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, shape[0])  # XLA wants to know how many rows
