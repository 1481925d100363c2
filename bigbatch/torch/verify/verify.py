"""Full batch against accumulation, on the user's own model."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from ...core.errors import BigBatchError
from ...core.options import positive
from ...core.verify.compare import Loop, audit, audit_loop
from ...core.verify.result import Verification
from ...core.weight import Reduction
from ..passes import Loss
from ..transfer import Transfer
from ..weight import Weight
from .trial import Trial, cast_to, copied


def verify(
    model: nn.Module,
    batch: Any,
    loss: Loss,
    micro_batch_size: int,
    *,
    weight: Weight | None = None,
    reduction: Reduction = "mean",
    step: Loop | None = None,
    tolerance: float | None = None,
    dtype: torch.dtype | None = None,
) -> Verification:
    """Compares the gradient of the full batch with the accumulated one, and says why where they differ.

        full = grad(loss(model, batch))
        accumulated = what Accumulator(model, …, micro_batch_size=…) hands to the optimizer
        error = |accumulated - full| / |full|     for each parameter

    Everything happens on a copy of the model in float64; the model, its buffers and the random state are left
    as they were. If the model or the loss cannot compute in float64, the comparison is made in float32, and the causes
    say so; `dtype` asks for one of them. The tolerance is 1e-9 in float64, and follows from the size of the sums in
    float32, unless it is given.

    With `step=f` it is somebody else's loop that is audited: `f(model, micro_batches)` leaves its gradients on the
    model it is given, or ends with a step of an optimizer that it makes for that model.
    """
    micro_batch_size = positive("micro_batch_size", micro_batch_size)

    def compared(dtype: torch.dtype) -> Verification:
        with _random_state_kept(model):
            twin = copied(model, dtype)
            own = Transfer(list(twin.parameters())).brought(cast_to(batch, dtype))
            trial = Trial(twin, own, loss, micro_batch_size, weight, reduction, is_training=model.training)
            try:
                found = audit_loop(trial, step, tolerance) if step else audit(trial, tolerance)
            finally:
                trial.give_back()
            return replace(found, precision=found.precision or str(dtype).removeprefix("torch."))

    try:
        return compared(torch.float64 if dtype is None else dtype)
    except BigBatchError:
        raise
    except Exception as error:
        if dtype is not None:
            if "dtype" in str(error) or "scalar type" in str(error):
                error.add_note(
                    f"bigbatch: verify() compares on a copy of the model in {dtype}; if the loss brings tensors of "
                    "another dtype along, leave dtype out, or pass dtype=torch.float32"
                )
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        note = f"compared in float32, because in float64 the model or the loss raises: {reason}"
        try:
            found = compared(torch.float32)
        except Exception:
            raise error from None  # it is not for want of float64
    return replace(found, causes=(note, *found.causes))


@contextmanager
def _random_state_kept(model: nn.Module) -> Iterator[None]:
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
