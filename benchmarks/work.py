"""What all contestants of a table do: the same steps, from the same start, on the same batch."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

Batch = tuple[Tensor, ...]
Step = Callable[[], Any]
TOLERANCES = {None: 1e-5, "bf16": 5e-2}
"""How far apart two updates may be, relatively: sums of float32, and of what was rounded to bfloat16."""


@dataclass(frozen=True)
class Work:
    model: Callable[[], nn.Module]
    """Makes one, the same every time."""
    loss: Callable[[nn.Module, Batch], Tensor]
    batch: Batch
    micro_batch_size: int
    optimizer: Callable[[nn.Module], Optimizer]
    device: str = "cpu"
    """Of the model; the batch may be elsewhere."""
    precision: str | None = None

    @property
    def num_micro_batches(self) -> int:
        return -(-len(self.batch[0]) // self.micro_batch_size)

    def micro_batches(self) -> Iterable[Batch]:
        return zip(*(tensor.split(self.micro_batch_size) for tensor in self.batch), strict=True)

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device, torch.bfloat16) if self.precision == "bf16" else nullcontext()


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-4, fused=True)


def plain_adamw(model: nn.Module) -> Optimizer:
    """The same optimizer, but its first update is nearly the gradient itself, so that a wrong scale is seen."""
    return AdamW(model.parameters(), lr=1.0, eps=1.0, weight_decay=0.0, fused=True)


def update_of(step_once: Callable[[nn.Module, Work], Any], work: Work) -> Tensor:
    """By how much one step changes the parameters."""
    work = replace(work, optimizer=plain_adamw)
    model = work.model()
    before = flat(model)
    step_once(model, work)
    return flat(model).to(before.device) - before  # Lightning leaves a model on the CPU


def update_error(update: Tensor, expected: Tensor, name: str, precision: str | None) -> float:
    """How far the update is from the expected one, relatively; raises where that is too far."""
    error = float((update - expected).norm() / expected.norm())
    if not error <= TOLERANCES[precision]:
        raise AssertionError(f"{name}: the first update is {error:.1e} away, {TOLERANCES[precision]:.0e} is allowed")
    return error


def flat(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()
