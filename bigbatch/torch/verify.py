"""Full batch against accumulation, on the user's own model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn

from ..core.diagnosis import Array, Mix, explain_loop, explain_loss, unmix
from ..core.errors import OptionError
from ..core.verification import Verification, judge
from ..core.weight import Reduction
from ..core.window import positive
from .accumulator import Loss
from .checks import batch_norms
from .replay import Replay
from .trial import Gradient, Loop, Trial, cast_to, copied, errors_of, products_of
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
        trial = Trial(copied(model, dtype), cast_to(batch, dtype), loss, micro_batch_size, weight, reduction)
        return _verify_loop(trial, step, tolerance) if step else _verify_accumulator(trial, tolerance)


def _verify_accumulator(trial: Trial, tolerance: float) -> Verification:
    causes: list[str] = []
    full, draws = trial.full()
    if not full:
        raise OptionError("the loss reached none of the model's parameters: compute it with the model it is given")
    replay = Replay(draws, trial.batch_size) if draws else None
    accumulated = trial.accumulated(replay)
    errors = errors_of(full, accumulated)
    verdict = judge(errors, [], tolerance)
    if replay is not None:
        causes.append(_about_randomness(trial.model, replay.is_faithful))
    if not verdict.is_exact:
        causes += _batch_norm_causes(trial)
        with _quiet(trial.model, dropout=replay is not None):
            causes += _loss_causes(trial, tolerance)
    return judge(errors, causes or ([] if verdict.is_exact else [_unexplained(verdict)]), tolerance)


def _verify_loop(trial: Trial, loop: Loop, tolerance: float) -> Verification:
    causes: list[str] = []
    full, draws = trial.full()
    if draws:
        causes.append("dropout was switched off for the comparison, since a foreign loop draws masks of its own")
    with _dropout_off(trial.model) if draws else nullcontext():
        full = trial.gradient_of(trial.batch)
        found, again = trial.by_loop(loop)
        errors = errors_of(full, found)
        is_exact = judge(errors, [], tolerance).is_exact
        if not is_exact:
            causes += _batch_norm_causes(trial)
            causes += _explained(trial, found, explain_loop)
            if not causes:
                causes.append(_unexplained(judge(errors, [], tolerance)))
    twice = {name: 2 * g for name, g in found.items()}
    if max(errors_of(twice, again).values(), default=1.0) < 1e-6:
        causes.append(
            "gradients are not zeroed: a second window adds to the first, which is right only if "
            "something else zeroes them after each step"
        )
    return judge(errors, causes, tolerance)


def _batch_norm_causes(trial: Trial) -> list[str]:
    if not (names := batch_norms(trial.model)):
        return []
    return [
        f"BatchNorm in training mode ({', '.join(names)}) normalises by the micro-batch instead of the batch: "
        "put it into eval mode, or use GroupNorm or LayerNorm"
    ]


def _loss_causes(trial: Trial, tolerance: float) -> list[str]:
    """What is wrong with loss or weight themselves, with BatchNorm and dropout out of the way."""
    full = trial.gradient_of(trial.batch)
    if judge(errors_of(full, trial.accumulated(None)), [], tolerance).is_exact or len(trial.micro_batches) < 2:
        return []
    return _explained(trial, full, lambda mix, right: explain_loss(mix, right, trial.reduction))


def _explained(trial: Trial, gradient: Gradient, explain: Callable[[Mix, Array], str | None]) -> list[str]:
    """What the mix of micro-batches in a gradient says about it."""
    right = trial.right_scales()
    if right.shape[1] > 1:
        return ["a term of the loss is no mean over its weight, or couples the samples of a batch"]
    counted = np.flatnonzero(right[:, 0])  # the mean over nothing may be 0/0
    micro = [trial.gradient_of(trial.micro_batches[k]) for k in counted]
    products = products_of([*micro, gradient])
    if not np.isfinite(products).all():
        return ["a gradient is not finite"]
    cause = explain(unmix(products), right[counted, 0])
    return [cause] if cause else []


def _about_randomness(model: nn.Module, is_faithful: bool) -> str:
    names = [name for name, module in model.named_modules() if _is_dropout(module) and module.training]
    where = f"dropout ({', '.join(names)})" if names else "dropout or other random numbers"
    if is_faithful:
        return (
            f"{where}: compared with the same masks; in training each micro-batch draws its own, "
            "which is as good a draw as the full batch's but not the same"
        )
    return f"{where}: the draws could not be cut like the batch, so the masks differ; compare in eval mode"


def _unexplained(verdict: Verification) -> str:
    if verdict.max_error < 1e-4:
        return (
            f"a difference of {verdict.max_error:.0e} is the size of rounding in float32: something in the model "
            "or the loss computes in less than float64"
        )
    return "the cause could not be told from the gradients"


def _is_dropout(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.dropout._DropoutNd)


@contextmanager
def _in_eval(modules: list[nn.Module]) -> Iterator[None]:
    before = [module.training for module in modules]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module, training in zip(modules, before, strict=True):
            module.training = training


def _dropout_off(model: nn.Module) -> Any:
    return _in_eval([m for m in model.modules() if _is_dropout(m)])


def _quiet(model: nn.Module, *, dropout: bool) -> Any:
    """BatchNorm, and dropout if asked, out of the way."""
    batch_norm = set(batch_norms(model))
    return _in_eval([m for name, m in model.named_modules() if name in batch_norm or (dropout and _is_dropout(m))])


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
    with torch.random.fork_rng(devices=devices):
        yield
