"""The work of all contestants in a table: the same steps, from the same start, on the same batch."""

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
"""The allowed relative error of an update: for float32 sums, and for values rounded to bfloat16."""


@dataclass(frozen=True)
class Work:
    model: Callable[[], nn.Module]
    """Creates the model, the same every time."""
    loss: Callable[[nn.Module, Batch], Tensor]
    batch: Batch
    micro_batch_size: int
    optimizer: Callable[[nn.Module], Optimizer]
    device: str = "cpu"
    """The device of the model; the batch may be elsewhere."""
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
    """The same optimizer, but its first update is nearly the gradient itself, so that a wrong scale shows."""
    return AdamW(model.parameters(), lr=1.0, eps=1.0, weight_decay=0.0, fused=True)


def update_of(step_once: Callable[[nn.Module, Work], Any], work: Work) -> Tensor:
    """The change of the parameters in one step, as one vector."""
    work = replace(work, optimizer=plain_adamw)
    model = work.model()
    before = flat(model)
    step_once(model, work)
    return flat(model).to(before.device) - before  # Lightning moves the model back to the CPU


def update_error(update: Tensor, expected: Tensor, name: str, precision: str | None) -> float:
    """The relative error of the update; raises AssertionError if it is too large."""
    error = float((update - expected).norm() / expected.norm())
    if not error <= TOLERANCES[precision]:
        raise AssertionError(f"{name}: the first update is {error:.1e} away, {TOLERANCES[precision]:.0e} is allowed")
    return error


def flat(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()
