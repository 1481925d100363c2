"""Checks of the model, the optimizer and the loss, before anything is changed."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ..core import labels as core_labels
from ..core.errors import OptionError
from .internals import is_stepped_in_backward


def check_model(model: Any) -> None:
    if isinstance(model, torch.optim.Optimizer):
        raise OptionError(
            f"model is a {type(model).__name__}, an optimizer: the model comes first, Accumulator(model, optimizer, …)"
        )
    if not (callable(getattr(model, "parameters", None)) and callable(getattr(model, "modules", None))):
        raise OptionError(f"model is a {type(model).__name__}: pass a torch.nn.Module")


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if not (callable(getattr(optimizer, "step", None)) and hasattr(optimizer, "param_groups")):
        raise OptionError(
            f"optimizer is a {type(optimizer).__name__}: pass a torch.optim.Optimizer, or a list of several"
        )
    _check_own_scaler(optimizer)
    held = {p for group in optimizer.param_groups for p in group["params"]}
    own = set(model.parameters())
    if held.isdisjoint(own):
        raise OptionError(
            f"the optimizer holds {len(held)} parameters but none of the model's {len(own)}: "
            "make it from model.parameters()"
        )
    if not any(p.requires_grad for p in held):
        raise OptionError(
            f"none of the {len(held)} parameters that the optimizer holds is trainable: call requires_grad_() on those "
            "you want to train"
        )
    if unmade := [name for name, p in model.named_parameters() if p.is_meta and p in held]:
        raise OptionError(
            f"{len(unmade)} of {len(held)} parameters ({unmade[0]} first) are on the meta device, where they have "
            'no values: call model.to_empty(device="cpu") and load their values first'
        )
    if stepped := [name for name, p in model.named_parameters() if is_stepped_in_backward(p)]:
        raise OptionError(
            f"{len(stepped)} of {len(own)} parameters ({stepped[0]} first) are stepped in every backward pass by "
            "_apply_optimizer_in_backward, so with every micro-batch: make the model without it"
        )


def needs_closure(optimizer: Any) -> bool:
    """Whether the optimizer cannot step without a closure that computes the loss, as LBFGS cannot."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _check_own_scaler(optimizer: Any) -> None:
    """accelerate's optimizer (1.15) has a GradScaler, which would unscale a gradient that was never scaled."""
    scaler = getattr(optimizer, "scaler", None)
    if isinstance(scaler, GradScaler) and scaler.is_enabled():
        raise OptionError(
            f"the {type(optimizer).__name__} has a GradScaler of its own, which would divide gradients by its scale of "
            f"{scaler.get_scale():g} although no loss was multiplied by it: pass the optimizer inside of it "
            "(optimizer.optimizer), and that GradScaler as scaler=…"
        )


def check_scheduler(name: str, scheduler: Any) -> Any:
    if scheduler is not None and (isinstance(scheduler, type) or not callable(getattr(scheduler, "step", None))):
        what = f"the class {scheduler.__name__}" if isinstance(scheduler, type) else f"a {type(scheduler).__name__}"
        raise OptionError(f"{name} is {what}: pass one learning rate scheduler, or a list of several")
    if isinstance(scheduler, ReduceLROnPlateau):
        raise OptionError(
            "ReduceLROnPlateau wants a metric with every step: step it yourself where you have the metric"
        )
    return scheduler


def check_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise OptionError(f"accumulate_dtype is {dtype!r}: pass torch.float32 or torch.float64, or None")
    if dtype is not None and torch.promote_types(dtype, torch.float32) != dtype:
        raise OptionError(
            f"accumulate_dtype={dtype} is narrower than torch.float32 and would lose low bits: "
            "pass torch.float32 or torch.float64, or None"
        )


def warn_of_uncounted_labels(batch: Any) -> None:
    """Warns if labels of the batch are ignored although no weight counts them. Waits for the device."""
    found = core_labels.may_be_uncounted(batch)
    if isinstance(found, Tensor) and found.dtype in (torch.int64, torch.int32) and (found == core_labels.IGNORED).any():
        core_labels.warn_of_uncounted("bigbatch.torch")
