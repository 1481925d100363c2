"""What micro-batches count, as plain numbers; the arithmetic with them is in core/weight.py."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.errors import WeightError
from ..core.weight import Reduction, Terms, as_plain, as_terms, check_terms, check_weight, shares, totals
from .distributed.totals import Agreed

Weight = Callable[[Any], Any]
SUMMED = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
SUMMED |= {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
"""What torch can compare and add up: uint64 and float8 it cannot (2.13)."""


class Scales(dict[Terms, Terms]):
    """What the terms of a loss are multiplied by, by the weight of its micro-batch; known once the ranks agree."""

    def __init__(self, agreed: Agreed, reduction: Reduction) -> None:
        super().__init__()
        self._agreed = agreed
        self._reduction: Reduction = reduction

    def __missing__(self, weight: Terms) -> Terms:
        self[weight] = shares(weight, self._agreed().total, self._reduction)
        return self[weight]


def weigh(micro_batches: Sequence[Any], weight: Weight) -> list[Terms]:
    """The weight of each micro-batch, checked; what is on a device is fetched in one go."""
    weights = read([as_terms(weight(micro_batch)) for micro_batch in micro_batches])
    check_all(weights)
    return weights


def check_all(weights: Sequence[Terms]) -> None:
    for number, weight in enumerate(weights):
        if not weight:
            raise WeightError(
                f"the weight of micro-batch {number + 1} has 0 terms: return one number for each of the loss"
            )
        check_weight(weight, of=f"micro-batch {number + 1}")
        check_terms(len(weights[0]), len(weight))
    for total in totals(weights):
        check_weight((total,), of=f"{len(weights)} micro-batches together")


def on_host(weight: Terms) -> Terms:
    """Plain numbers where no device has to be asked; weights per sample are added up."""
    if all(type(w) is int for w in weight):
        return weight
    summed = (_sum(w) if isinstance(w, Tensor) else as_plain(w) for w in weight)
    return tuple(w.item() if isinstance(w, Tensor) and w.device.type == "cpu" else w for w in summed)


def read(weights: Sequence[Terms]) -> list[Terms]:
    """Plain numbers; those that are on a device are fetched together."""
    known = [on_host(weight) for weight in weights]
    waiting = [w for weight in known for w in weight if isinstance(w, Tensor)]
    if not waiting:
        return known
    fetched = iter(torch.stack(waiting).tolist())
    return [tuple(next(fetched) if isinstance(w, Tensor) else w for w in weight) for weight in known]


def _sum(weight: Tensor) -> Tensor:
    """In plain numbers on the CPU; elsewhere wide, since torch divides whole numbers in float32.

    If one sample counts less than nothing, others must not hide it: the sum is then no number.
    """
    if weight.is_meta or weight.is_quantized or weight.is_nested or weight.layout is not torch.strided:
        raise WeightError(
            f"the weight is a tensor on {weight.device.type} with {weight.dtype} and {weight.layout}, whose values "
            "cannot be added up: return a number or a plain dense tensor"
        )
    if weight.dtype not in SUMMED:
        weight = weight.to(_widest(weight))
    if weight.numel() > 1 and not weight.is_complex() and weight.dtype is not torch.bool:
        is_negative = (weight < 0).any()
        if not weight.is_cpu:
            return weight.detach().sum(dtype=_widest(weight)).where(~is_negative, torch.nan)
        if is_negative:
            raise WeightError(
                f"{int((weight < 0).sum())} of {weight.numel()} samples have a weight below 0 ({weight.min():g} is the "
                "lowest): a weight says how much a sample counts, so it must be at least 0"
            )
    if weight.is_cpu and not weight.is_floating_point():
        return weight.detach().sum()
    return weight.detach().sum(dtype=_widest(weight))


def _widest(weight: Tensor) -> torch.dtype:
    return torch.float32 if weight.device.type == "mps" else torch.float64  # mps has no float64


def times(terms: Terms, factor: float) -> Terms:
    """Every term multiplied by the same."""
    return terms if factor == 1 else tuple(term * factor for term in terms)
