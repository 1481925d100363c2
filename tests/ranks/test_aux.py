"""The aux of a loss over ranks: numbers are those of the whole batch, rows those of the rank's own part."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import BigBatchWarning, OptionError, RankError, Window
from bigbatch.torch import Accumulator
from bigbatch.torch import batch as nest
from tests.problems import IGNORED
from tests.torch.training import Batch, flat, make_model, sgd

from .shared import MICRO_BATCH_SIZE, Work, error_of, train_whole, whole, wrapped

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
WRAPS = ["ddp", "fsdp, window", "fsdp, micro_batch"]
WORDS = {
    "margin": "mean",
    "correct": "sum",
    "logits": "concatenate",
    "nested": ["sum", "mean", lambda values, weights: max(values)],
    "own": lambda values, weights: torch.cat(values).amax(),
    "none": "auto",
}


def of_samples(model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
    logits = model(batch["x"])
    correct = (logits.argmax(-1) == batch["y"]).sum()
    margin = logits.amax(-1).mean()
    aux = {"margin": margin, "correct": correct, "logits": logits, "own": logits, "none": None}
    return F.cross_entropy(logits, batch["y"]), {**aux, "nested": [logits.sum(0), logits.mean(0), len(batch["y"])]}


def works(size: int) -> dict[str, Work]:
    def by_rank(*shares: Any) -> list[Any]:
        return [shares[rank % len(shares)] for rank in range(size)]

    return {
        "uneven": Work("samples", [by_rank(16, 5), by_rank(3, 18)]),
        "a rank with none": Work("samples", [by_rank(9, 0), by_rank(0, 6)]),
    }


def accumulator_for(work: Work, wrap: str, loss: Any, **options: Any) -> Accumulator:
    model, how = wrapped(make_model(work.problem), wrap)
    options = {"aux": WORDS, "accumulation_steps": 100, **how, **options}
    return Accumulator(model, sgd(model), loss, MICRO_BATCH_SIZE, has_aux=True, **options)


def fed(accumulator: Accumulator, batch: Batch | None, way: str) -> Any:
    if way == "batch":
        return accumulator.step(batch)
    parts = [] if batch is None else nest.cut(batch, MICRO_BATCH_SIZE)[0]
    if way == "window":
        return accumulator.step(Window(parts))
    for part in parts:
        with accumulator.micro_batch(weight=len(part["y"])) as micro:
            micro.backward(accumulator.loss(accumulator.model, part))
    (step,) = accumulator.flushed()
    return step


def close(found: Any, expected: Tensor) -> None:
    torch.testing.assert_close(torch.as_tensor(found, dtype=expected.dtype), expected.detach(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("way", ["batch", "window", "micro_batch"])
@pytest.mark.parametrize("name", ["uneven", "a rank with none"])
@pytest.mark.parametrize("wrap", WRAPS)
def test_numbers_are_of_all_ranks_and_rows_of_this_one(name: str, wrap: str, way: str, rank: int, size: int) -> None:
    if way == "micro_batch" and wrap != "ddp":
        pytest.skip("with fully_shard all ranks feed equally many micro-batches")
    work = works(size)[name]
    plain = make_model(work.problem)
    accumulator = accumulator_for(work, wrap, of_samples)
    for batch, own, sizes in zip(work.batches, work.own(rank), work.sizes, strict=True):
        loss, expected = of_samples(plain, batch)
        step = fed(accumulator, own, way)
        close(step.aux["margin"], expected["margin"])
        assert step.aux["correct"] == expected["correct"].item()
        assert step.metrics["margin"] == step.aux["margin"]
        assert step.metrics["correct"] == step.aux["correct"]
        assert step.summed == ("correct",)
        start = sum(sizes[:rank])
        rows = expected["logits"][start : start + sizes[rank]]
        close(step.aux["logits"], rows)
        total, mean, largest = step.aux["nested"]
        close(total, expected["nested"][0])
        close(mean, expected["nested"][1])
        assert largest == max(min(MICRO_BATCH_SIZE, num) for num in sizes)
        assert step.aux["none"] is None
        if own is None:
            assert step.aux["own"] is None
        else:
            close(step.aux["own"], rows.amax())
        plain.zero_grad()
        loss.backward()
        sgd(plain).step()
    assert error_of(whole(accumulator.model), flat(plain)) <= 1e-12


def of_tokens(model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
    logits, _ = model(batch["x"])
    logits, y = logits.flatten(0, 1), batch["y"].flatten()
    surprise = F.cross_entropy(logits, y, ignore_index=IGNORED)
    return surprise, {"surprise": surprise, "last": model(batch["x"])[0][:, -1], "counted": (y != IGNORED).sum()}


@pytest.mark.parametrize("empty", ["first", "last", "all of one rank"])
@pytest.mark.parametrize("wrap", ["ddp", "fsdp, window"])
def test_micro_batches_without_a_token(wrap: str, empty: str, rank: int, size: int) -> None:
    """They are run for their rows, but with fully_shard, which says so."""
    none, some = (0, 0, 0, 0), (3, 9, 17, 40)
    ragged = {"first": (*none, *some), "last": (*some, *none), "all of one rank": (*none, 0, 0)}[empty]
    work = Work("tokens", [[(5, 2, 7, 11, 3, 8), ragged] * (size // 2)])
    plain = make_model(work.problem)
    model = make_model(work.problem)
    for both in (model, plain):
        both.length.requires_grad_(False)
    expected = of_tokens(plain, work.batches[0])[1]
    model, how = wrapped(model, wrap)
    accumulator = Accumulator(
        model,
        sgd(model),
        of_tokens,
        MICRO_BATCH_SIZE,
        weight=lambda batch: (batch["y"] != IGNORED).sum(),
        has_aux=True,
        **how,
    )
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", BigBatchWarning)
        step = accumulator.step(work.own(rank)[0])
    messages = [str(w.message) for w in found if "were not run" in str(w.message)]
    start = sum(work.sizes[0][:rank])
    rows = expected["last"][start : start + work.sizes[0][rank]]
    if wrap == "ddp":
        close(step.aux["last"], rows)
        assert not messages
    else:
        counted = (work.own(rank)[0]["y"] != IGNORED).any(1)
        has_tokens = [bool(part.any()) for part in counted.split(MICRO_BATCH_SIZE) for _ in part]
        close(step.aux["last"], rows[torch.tensor(has_tokens)])
        assert bool(messages) == (not all(has_tokens))
    close(step.metrics["surprise"], expected["surprise"])
    assert step.metrics["counted"] == expected["counted"].item()
    close(step.metrics["surprise"], torch.tensor(step.loss, dtype=torch.float64))
    assert error_of(whole(model), whole_after(plain, work)) <= 1e-12


def whole_after(plain: nn.Module, work: Work) -> Tensor:
    of_tokens(plain, work.batches[0])[0].backward()
    torch.optim.SGD([p for p in plain.parameters() if p.grad is not None], lr=0.1).step()
    return flat(plain)


@pytest.mark.parametrize("change", ["name", "kind"])
def test_ranks_with_different_aux_all_refuse(change: str, rank: int, size: int) -> None:
    def loss(model: nn.Module, batch: Batch) -> Any:
        value, aux = of_samples(model, batch)
        if change == "name":
            return value, {f"a{dist.get_rank()}": aux["margin"]}
        return value, aux["margin"].detach() if dist.get_rank() else aux["logits"].sum(0)

    work = works(size)["uneven"]
    accumulator = accumulator_for(work, "ddp", loss, aux="mean")
    before = flat(accumulator.model)
    with pytest.raises(RankError, match=r"on one rank and .* on another|on two ranks: aux is a tensor of shape"):
        accumulator.step(work.own(rank)[0])
    assert torch.equal(flat(accumulator.model), before)


@pytest.mark.parametrize("way", ["batch", "micro_batch"])
@pytest.mark.parametrize("wrap", ["ddp", "fsdp, window"])
def test_aux_that_cannot_be_combined_on_one_rank(wrap: str, way: str, rank: int, size: int) -> None:
    if way == "micro_batch" and wrap != "ddp":
        pytest.skip("with fully_shard all ranks feed equally many micro-batches")

    def loss(model: nn.Module, batch: Batch) -> Any:
        value, aux = of_samples(model, batch)
        return value, {"ok": aux["correct"] > 3 if rank == 1 else aux["correct"].item()}

    work = works(size)["uneven"]
    accumulator = accumulator_for(work, wrap, loss, aux="auto")
    before = whole(accumulator.model)
    message = "true or false" if rank == 1 else "returned on rank 1 cannot be combined, so no rank made this step"
    with pytest.raises(OptionError if rank == 1 else RankError, match=message):
        fed(accumulator, work.own(rank)[0], way)
    assert torch.equal(whole(accumulator.model), before)
    accumulator.loss = lambda model, batch: (of_samples(model, batch)[0], {})
    assert fed(accumulator, work.own(rank)[0], way).is_applied


def test_a_function_that_fails_on_one_rank(rank: int, size: int) -> None:
    def fail(values: Any, weights: Any) -> None:
        if rank == 1:
            raise ValueError("no")

    def loss(model: nn.Module, batch: Batch) -> Any:
        value, aux = of_samples(model, batch)
        return value, aux["logits"]

    work = works(size)["uneven"]
    accumulator = accumulator_for(work, "ddp", loss, aux=fail)
    before = flat(accumulator.model)
    with pytest.raises(ValueError if rank == 1 else RankError, match="no" if rank == 1 else "failed on rank 1"):
        accumulator.step(work.own(rank)[0])
    assert torch.equal(flat(accumulator.model), before)
    accumulator.loss = lambda model, batch: (of_samples(model, batch)[0], {})
    assert accumulator.step(work.own(rank)[0]).is_applied


def test_negative_control_a_mean_over_ranks_differs(rank: int, size: int) -> None:
    work = works(size)["uneven"]
    plain = make_model(work.problem)
    own = of_samples(plain, work.own(rank)[0])[1]["margin"].detach()
    dist.all_reduce(own)
    expected = of_samples(plain, work.batches[0])[1]["margin"]
    assert abs((own / size - expected).item()) > 1e-4


def test_nobody_has_data(rank: int, size: int) -> None:
    work = works(size)["uneven"]
    step = accumulator_for(work, "ddp", of_samples).step(None)
    assert (step.aux, step.metrics, step.summed) == (None, {}, ())
    assert not step.is_applied
    assert train_whole(work)[1]
