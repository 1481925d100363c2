"""Full batch against accumulation, on the user's own model."""

from typing import Any

import numpy as np
import tensorflow as tf

from ..core.audit import audit
from ..core.verification import Verification
from ..core.weight import Reduction
from ..core.window import positive
from . import nest, replicas
from .accumulator import Loss, Weight
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
    compared in its own dtype, on itself, and all its variables are put back; the tolerance is then 1e-4 unless given.
    A model that was made under a strategy accumulates on its replicas, and the full batch is that of one device.
    """
    micro_batch_size = positive("micro_batch_size", micro_batch_size)
    strategy = replicas.strategy_of(model)
    with strategy.scope():
        twin = wide_copy(model, dtype)
    if twin is not model:
        layout = nest.Layout(batch)
        batch = layout.pack([tf.cast(t, dtype) if t.dtype.is_floating else t for t in layout.tensors])
    is_wide = all(np.dtype(tf.as_dtype(v.dtype).as_numpy_dtype) == np.float64 for v in twin.trainable_variables)
    trial = Trial(twin, batch, loss, micro_batch_size, weight, reduction, strategy)
    try:
        return audit(trial, tolerance if tolerance is not None else (1e-9 if is_wide else 1e-4))
    finally:
        trial.give_back()
