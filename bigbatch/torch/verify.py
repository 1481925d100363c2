"""Full batch against accumulation, on the user's own model."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from ..core.audit import Loop, audit, audit_loop
from ..core.verification import Verification
from ..core.weight import Reduction
from ..core.window import positive
from .passes import Loss
from .transfer import Transfer
from .trial import Trial, cast_to, copied
from .weight import Weight


def verify(
    model: nn.Module,
    batch: Any,
    loss: Loss,
    micro_batch_size: int,
    *,
    weight: Weight | None = None,
    reduction: Reduction = "mean",
    step: Loop | None = None,
    tolerance: float = 1e-9,
    dtype: torch.dtype = torch.float64,
) -> Verification:
    """Compares the gradient of the full batch with the accumulated one, and says why where they differ.

        full = grad(loss(model, batch))
        accumulated = what Accumulator(model, …, micro_batch_size=…) hands to the optimizer
        error = |accumulated - full| / |full|     for each parameter

    Everything happens on a copy of the model in float64; the model, its buffers and the random state are left
    as they were. With `step=f` it is somebody else's loop that is audited: `f(model, micro_batches)` leaves
    its gradients on the model it is given.
    """
    micro_batch_size = positive("micro_batch_size", micro_batch_size)
    with _random_state_kept(model), _dtype_noted(dtype):
        twin = copied(model, dtype)
        batch = Transfer(list(twin.parameters())).brought(cast_to(batch, dtype))
        trial = Trial(twin, batch, loss, micro_batch_size, weight, reduction)
        try:
            return audit_loop(trial, step, tolerance) if step else audit(trial, tolerance)
        finally:
            trial.give_back()


@contextmanager
def _dtype_noted(dtype: torch.dtype) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if "dtype" in str(error) or "scalar type" in str(error):
            error.add_note(
                f"bigbatch: verify() compares on a copy of the model in {dtype}; if the loss brings tensors of another "
                "dtype along, pass dtype=torch.float32 and a tolerance of about 1e-5"
            )
        raise


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
