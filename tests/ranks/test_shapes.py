"""Batches of other shapes: each rank cuts its own part, of another size than that of the others, or has none."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from bigbatch import BatchError, RankError
from bigbatch.torch import Accumulator
from bigbatch.torch.cutting import take
from tests.torch import test_batch_axis as axes
from tests.torch import test_cutting as cutting
from tests.torch.training import flat, sgd

from .shared import error_of, whole, wrapped

N = 7
FIRSTS = {"uneven": (0, 5), "one has none": (0, N), "the first has none": (0, 0)}
"""Where the parts of the first two ranks begin; all others have nothing."""


def time_major(first: int, last: int) -> dict[str, Any]:
    return {name: tensor[:, first:last].contiguous() for name, tensor in axes.ragged().items()}


def listed(first: int, last: int) -> list[Any]:
    return cutting.samples()[first:last]


def columns(first: int, last: int) -> Any:
    found = [s["x"] for s in cutting.samples()], [s["y"] for s in cutting.samples()]
    return take(found, slice(first, last))


def of_columns(model: nn.Module, batch: Any) -> Any:
    return cutting.list_loss(model, [{"x": x, "y": y} for x, y in zip(*batch, strict=True)])


def packed(first: int, last: int) -> dict[str, Any] | None:
    if first == last:
        return None
    parts = list(cutting.cut_packed(cutting.packed(), [size for size in (first, last - first, N - last) if size]))
    return parts[1 if first else 0]


WORK: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "time-major": (
        lambda: axes.made(axes.Recurrent),
        axes.loss,
        time_major,
        {"batch_axis": 1, "weight": axes.num_tokens},
    ),
    "list": (cutting.made, cutting.list_loss, listed, {"cut": "list"}),
    "columns": (cutting.made, of_columns, columns, {"cut": "list"}),
    "packed": (lambda: cutting.made(cutting.Packed), cutting.packed_loss, packed, cutting.PACKED),
}


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # a linear layer on three axes returns a view
@pytest.mark.parametrize("share", FIRSTS)
@pytest.mark.parametrize("wrap", ["ddp", "fsdp, window"])
@pytest.mark.parametrize("kind", WORK)
def test_ranks_are_exact(rank: int, size: int, kind: str, wrap: str, share: str) -> None:
    make, loss, part, options = WORK[kind]
    model = make()
    full, before = copy.deepcopy(model), flat(model)
    loss(full, part(0, N)).backward()
    sgd(full).step()
    shared, how = wrapped(model, wrap)
    accumulator = Accumulator(shared, sgd(shared), loss, 2, **how, **options)
    first, last = (*FIRSTS[share], *[N] * size)[rank : rank + 2]
    step = accumulator.step(part(first, last))
    assert step.is_applied
    assert error_of(whole(shared) - before, flat(full) - before) <= 1e-12


def test_a_cut_that_one_rank_refuses_is_refused_on_all(rank: int, size: int) -> None:
    def wrong(batch: Any, sizes: list[int]) -> list[Any]:
        return list(cutting.cut_packed(batch, sizes))[: len(sizes) - (rank == 0)]

    model = cutting.made(cutting.Packed)
    shared, how = wrapped(model, "ddp")
    accumulator = Accumulator(shared, sgd(shared), cutting.packed_loss, 2, **how, **{**cutting.PACKED, "cut": wrong})
    refused = (BatchError, "cut returned 1 micro-batches") if rank == 0 else (RankError, "rank 0 refused what it was")
    with pytest.raises(refused[0], match=refused[1]):
        accumulator.step(packed(*((0, 4) if rank == 0 else (4, N))) if rank < 2 else None)
    assert not any(torch.isnan(p).any() for p in model.parameters())
