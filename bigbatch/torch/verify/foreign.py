"""The optimizer steps of the user's own loop, with their gradients, which the loop may zero afterwards."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...core.verify.trial import Array


class Steps:
    """Records, inside its block, the steps of all optimizers that hold some of these parameters."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._own = set(parameters)
        self._num: dict[Tensor, int] = {}
        self._num_elsewhere = 0
        self.gradients: dict[Tensor, Array] = {}
        """The gradients at the first step that used them."""

    def __enter__(self) -> "Steps":
        self._handle = register_optimizer_step_pre_hook(self._record)
        return self

    def __exit__(self, *_: Any) -> None:
        self._handle.remove()

    def _record(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        held = [p for group in optimizer.param_groups for p in group["params"] if p in self._own]
        self._num_elsewhere += not held
        for p in held:
            if p.grad is not None:
                self._num[p] = self._num.get(p, 0) + 1
                self.gradients.setdefault(p, as_array(p.grad))

    def causes(self, num_micro_batches: int) -> list[str]:
        """The mistakes in these steps."""
        found = []
        num = max(self._num.values(), default=0)
        if num > 1:
            found.append(
                f"the loop takes {num} steps of the optimizer for a window of {num_micro_batches} micro-batches, so "
                "each step has a part of the batch: call optimizer.step() once, after the last micro-batch"
            )
        if self._num_elsewhere and not num:
            found.append(
                "the loop steps an optimizer that holds none of the parameters of the model it is given: make the "
                "optimizer from that model"
            )
        return found


def as_array(gradient: Tensor) -> Array:
    """A dense copy on the host."""
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    found: Array = dense.detach().cpu().numpy().copy()
    return found
