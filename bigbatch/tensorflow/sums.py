"""Gradient sums that outlive a call: for windows fed one micro-batch at a time, and for checkpoints in the middle."""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from . import gradients
from .checks import WEIGHT
from .distributed import replicas
from .gradients import Gradient
from .graphs import Graphs
from .window import reduced

OTHER_VARIABLES = (
    "bigbatch: other variables got a gradient in this window than the graph that ends it was made for: "
    "call add() and flush() in eager code"
)


class Sums(tf.Module):
    """One sum for each variable, the weight so far, the loss so far, and how many micro-batches there were.

    Every replica has its own; they are added up once, at the end of the window. SUM lets a checkpoint hold the sum
    over replicas.
    """

    def __init__(self, variables: Sequence[Any], strategy: tf.distribute.Strategy, num_terms: int = 1) -> None:
        super().__init__(name="sums")
        self._is_shared = strategy.num_replicas_in_sync > 1
        self._ids = tuple(map(id, variables))
        with strategy.scope():
            self.gradients = [self._sum(v.shape, gradients.wide_dtype(v.dtype)) for v in variables]
            self.weight = self._sum([], WEIGHT)
            self.losses = self._sum([num_terms], WEIGHT)
            self.count = tf.Variable(0, trainable=False, name="count")
            """~count, which is negative, while a micro-batch is being added in eager code."""
            self.opened_at = tf.Variable(-1, trainable=False, dtype=tf.int64, name="opened_at")
            """How often the optimizer had stepped when the window was opened."""
            self.has_gradient = tf.Variable(tf.zeros([len(variables)], tf.bool), trainable=False, name="has_gradient")
        self.graphs = Graphs()
        """Those that use these variables, and are gone with them."""
        self._added: set[int] = set()
        self._in_graphs: set[int] = set()

    def _sum(self, shape: Any, dtype: tf.DType) -> tf.Variable:
        on_each = {
            "synchronization": tf.VariableSynchronization.ON_READ,
            "aggregation": tf.VariableAggregation.SUM,
        }
        return tf.Variable(tf.zeros(shape, dtype), trainable=False, **(on_each if self._is_shared else {}))

    def fits(self, variables: Sequence[Any], num_terms: int) -> bool:
        return self._ids == tuple(map(id, variables)) and self.losses.shape == [num_terms]

    def add(self, found: Sequence[Gradient], weight: tf.Tensor, losses: tf.Tensor) -> None:
        """On a replica: gradients that are multiplied by their weight already."""
        for k, (g, total) in enumerate(zip(found, self.gradients, strict=True)):
            if g is None:
                continue
            self._added.add(k)
            if isinstance(g, tf.IndexedSlices) and not self._is_shared:
                total.scatter_add(g)
            else:
                total.assign_add(gradients.dense(g))
        self.weight.assign_add(weight)
        self.losses.assign_add(losses)

    def began(self) -> None:
        """Across replicas, in eager code: what is added from now on is one micro-batch."""
        self.count.assign(~self.num_whole())

    def is_whole(self) -> bool:
        """In eager code: whether no micro-batch was added in part, as if an exception came in between."""
        return int(self.count.numpy()) >= 0

    def num_whole(self) -> int:
        """In eager code: how many micro-batches there are, without one that was added in part."""
        count = int(self.count.numpy())
        return count if count >= 0 else ~count

    def counted(self, num_steps: tf.Tensor | None = None) -> None:
        """Across replicas: what was added on each is one micro-batch, when the optimizer had stepped so often."""
        count = self.num_whole() if tf.executing_eagerly() else tf.identity(self.count)
        if num_steps is not None:
            self.opened_at.assign(tf.where(tf.equal(count, 0), num_steps, self.opened_at))
        self.has_gradient.assign(self.has_gradient | [k in self._added for k in range(len(self.gradients))])
        self.count.assign(count + 1)
        if not tf.executing_eagerly():
            self._in_graphs |= self._added
        self._added.clear()

    def present(self) -> list[int]:
        """The variables that got a gradient in this window; in a graph, those that it is to be made for."""
        with tf.init_scope():  # the window may be older than the graph
            found = {int(k) for k in np.flatnonzero(self.has_gradient.numpy())}
        return sorted(found if tf.executing_eagerly() else found | self._in_graphs)

    def read(self, present: Collection[int]) -> tuple[list[Gradient], tf.Tensor, tf.Tensor]:
        """On a replica: gradients, weight and losses, added up over all of them, in one go."""
        is_present = [k in present for k in range(len(self.gradients))]
        is_as_made = tf.reduce_all(tf.equal(self.has_gradient, is_present))
        with tf.control_dependencies([tf.debugging.Assert(is_as_made, [OTHER_VARIABLES])]):
            own = [tf.identity(v) if there else None for v, there in zip(self.gradients, is_present, strict=True)]
            weight, losses = tf.identity(self.weight), tf.identity(self.losses)
        if not replicas.is_shared():
            return own, weight, losses
        added, (weight, losses) = reduced(own, [weight, losses])
        return added, weight, losses

    def clear(self) -> None:
        """On a replica."""
        for v in (*self.gradients, self.weight, self.losses):
            v.assign(tf.zeros(v.shape, v.dtype))

    def cleared(self) -> None:
        """Across replicas: after `clear` on each of them."""
        self.count.assign(0)
        self.has_gradient.assign(tf.zeros_like(self.has_gradient))
        self._added.clear()
