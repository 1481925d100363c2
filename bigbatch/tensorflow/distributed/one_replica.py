"""Losses that divide by the number of replicas, or by the size of the whole batch, as TensorFlow's guide says.

Keras's losses, `tf.nn.compute_average_loss` and `tf.nn.scale_regularization_loss` divide by
`strategy.num_replicas_in_sync`, because TensorFlow adds gradients up over replicas. bigbatch weights the replicas
itself and needs the mean over one replica's micro-batch. So while it computes a loss, strategies report one replica.
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


class LossContext:
    """What is known while the loss of one micro-batch is computed.

    Args:
        share: This micro-batch's share of the whole batch, w / W; None if it is not known.
    """

    def __init__(self, share: Any = None) -> None:
        self.share = share
        self.is_share_used = False


class _Here(threading.local):
    """The state of this thread. TensorFlow runs each replica on its own thread."""

    context: LossContext | None = None


_here = _Here()
_asking: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""The replica contexts in which a loss has read the real number of replicas."""


@contextmanager
def one_replica(context: LossContext) -> Iterator[None]:
    """Inside, on this thread, strategies report one replica."""
    before, _here.context = _here.context, context
    try:
        yield
    finally:
        _here.context = before


def check_not_divided() -> None:
    """On a replica: raises LossError if the loss divided by the number of replicas, or by the whole batch."""
    context = tf.distribute.get_replica_context()
    if context in _asking:
        _asking.discard(context)
        raise LossError(
            f"the loss asked for the number of replicas ({context.num_replicas_in_sync}) or divided by a "
            "global_batch_size, as Keras's losses and tf.nn.compute_average_loss do, but add() needs the mean over the "
            "micro-batch: compute it in `with tf.GradientTape() as tape, accumulator.one_replica():`"
        )


def _note() -> None:
    context = tf.distribute.get_replica_context()
    if context is not None and internals.is_recording():
        _asking.add(context)


def _num_replicas(real: int) -> int:
    if _here.context is not None:
        return 1
    if real > 1:
        _note()
    return real


def _patched_compute_average_loss(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def compute_average_loss(per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None) -> Any:
        value = plain(per_example_loss, sample_weight, global_batch_size)
        context = _here.context
        if global_batch_size is None:
            return value
        if context is None:
            if tf.distribute.get_strategy().num_replicas_in_sync > 1:
                _note()
            return value
        if context.share is None:
            raise LossError(
                "tf.nn.compute_average_loss divides by a global_batch_size, but the loss must be the mean over the "
                "micro-batch here: leave global_batch_size out"
            )
        context.is_share_used = True
        by = tf.where(_is_of_micro_batch(global_batch_size, per_example_loss), tf.ones([], tf.float64), context.share)
        return value / tf.cast(by, value.dtype)  # the accumulator multiplies by it

    return compute_average_loss


def _is_of_micro_batch(global_batch_size: Any, per_example_loss: Any) -> Any:
    """Whether this is the size of the micro-batch, from which the loss computed it, and not of the whole batch."""
    if not tf.executing_eagerly() and tf.get_static_value(global_batch_size) is not None:
        return False
    return tf.equal(tf.cast(global_batch_size, tf.int64), tf.shape(per_example_loss, tf.int64)[0])


def _patched_has_strategy(plain: Callable[[], bool]) -> Callable[[], bool]:
    return functools.wraps(plain)(lambda: _here.context is None and plain())


internals.replace_num_replicas(_num_replicas)
internals.trace_apart(lambda: "" if _here.context is None else "one replica")
internals.replace_public("nn", "compute_average_loss", _patched_compute_average_loss)
# if there is a strategy, tf_keras's losses refuse to take a mean
internals.replace_public("distribute", "has_strategy", _patched_has_strategy)
