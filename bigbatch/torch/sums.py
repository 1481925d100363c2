"""The gradient sums of a window, and what is done to all of them at once."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .distributed.shards import is_sharded, local, norm_over_ranks


class Sums(dict[Tensor, Tensor]):
    """The sum of the gradients of each parameter. A parameter without a gradient is not in it."""

    unit: Any = 1.0
    """What all sums are still to be multiplied by at the end."""

    def tensors(self) -> list[Tensor]:
        """The sums as real, dense tensors that share their memory."""
        for p, g in self.items():
            if g.is_sparse and not g.is_coalesced():
                self[p] = g.coalesce()
        return [plain(g) for g in self.values()]

    def multiply(self, factor: Any) -> None:
        """Multiplies all sums by a number or a tensor, in place."""
        if self and (isinstance(factor, Tensor) or factor != 1.0):
            torch._foreach_mul_(self.tensors(), factor)

    def add(self, others: "Sums") -> None:
        """Adds the sums of other terms of the loss."""
        for p, g in others.items():
            if p not in self:
                self[p] = g
            else:  # torch adds a sparse tensor to a dense one, not the other way round
                self[p] = g + self[p] if self[p].is_sparse else self[p] + g

    def norm(self) -> float:
        """The norm over all sums. Reading it is the one moment in a step that waits for the device."""
        if not self:
            return 0.0
        if any(type(g) is not Tensor and is_sharded(g) for g in self.values()):
            return norm_over_ranks(list(self.values()))
        tensors = self.tensors()
        total = _norm(torch._foreach_norm(tensors))
        if not math.isfinite(total) and all(bool(torch.isfinite(t).all()) for t in tensors):
            # finite numbers whose squares are too large
            largest = max(float(t.abs().max()) for t in tensors if t.numel())
            total = largest * _norm(torch._foreach_norm([t.double() / largest for t in tensors]))
        return total

    def norms_on_device(self) -> tuple[Tensor, Tensor]:
        """The norm of each sum and over all, without waiting. Squares that overflow float32 make it infinite."""
        norms = torch._foreach_norm(self.tensors())
        is_mixed = len({norm.dtype for norm in norms}) > 1
        stacked = torch.stack([norm.double() for norm in norms] if is_mixed else list(norms)).double()
        return stacked, torch.linalg.vector_norm(stacked)

    def clip(self, total_norm: Any, max_norm: float | None, max_value: float | None) -> None:
        """Clips by norm as torch.nn.utils.clip_grad_norm_ does, then by value.

        Args:
            total_norm: The norm over all sums: a number, or a tensor that is not waited for.
            max_norm: The largest norm; None for any.
            max_value: The largest absolute value; None for any.
        """
        if max_norm is not None:
            factor = max_norm / (total_norm + 1e-6)
            if isinstance(factor, Tensor):
                is_wide = any(t.dtype == torch.float64 for t in self.tensors())
                self.multiply(factor.clamp(max=1.0).to(torch.float64 if is_wide else torch.float32))
            else:
                self.multiply(min(factor, 1.0))
        if max_value is not None and self:
            tensors = self.tensors()
            torch._foreach_clamp_min_(tensors, -max_value)
            torch._foreach_clamp_max_(tensors, max_value)


def _norm(norms: Sequence[Tensor]) -> float:
    if all(n.is_cpu for n in norms):
        return math.hypot(*[n.item() for n in norms])
    device = norms[0].device
    wide = torch.float64 if any(n.dtype == torch.float64 for n in norms) else torch.float32
    return float(torch.linalg.vector_norm(torch.stack([n.to(device, wide) for n in norms])))


def plain(gradient: Tensor) -> Tensor:
    """A gradient as a real, dense tensor of this rank that shares its memory."""
    if type(gradient) is not Tensor:
        gradient = local(gradient)
    gradient = gradient._values() if gradient.is_sparse else gradient
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient
