"""Compares accumulation with the full batch, on a copy of the user's model."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, Never

import torch
from torch import Tensor, nn

from ...core.errors import BigBatchError, OptionError
from ...core.options import check_known, check_loss, positive
from ...core.verify.compare import audit
from ...core.verify.result import Verification
from ...core.verify.trial import Loop
from ...core.weight import Reduction
from ...core.window import Window
from .. import batch as nest
from .. import hooks
from ..backward import Loss
from ..batch import BatchAxis
from ..batch_norm import Mode, check_mode
from ..cutting import Cutting
from ..internals import HOOKS_AFTER, HOOKS_BEFORE, uncompiled
from ..random import random_state_kept
from ..transfer import transfer_for
from ..window import Weight
from .trial import Trial
from .window import joined


def verify(
    model: nn.Module,
    batch: Any,
    loss: Loss,
    micro_batch_size: int | None = None,
    *,
    weight: Weight | None = None,
    reduction: Reduction = "mean",
    batch_norm: Mode = "batch",
    has_aux: bool = False,
    step: Loop | None = None,
    tolerance: float | None = None,
    dtype: torch.dtype | None = None,
    batch_axis: BatchAxis = 0,
    cut: Literal["list"] | Callable[[Any, list[int]], Sequence[Any]] | None = None,
    num_samples: Callable[[Any], int] | None = None,
    **unknown: Never,
) -> Verification:
    """Compares the gradient of the full batch with the accumulated one, and names the cause if they differ.

        loss(model, batch).backward()
        full = [p.grad for p in model.parameters()]
        accumulated = …                                  # what Accumulator(model, …).step(batch) gives the optimizer
        error = |accumulated - full| / |full|            # for each parameter

    Everything happens on a copy of the model; the model, its buffers and all random state are left as they were.

    Args:
        model: The model. If it is in eval mode but has BatchNorm or dropout, its copy is put into training mode, and
            the causes say so.
        batch: A batch that fits into memory as a whole: a tensor or a nest of tensors. Or a `Window` of micro-batches,
            of any sizes, which are concatenated to the full batch.
        loss: `loss(model, micro_batch)` returns the mean over the micro-batch; a tuple for several terms, or whatever
            else the accumulator's loss may return.
        micro_batch_size: The number of samples in a micro-batch; not for a `Window`.
        weight: `weight(micro_batch)` returns the number of samples or tokens that the loss is a mean over. Samples if
            it is left out.
        reduction: "mean", or "sum" if the loss adds up.
        batch_norm: What the `Accumulator` is given: with "frozen", BatchNorm layers use their running statistics.
        has_aux: Whether the loss returns `(loss, aux)`, as for the accumulator. Aux is not compared.
        step: A loop of your own to check instead of the accumulator. `step(model, micro_batches)` leaves its gradients
            on the model it is given, or ends with a step of an optimizer that it makes for that model.
        tolerance: The largest relative error that counts as exact: 1e-9 in float64 if it is left out; in float32 it
            follows from the number of samples and micro-batches.
        dtype: torch.float64 or torch.float32. If it is left out, float64, or float32 if the model or the loss cannot
            compute in float64, which the causes then mention.
        batch_axis: The axis of the samples, or a nest of axes like the batch, as in `Accumulator`.
        cut: "list", or a function `cut(batch, sizes)` that returns the micro-batches, as in `Accumulator`.
        num_samples: `num_samples(batch)` returns how many samples a batch has, if its tensors do not show it.

    Returns:
        The verdict, true if it is exact. It prints as a table with the causes below.
    """
    cutting = Cutting(batch_axis, cut, num_samples)
    check_known(unknown, verify)
    check_loss("loss", loss)
    check_mode("batch_norm", batch_norm)
    sizes: int | Sequence[int]
    if isinstance(batch, Window):
        batch, sizes = joined(batch, cutting)
    else:
        sizes = positive("micro_batch_size", micro_batch_size)

    def compared(dtype: torch.dtype) -> Verification:
        with random_state_kept(model):
            twin = _copied(model, dtype)
            transfer, own = transfer_for(list(twin.parameters())), _cast_to(batch, dtype)
            if transfer is not None:
                own = transfer.brought(own)
            trial = Trial(twin, own, loss, sizes, weight, reduction, cutting, batch_norm, has_aux=has_aux)
            try:
                found = audit(trial, tolerance, step)
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
                    f"bigbatch: verify() compares on a copy of the model in {dtype}; if the loss uses tensors of "
                    "another dtype, leave dtype out, or pass dtype=torch.float32"
                )
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        note = f"compared in float32, because in float64 the model or the loss raises: {reason}"
        try:
            found = compared(torch.float32)
        except Exception:
            raise error from None  # float64 is not the reason
    return replace(found, causes=(note, *found.causes))


def _copied(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    model = uncompiled(model)  # a check need not compile
    model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model  # this rank's own
    try:
        twin = copy.deepcopy(model)
    except (RuntimeError, TypeError) as error:
        raise OptionError(f"the model cannot be copied, which verify() needs: {error}") from error
    for tensor in [*twin.parameters(), *twin.buffers()]:
        tensor.data = _cast_to(tensor.data, dtype)
    for own, (name, parameter) in zip(twin.parameters(), model.named_parameters(), strict=True):
        hooks.check_no_multi_grad(parameter, name)
        _copy_hooks(parameter, own)
    return twin


def _copy_hooks(parameter: Tensor, twin: Tensor) -> None:
    """Copies the hooks of a parameter, which `deepcopy` does not (torch 2.13)."""

    def in_its_dtype(hook: Any) -> Any:
        def run(gradient: Tensor) -> Any:
            found = hook(gradient)
            return found.to(gradient.dtype) if isinstance(found, Tensor) else found

        return run

    for hook in list((HOOKS_BEFORE(parameter) or {}).values()):
        twin.register_hook(in_its_dtype(hook))
    for hook in list((HOOKS_AFTER(parameter) or {}).values()):
        twin.register_post_accumulate_grad_hook(hook)


def _cast_to(batch: Any, dtype: torch.dtype) -> Any:
    """A copy of a nest, with its floating-point tensors in this dtype."""

    def cast(tensor: Tensor) -> Tensor:
        wanted = dtype if tensor.is_floating_point() else tensor.dtype
        if tensor.is_complex():
            wanted = torch.promote_types(dtype, torch.complex64)
        return tensor.detach().to(wanted, copy=True).requires_grad_(tensor.requires_grad)

    return nest.map_tensors(cast, batch)
