"""Totals over all ranks: a loss divided by the positives of the whole batch, wherever they are."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bigbatch import RankError, WeightError
from bigbatch.torch import Accumulator, weights
from tests.torch import test_normalisation as normalisation
from tests.torch.test_weights import boxes, detector, per_total, positives
from tests.torch.training import flat

from .shared import error_of, whole, wrapped

ENDS = {"uneven": (0, 9, 13), "a rank without positives": (0, 4, 13), "a rank without data": (0, 13, 13)}


def update(batch: Any, wrap: str, *, over_all_ranks: bool) -> Tensor:
    """The update of one step on this rank's part."""
    model = detector()
    before = flat(model)
    shared, how = wrapped(model, wrap)
    accumulator = Accumulator(
        shared, torch.optim.SGD(shared.parameters(), lr=0.1), per_total, 2, reduction="sum", **how
    )
    if over_all_ranks or batch is not None:
        batch = weights.with_total(batch, positives, over=accumulator if over_all_ranks else None)
    assert accumulator.step(batch).is_applied
    return whole(accumulator.model) - before


def full_update() -> Tensor:
    model: nn.Module = detector()
    batch = boxes()
    per_total(model, {**batch, "total": positives(batch)}).backward()
    return torch.cat([-0.1 * p.grad.flatten() for p in model.parameters()])


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # nn.Linear on three axes returns a view
@pytest.mark.parametrize("wrap", ["ddp", "fsdp, window"])
@pytest.mark.parametrize("name", ENDS)
def test_the_total_is_that_of_all_ranks(rank: int, size: int, wrap: str, name: str) -> None:
    ends = [*ENDS[name], *[13] * size]
    part = {key: tensor[ends[rank] : ends[rank + 1]] for key, tensor in boxes().items()}
    own = part if len(part["x"]) else None
    assert error_of(update(own, wrap, over_all_ranks=True), full_update()) <= 1e-12
    if name != "a rank without data":
        assert error_of(update(own, wrap, over_all_ranks=False), full_update()) > 1e-1


def test_counting_that_fails_on_one_rank_raises_on_all(rank: int) -> None:
    model, how = wrapped(detector(), "ddp")
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters()), per_total, 2, reduction="sum", **how)
    count = weights.tokens("missing") if rank == 0 else positives
    with pytest.raises(WeightError if rank == 0 else RankError):
        weights.with_total(boxes(), count, over=accumulator)
    assert weights.with_total(boxes(), positives, over=accumulator)["total"] > positives(boxes())


def test_a_scale_per_prompt_group(rank: int) -> None:
    """As docs/normalisation.md has it: the prompts of all ranks are counted, and a group is on one rank."""
    names = normalisation.names_of_page()
    exec(normalisation.PER_GROUP.partition("accumulator =")[0], names)
    plain = normalisation.make_policy()
    (-normalisation.per_group(plain, names)).backward()
    expected = torch.cat([p.grad.flatten() for p in plain.parameters()])

    own = names["batch"]["prompt"].lt(7) if rank == 0 else names["batch"]["prompt"].eq(7)
    if rank > 1:
        own = own & False
    part = {name: rows[own] for name, rows in names["batch"].items()}
    model = normalisation.make_policy()
    before = flat(model)
    shared, _ = wrapped(model, "ddp")

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return names["loss"](model, batch) / batch["total"]

    accumulator = Accumulator(shared, torch.optim.SGD(shared.parameters(), lr=1.0), loss, 2, reduction="sum")
    batch = names["with_scale"](part) if own.any() else None
    if batch is not None:
        batch["scale"] = batch["scale"] * len(batch["prompt"].unique())  # 1 / tokens of its group
    batch = weights.with_total(batch, lambda batch: len(batch["prompt"].unique()), over=accumulator)
    assert accumulator.step(batch).is_applied
    assert error_of(flat(model) - before, expected) <= 1e-12
