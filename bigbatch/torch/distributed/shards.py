"""Tensors of which this rank has a part: torch's DTensor, which is imported only if there is one."""

import math
from typing import Any

import torch
from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether this rank has a part of it: a DTensor, without asking for torch.distributed."""
    return hasattr(tensor, "to_local")


def local(tensor: Any) -> Tensor:
    """The part of a tensor that this rank has."""
    part: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return part


def like(whole: Any, part: Tensor) -> Tensor:
    """The opposite of `local`: makes a part into a tensor that is sharded like `whole`."""
    if not is_sharded(whole):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def norm_over_ranks(gradients: list[Tensor]) -> float:
    """The norm of gradients of which each rank has a part; all ranks get the same number."""

    def of(parts: list[Tensor]) -> float:
        total: Any = torch.nn.utils.get_total_norm(parts)
        return float(total.full_tensor())

    total = of(gradients)
    return total if math.isfinite(total) else of([g.double() for g in gradients])
