"""Losses that divide by the number of replicas, or by the size of the whole batch, as TensorFlow's guide teaches it.

Keras's losses, `tf.nn.compute_average_loss` and `tf.nn.scale_regularization_loss` divide by
`strategy.num_replicas_in_sync`, since TensorFlow adds gradients up over replicas. bigbatch weights the replicas by
what they have, so to it a loss is the mean over one replica's micro-batch: where it is computed there is one replica.
"""

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from ...core.errors import LossError
from .. import internals


class Share:
    """How much of the whole batch counts in the loss that is being computed: w_k / W."""

    def __init__(self, value: Any = None) -> None:
        self.value = value
        """None if it is not known."""
        self.is_used = False


class _Here(threading.local):
    """What holds on this thread; TensorFlow runs every replica on a thread of its own."""

    share: Share | None = None


_here = _Here()
_asking: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""The replica contexts in which a loss asked for the number of replicas, and was told."""


@contextmanager
def one_replica(share: Share) -> Iterator[None]:
    """Inside, on this thread, strategies have one replica."""
    before, _here.share = _here.share, share
    try:
        yield
    finally:
        _here.share = before


def check_loss() -> None:
    """On a replica: refuses gradients of a loss that divided by the number of replicas, or by the whole batch."""
    context = tf.distribute.get_replica_context()
    if context in _asking:
        _asking.discard(context)
        raise LossError(
            f"the loss asked for the number of replicas ({context.num_replicas_in_sync}) or divided by a "
            "global_batch_size, as Keras's losses and tf.nn.compute_average_loss do, but add() wants the mean over the "
            "micro-batch: compute it in `with tf.GradientTape() as tape, accumulator.one_replica():`"
        )


def _note() -> None:
    context = tf.distribute.get_replica_context()
    if context is not None and internals.is_recording():
        _asking.add(context)


def _num_replicas(real: int) -> int:
    if _here.share is not None:
        return 1
    if real > 1:
        _note()
    return real


def _averaging(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def compute_average_loss(per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None) -> Any:
        value = plain(per_example_loss, sample_weight, global_batch_size)
        share = _here.share
        if global_batch_size is None:
            return value
        if share is None:
            if tf.distribute.get_strategy().num_replicas_in_sync > 1:
                _note()
            return value
        if share.value is None:
            raise LossError(
                "tf.nn.compute_average_loss divides by a global_batch_size, but the loss must be the mean over the "
                "micro-batch here: leave global_batch_size out"
            )
        share.is_used = True
        by = tf.where(_is_of_micro_batch(global_batch_size, per_example_loss), tf.ones([], tf.float64), share.value)
        return value / tf.cast(by, value.dtype)  # which the accumulator multiplies by

    return compute_average_loss


def _is_of_micro_batch(global_batch_size: Any, per_example_loss: Any) -> Any:
    """Whether this size is not the whole batch's: computed from the micro-batch, times the number of replicas."""
    if not tf.executing_eagerly() and tf.get_static_value(global_batch_size) is not None:
        return False
    return tf.equal(tf.cast(global_batch_size, tf.int64), tf.shape(per_example_loss, tf.int64)[0])


def _having(plain: Callable[[], bool]) -> Callable[[], bool]:
    return functools.wraps(plain)(lambda: _here.share is None and plain())


internals.replace_num_replicas(_num_replicas)
internals.trace_apart(lambda: "" if _here.share is None else "one replica")
internals.replace_public("nn", "compute_average_loss", _averaging)
internals.replace_public("distribute", "has_strategy", _having)  # tf_keras's losses refuse a mean if there is one
