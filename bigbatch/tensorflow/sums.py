"""Gradient sums: in the loop of one graph (LoopSums), and in variables that outlive a call (SumVariables)."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from . import gradients
from .distributed import replicas
from .gradients import Gradient
from .graphs import Graphs
from .weight import WEIGHT

OTHER_VARIABLES = (
    "bigbatch: the variables that got a gradient are not the ones this graph was traced for: "
    "call add() and flush() in eager code"
)
# A table with more rows than this keeps its gradient sparse: a dense sum would touch all rows for every micro-batch.
_MANY_ROWS = 10_000


class BatchGradient(NamedTuple):
    """The gradient of the whole batch, over all micro-batches and replicas. Every replica has the same."""

    gradients: list[Gradient]
    losses: tf.Tensor
    total: tf.Tensor
    """The total weights, term by term."""
    num_micro_batches: tf.Tensor
    aux: Sequence[tf.Tensor] = ()
    """The leaves of aux; the rows are those of this replica."""


def is_kept_sparse(gradient: Gradient, variable: Any) -> bool:
    """Whether a gradient is added up as a list of entries. Replicas reduce dense gradients."""
    is_large = isinstance(gradient, tf.IndexedSlices) and variable.shape[0] > _MANY_ROWS
    return is_large and not replicas.is_shared()


class LoopSums:
    """The gradient sums of a loop in a graph: each micro-batch gets the sums so far, and returns the next.

    Dense gradients are added up. The entries of sparse gradients are kept in a list; those of the same row are added
    up at the end. `like` are the gradients of one micro-batch, as they were traced.
    """

    def __init__(self, like: Sequence[Gradient], variables: Sequence[Any], num_micro_batches: Any) -> None:
        self._like = {k: g for k, g in enumerate(like) if g is not None}
        self._variables = variables
        self._num = num_micro_batches
        self._sparse = {k for k, g in self._like.items() if is_kept_sparse(g, variables[k])}

    def start(self) -> dict[int, Any]:
        return {
            k: self._list(k) if k in self._sparse else tf.zeros(self._variables[k].shape, g.dtype)
            for k, g in self._like.items()
        }

    def add(self, sums: dict[int, Any], number: tf.Tensor, grads: Sequence[Gradient]) -> dict[int, Any]:
        return {
            k: _written(one, number, grads[k])
            if k in self._sparse
            else one + _dense(grads[k], self._variables[k].shape)
            for k, one in sums.items()
        }

    def skip(self, sums: dict[int, Any], number: tf.Tensor) -> dict[int, Any]:
        """After a micro-batch without weight the sums are the same, but its entry in a list must be written."""
        return {k: _written(one, number, self._no_rows(k)) if k in self._sparse else one for k, one in sums.items()}

    def finished(self, sums: dict[int, Any]) -> list[Gradient]:
        """The gradients, one for each variable."""
        return [self._joined(k, sums[k]) if k in self._sparse else sums.get(k) for k in range(len(self._variables))]

    def _list(self, k: int) -> Any:
        none = self._no_rows(k)
        return tuple(
            tf.TensorArray(part.dtype, size=self._num, element_shape=[None, *part.shape[1:]], infer_shape=False)
            for part in (none.values, none.indices)
        )

    def _no_rows(self, k: int) -> tf.IndexedSlices:
        like = self._like[k]
        rows = tf.zeros([0, *self._variables[k].shape[1:]], like.values.dtype)
        return tf.IndexedSlices(rows, tf.zeros([0], like.indices.dtype))

    def _joined(self, k: int, arrays: Any) -> tf.IndexedSlices:
        shape = tf.constant(self._variables[k].shape.as_list(), tf.int64)
        return gradients.without_repeats(tf.IndexedSlices(arrays[0].concat(), arrays[1].concat(), shape))


def _written(arrays: Any, number: tf.Tensor, slices: tf.IndexedSlices) -> tuple[tf.TensorArray, tf.TensorArray]:
    return arrays[0].write(number, slices.values), arrays[1].write(number, slices.indices)


def _dense(gradient: Gradient, shape: tf.TensorShape) -> tf.Tensor:
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, shape[0])  # XLA must know how many rows


class SumVariables(tf.Module):
    """One sum for each variable, with the weight, the losses and the number of micro-batches so far.

    Every replica has its own; they are added up once, at the end of the window. A checkpoint holds the sum over
    replicas.
    """

    def __init__(self, variables: Sequence[Any], strategy: tf.distribute.Strategy, num_terms: int = 1) -> None:
        super().__init__(name="sums")
        self._is_shared = strategy.num_replicas_in_sync > 1
        self._ids = tuple(map(id, variables))
        with strategy.scope():
            self.gradients = [replicas.own_sum(v.shape, gradients.wide_dtype(v.dtype), strategy) for v in variables]
            self.weight = replicas.own_sum([], WEIGHT, strategy)
            self.losses = replicas.own_sum([num_terms], WEIGHT, strategy)
            self.count = tf.Variable(0, trainable=False, name="count")
            """How many micro-batches were added: n, or ~n < 0 while eager code adds one more.

            So a checkpoint that is written after Ctrl-C knows that the sums have a part of a micro-batch.
            """
            self.opened_at = tf.Variable(-1, trainable=False, dtype=tf.int64, name="opened_at")
            """How many steps the optimizer had taken when the window was opened."""
            self.has_gradient = tf.Variable(tf.zeros([len(variables)], tf.bool), trainable=False, name="has_gradient")
        self.graphs = Graphs()
        """The graphs that use these variables."""
        self._added: set[int] = set()
        self._in_graphs: set[int] = set()

    def fits(self, variables: Sequence[Any], num_terms: int) -> bool:
        return self._ids == tuple(map(id, variables)) and self.losses.shape == [num_terms]

    def begin(self) -> None:
        """Across replicas, in eager code: a micro-batch begins."""
        self.count.assign(~self.num_whole())

    def add(self, grads: Sequence[Gradient], weight: tf.Tensor, losses: tf.Tensor) -> None:
        """On a replica: adds gradients and losses that were already multiplied by their share."""
        for k, (g, total) in enumerate(zip(grads, self.gradients, strict=True)):
            if g is None:
                continue
            self._added.add(k)
            if isinstance(g, tf.IndexedSlices) and not self._is_shared:
                total.scatter_add(g)
            else:
                total.assign_add(gradients.dense(g))
        self.weight.assign_add(weight)
        self.losses.assign_add(losses)

    def end(self, num_steps: tf.Tensor | None = None) -> None:
        """Across replicas: the micro-batch is complete. `num_steps` is how many steps the optimizer has taken."""
        num = self.num_whole() if tf.executing_eagerly() else tf.identity(self.count)
        if num_steps is not None:
            self.opened_at.assign(tf.where(tf.equal(num, 0), num_steps, self.opened_at))
        self.has_gradient.assign(self.has_gradient | [k in self._added for k in range(len(self.gradients))])
        self.count.assign(num + 1)
        if not tf.executing_eagerly():
            self._in_graphs |= self._added
        self._added.clear()

    def is_whole(self) -> bool:
        """In eager code: whether every `begin` had its `end`, without an exception in between."""
        return int(self.count.numpy()) >= 0

    def num_whole(self) -> int:
        """In eager code: how many micro-batches were added completely."""
        num = int(self.count.numpy())
        return num if num >= 0 else ~num

    def present(self) -> list[int]:
        """The numbers of the variables that got a gradient in this window; in a graph, those it is traced for."""
        with tf.init_scope():  # the window may be older than the graph
            so_far = {int(k) for k in np.flatnonzero(self.has_gradient.numpy())}
        return sorted(so_far if tf.executing_eagerly() else so_far | self._in_graphs)

    def read(self, present: Collection[int]) -> tuple[list[Gradient], tf.Tensor, tf.Tensor]:
        """On a replica: gradients, weight and losses, reduced over all replicas."""
        is_present = [k in present for k in range(len(self.gradients))]
        is_as_traced = tf.reduce_all(tf.equal(self.has_gradient, is_present))
        with tf.control_dependencies([tf.debugging.Assert(is_as_traced, [OTHER_VARIABLES])]):
            own = [tf.identity(v) if there else None for v, there in zip(self.gradients, is_present, strict=True)]
            weight, losses = tf.identity(self.weight), tf.identity(self.losses)
        if replicas.is_shared():
            own, (weight, losses) = replicas.reduce(own, [weight, losses])
        return own, weight, losses

    def clear(self) -> None:
        """On a replica."""
        for v in (*self.gradients, self.weight, self.losses):
            v.assign(tf.zeros(v.shape, v.dtype))

    def cleared(self) -> None:
        """Across replicas, after `clear` on each of them."""
        self.count.assign(0)
        self.has_gradient.assign(tf.zeros_like(self.has_gradient))
        self._added.clear()
