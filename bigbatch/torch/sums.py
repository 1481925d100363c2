"""The gradient sums of a window, and what is done to all of them at once."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .distributed.shards import is_sharded, local, norm_over_ranks


class Sums(dict[Tensor, Tensor]):
    """By parameter; a parameter that got no gradient is not in it. All are to be multiplied by `unit` at the end."""

    unit: Any = 1.0


def values(sums: Sums) -> list[Tensor]:
    """The sums as real, dense tensors that share their memory."""
    for p, g in sums.items():
        if g.is_sparse and not g.is_coalesced():
            sums[p] = g.coalesce()
    return [plain(g) for g in sums.values()]


def scale(sums: Sums, factor: Any) -> None:
    if sums and (isinstance(factor, Tensor) or factor != 1.0):
        torch._foreach_mul_(values(sums), factor)


def add(sums: Sums, others: Sums) -> None:
    for p, g in others.items():
        if p not in sums:
            sums[p] = g
        else:  # torch adds a sparse tensor to a dense one, not the other way round
            sums[p] = g + sums[p] if sums[p].is_sparse else sums[p] + g


def norm(sums: Sums) -> float:
    """The norm over all of them. Reading it is the one moment in a step that waits for the device."""
    tensors = values(sums)
    if not tensors:
        return 0.0
    if any(map(is_sharded, sums.values())):
        return norm_over_ranks(list(sums.values()))
    total = _norm(torch._foreach_norm(tensors))
    if not math.isfinite(total) and all(bool(torch.isfinite(t).all()) for t in tensors):
        # finite numbers whose squares are too large
        largest = max(float(t.abs().max()) for t in tensors if t.numel())
        total = largest * _norm(torch._foreach_norm([t.double() / largest for t in tensors]))
    return total


def _norm(norms: Sequence[Tensor]) -> float:
    if all(n.is_cpu for n in norms):
        return math.hypot(*[n.item() for n in norms])
    device = norms[0].device
    wide = torch.float64 if any(n.dtype == torch.float64 for n in norms) else torch.float32
    return float(torch.linalg.vector_norm(torch.stack([n.to(device, wide) for n in norms])))


def clip(sums: Sums, total_norm: float, clip_norm: float | None, clip_value: float | None) -> None:
    """By norm as torch.nn.utils.clip_grad_norm_ does it, then by value."""
    if clip_norm is not None:
        scale(sums, min(clip_norm / (total_norm + 1e-6), 1.0))
    if clip_value is not None and sums:
        tensors = values(sums)
        torch._foreach_clamp_min_(tensors, -clip_value)
        torch._foreach_clamp_max_(tensors, clip_value)


def norm_on_device(sums: Sums) -> tuple[Tensor, Tensor]:
    """The norm of each of them and over all, which nobody waits for. Squares that overflow float32 make it infinite."""
    norms = torch._foreach_norm(values(sums))
    is_mixed = len({norm.dtype for norm in norms}) > 1
    stacked = torch.stack([norm.double() for norm in norms] if is_mixed else list(norms)).double()
    return stacked, torch.linalg.vector_norm(stacked)


def clip_on_device(sums: Sums, total_norm: Tensor, clip_norm: float | None, clip_value: float | None) -> None:
    """As `clip`, by a norm that is not on the host."""
    if clip_norm is not None:
        tensors = values(sums)
        wide = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
        torch._foreach_mul_(tensors, (clip_norm / (total_norm + 1e-6)).clamp(max=1.0).to(wide))
    clip(sums, math.nan, None, clip_value)


def plain(gradient: Tensor) -> Tensor:
    gradient = local(gradient)
    gradient = gradient._values() if gradient.is_sparse else gradient
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient
