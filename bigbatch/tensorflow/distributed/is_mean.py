"""Whether a loss is a mean over samples, found by trying it on one sample, and on the same one two and three times."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from ...core.errors import BigBatchError, LossError
from ...core.weight import as_terms
from .. import batch as nest
from ..verify.dropout import dropout_off
from .one_replica import Share, one_replica
from .replicas import as_tf_variable

EPSILON = {tf.float64: 2.0**-52, tf.float32: 2.0**-23}
LOW = 2.0**-8
"""Of float16 and bfloat16."""


def check_is_mean(
    model: Any,
    loss: Callable[[Any], Any],
    weight: Callable[[Any], Any],
    strategy: tf.distribute.Strategy,
    tensors: Sequence[Any],
) -> None:
    """Refuses a loss that grows by the same amount with every sample, as `tf.reduce_sum(…) / GLOBAL_BATCH_SIZE` does.

    `tensors` are those of a batch, and `loss` and `weight` take others in their place. A mean stays what it is when a
    sample is repeated, while a weight that counts is so many times larger. What moves with a forward pass is put back.
    """
    if not all(isinstance(t, tf.Tensor | tf.distribute.DistributedValues) for t in tensors):
        return
    share = Share(1)
    found: list[tuple[Sequence[Any], Sequence[Any]]] = []

    def on_replica(*own: Any) -> None:
        one = [nest.part(t, 0, 1) for t in own]
        samples = [[t if t.shape.rank == 0 else tf.concat([t] * num, 0) for t in one] for num in (1, 2, 3)]
        with one_replica(share):
            losses = [as_terms(loss(each)) for each in samples]
        weights = [as_terms(weight(each)) for each in samples]
        found.extend(zip(zip(*losses, strict=True), zip(*weights, strict=True), strict=True))

    held = [(v, tf.identity(as_tf_variable(v))) for v in model.variables if not v.trainable]
    try:
        with dropout_off(model):
            strategy.run(on_replica, args=tuple(tensors))
    except (tf.errors.OpError, BigBatchError, TypeError, ValueError):  # whatever is wrong shows in the step
        return
    finally:
        for v, value in held:
            v.assign(value)
    if share.is_used:  # it is known by what the loss divides
        return
    for values, weights in found:
        first, *_, last = (float(tf.reduce_sum(tf.cast(w, tf.float64))) for w in weights)
        if last == 3 * first > 0:
            check_values(values)


def check_values(values: Sequence[Any]) -> None:
    """Refuses the losses of one, two and three samples if they grow in equal steps; a few other losses are left."""
    if not all(tf.is_tensor(value) and value.dtype.is_floating and value.shape.rank == 0 for value in values):
        return
    once, twice, thrice = (float(tf.cast(value, tf.float64)) for value in values)
    rounding = 100 * EPSILON.get(values[0].dtype, LOW) * max(abs(once), abs(thrice))
    if not (abs(thrice - twice) > rounding and abs(thrice - 2 * twice + once) <= rounding):
        return
    is_sum = abs(twice - 2 * once) <= rounding
    raise LossError(
        f"the loss adds up over samples, as tf.reduce_sum(…) / GLOBAL_BATCH_SIZE does: one sample gives {once:.4g}, "
        f"the same twice {twice:.4g} and three times {thrice:.4g}; return the mean over the micro-batch (reduce_mean)"
        + (', or pass reduction="sum"' if is_sum else "")
    )
