"""Compares accumulation with the full batch, on the user's own model."""

from typing import Any, Never

import tensorflow as tf

from ...core.options import check_known, check_loss, positive
from ...core.verify.compare import audit
from ...core.verify.result import Verification
from ...core.weight import Reduction
from ..auxiliary import without_aux
from ..backward import Loss, Weight
from ..batch import Layout
from ..batch_norm import BatchNorm, BatchNorms
from ..distributed import replicas
from ..models import trained
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
    has_aux: bool = False,
    batch_norm: BatchNorm = "batch",
    **unknown: Never,
) -> Verification:
    """Compares the gradient of the full batch with the accumulated one, and names the cause if they differ.

        print(verify(model, batch, loss, micro_batch_size=8))

    stands for a comparison of

        with tf.GradientTape() as tape:
            value = loss(model, batch)
        tape.gradient(value, model.trainable_variables)

    with the gradient that `Accumulator.step(batch)` hands to the optimizer. The model is not changed. A model that was
    made under a strategy accumulates on its replicas; the full batch is computed on one device.

    Args:
        model: The model, or a list of models. A Sequential or Functional model is copied into `dtype`. One that cannot
            be rebuilt from its configuration is compared in its own dtype, and all its variables are restored.
        batch: A batch that fits into memory.
        loss: `loss(model, micro_batch)`, as for Accumulator.
        micro_batch_size: How many samples a micro-batch has.
        weight: `weight(micro_batch)`, as for Accumulator.
        reduction: "mean" or "sum", as for Accumulator.
        tolerance: The largest relative error that counts as the same. None: 1e-9 in float64; in float32 it depends on
            the size of the sums.
        dtype: The dtype that the copy of the model computes in.
        has_aux: Whether the loss returns the pair `(loss, aux)`.
        batch_norm: "frozen" if BatchNormalization layers normalise with their moving statistics, as for Accumulator.
    """
    check_known(unknown, verify)
    check_loss("loss", loss)
    micro_batch_size = positive("micro_batch_size", micro_batch_size)
    strategy = replicas.strategy_of(trained(model))
    with strategy.scope():
        twin = wide_copy(model, dtype)
    if twin is not model:
        layout = Layout(batch)
        batch = layout.pack([tf.cast(t, dtype) if t.dtype.is_floating else t for t in layout.tensors])
    loss = _in_mode(batch_norm, without_aux(loss, twin, has_aux=has_aux))
    trial = Trial(trained(twin), batch, loss, micro_batch_size, weight, reduction, strategy)
    try:
        return audit(trial, tolerance)
    finally:
        trial.give_back()


def _in_mode(batch_norm: BatchNorm, loss: Loss) -> Loss:
    """The loss with BatchNormalization frozen, if that is asked for."""
    if batch_norm != "frozen":
        return loss

    def frozen(model: Any, batch: Any) -> Any:
        with BatchNorms("frozen").recording():
            return loss(model, batch)

    return frozen
