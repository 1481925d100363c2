"""Gradient sums that outlive a call: for windows fed one micro-batch at a time, and for checkpoints in the middle."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from . import gradients, replicas
from .gradients import Gradient
from .window import WEIGHT, reduced


class Sums(tf.Module):
    """One sum for each variable, the weight so far, the loss so far, and how many micro-batches there were.

    Every replica has its own; they are added up once, at the end of the window. SUM lets a checkpoint hold the sum
    over replicas.
    """

    def __init__(self, variables: Sequence[Any], strategy: tf.distribute.Strategy) -> None:
        super().__init__(name="sums")
        self._is_shared = strategy.num_replicas_in_sync > 1
        with strategy.scope():
            self.gradients = [self._sum(v.shape, gradients.wide_dtype(v.dtype)) for v in variables]
            self.weight = self._sum([], WEIGHT)
            self.loss = self._sum([], WEIGHT)
            self.count = tf.Variable(0, trainable=False, name="count")
        self._has_gradient: set[int] = set()

    def _sum(self, shape: Any, dtype: tf.DType) -> tf.Variable:
        on_each = {
            "synchronization": tf.VariableSynchronization.ON_READ,
            "aggregation": tf.VariableAggregation.SUM,
        }
        return tf.Variable(tf.zeros(shape, dtype), trainable=False, **(on_each if self._is_shared else {}))

    def add(self, found: Sequence[Gradient], weight: tf.Tensor, loss: tf.Tensor) -> None:
        """On a replica: gradients that are multiplied by their weight already."""
        for k, (g, total) in enumerate(zip(found, self.gradients, strict=True)):
            if g is None:
                continue
            self._has_gradient.add(k)
            if isinstance(g, tf.IndexedSlices) and not self._is_shared:
                total.scatter_add(g)
            else:
                total.assign_add(gradients.dense(g))
        self.weight.assign_add(weight)
        self.loss.assign_add(loss)

    def read(self) -> tuple[list[Gradient], tf.Tensor, tf.Tensor]:
        """On a replica: gradients, weight and loss, added up over all of them, in one go."""
        own = [tf.identity(v) if k in self._has_gradient else None for k, v in enumerate(self.gradients)]
        weight, loss = tf.identity(self.weight), tf.identity(self.loss)
        if not replicas.is_shared():
            return own, weight, loss
        added, (weight, loss) = reduced(own, [weight, loss])
        return added, weight, loss

    def clear(self) -> None:
        """On a replica."""
        for v in (*self.gradients, self.weight, self.loss):
            v.assign(tf.zeros(v.shape, v.dtype))
        if tf.executing_eagerly():  # in a graph, what gets a gradient is known when it is made, once and for all
            self._has_gradient.clear()
