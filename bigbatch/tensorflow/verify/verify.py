"""Full batch against accumulation, on the user's own model."""

from typing import Any

import tensorflow as tf

from ...core.options import positive
from ...core.verify.compare import audit
from ...core.verify.result import Verification
from ...core.weight import Reduction
from .. import batch as nest
from ..backward import Loss, Weight
from ..distributed import replicas
from .trial import Trial, wide_copy


def verify(
    model: Any,
    batch: Any,
    loss: Loss,
    micro_batch_size: int,
    *,
    weight: Weight | None = None,
    reduction: Reduction = "mean",
    tolerance: float | None = None,
    dtype: str = "float64",
) -> Verification:
    """Compares the gradient of the full batch with the accumulated one, and says why where they differ.

    A Sequential or Functional model is copied into float64. One that cannot be rebuilt from its configuration is
    compared in its own dtype, on itself, and all its variables are put back. The tolerance is 1e-9 in float64, and
    follows from the size of the sums in float32, unless it is given. A model that was made under a strategy
    accumulates on its replicas, and the full batch is that of one device.
    """
    micro_batch_size = positive("micro_batch_size", micro_batch_size)
    strategy = replicas.strategy_of(model)
    with strategy.scope():
        twin = wide_copy(model, dtype)
    if twin is not model:
        layout = nest.Layout(batch)
        batch = layout.pack([tf.cast(t, dtype) if t.dtype.is_floating else t for t in layout.tensors])
    trial = Trial(twin, batch, loss, micro_batch_size, weight, reduction, strategy)
    try:
        return audit(trial, tolerance)
    finally:
        trial.give_back()
