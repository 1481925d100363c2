"""Refuses a loss that adds up over samples, after trying it on one sample and on the same one repeated."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from ...core.errors import BigBatchError, LossError
from ...core.weight import as_terms
from ..batch import Layout, batch_size, slice_rows
from ..layers import dropout_off
from .one_replica import LossContext, one_replica
from .replicas import as_tf_variable

_EPSILON = {tf.float64: 2.0**-52, tf.float32: 2.0**-23}


def check_mean(
    model: Any,
    loss: Callable[[Any, Any], Any],
    weight: Callable[[Any], Any] | None,
    strategy: tf.distribute.Strategy,
    layout: Layout,
) -> None:
    """Raises LossError if a loss grows by the same amount with each sample: `tf.reduce_sum(…) / GLOBAL_BATCH_SIZE`.

    When the first sample of the batch is repeated, a mean does not change, while its weight grows by the same factor.
    Variables that change with a forward pass are restored.
    """
    if not all(isinstance(t, tf.Tensor | tf.distribute.DistributedValues) for t in layout.tensors):
        return
    context = LossContext(1)
    tried: list[tuple[Sequence[Any], Sequence[Any]]] = []

    def on_replica(*own: Any) -> None:
        one = [slice_rows(t, 0, 1) for t in own]
        samples = [layout.pack([t if t.shape.rank == 0 else tf.concat([t] * k, 0) for t in one]) for k in (1, 2, 3)]
        with one_replica(context):
            losses = [as_terms(loss(model, each)) for each in samples]
        weights = [(batch_size(Layout(s)),) if weight is None else as_terms(weight(s)) for s in samples]
        tried.extend(zip(zip(*losses, strict=True), zip(*weights, strict=True), strict=True))

    held = [(v, tf.identity(as_tf_variable(v))) for v in model.variables if not v.trainable]
    try:
        with dropout_off(model):
            strategy.run(on_replica, args=tuple(layout.tensors))
    except (tf.errors.OpError, BigBatchError, TypeError, ValueError):  # the step itself will raise
        return
    finally:
        for v, value in held:
            v.assign(value)
    if context.is_share_used:  # bigbatch knows what the loss divides by
        return
    for values, weights in tried:
        first, *_, last = (float(tf.reduce_sum(tf.cast(w, tf.float64))) for w in weights)
        if last == 3 * first > 0:
            _check_values(values)


def _check_values(values: Sequence[Any]) -> None:
    """Raises LossError if the losses of one, two and three samples grow in equal steps."""
    if not all(tf.is_tensor(value) and value.dtype.is_floating and value.shape.rank == 0 for value in values):
        return
    once, twice, thrice = (float(tf.cast(value, tf.float64)) for value in values)
    rounding = 100 * _EPSILON.get(values[0].dtype, 2.0**-8) * max(abs(once), abs(thrice))
    if not (abs(thrice - twice) > rounding and abs(thrice - 2 * twice + once) <= rounding):
        return
    is_sum = abs(twice - 2 * once) <= rounding
    raise LossError(
        f"the loss adds up over samples, as tf.reduce_sum(…) / GLOBAL_BATCH_SIZE does: one sample gives {once:.4g}, "
        f"the same twice {twice:.4g} and three times {thrice:.4g}; return the mean over the micro-batch (reduce_mean)"
        + (', or pass reduction="sum"' if is_sum else "")
    )
