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


class Share:
    """The share of the whole batch that the loss is being computed of: w / W.

    Args:
        value: The share; None if it is not known.
    """

    def __init__(self, value: Any = None) -> None:
        self.value = value
        self.is_used = False


class _Here(threading.local):
    """The state of this thread. TensorFlow runs each replica on its own thread."""

    share: Share | None = None


_here = _Here()
_asking: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""The replica contexts in which a loss read the real number of replicas."""


@contextmanager
def one_replica(share: Share) -> Iterator[None]:
    """Inside, on this thread, strategies report one replica."""
    before, _here.share = _here.share, share
    try:
        yield
    finally:
        _here.share = before


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
    if _here.share is not None:
        return 1
    if real > 1:
        _note()
    return real


def _patched_compute_average_loss(plain: Callable[..., Any]) -> Callable[..., Any]:
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


def _patched_has_strategy(plain: Callable[[], bool]) -> Callable[[], bool]:
    return functools.wraps(plain)(lambda: _here.share is None and plain())


internals.replace_num_replicas(_num_replicas)
internals.trace_apart(lambda: "" if _here.share is None else "one replica")
internals.replace_public("nn", "compute_average_loss", _patched_compute_average_loss)
# tf_keras's losses refuse a mean if there is a strategy
internals.replace_public("distribute", "has_strategy", _patched_has_strategy)
