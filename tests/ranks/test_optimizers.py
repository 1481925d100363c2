"""Several optimizers, and gradients without a step, on a model that all ranks train."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel

from bigbatch import BigBatchWarning
from bigbatch.torch import Accumulator
from tests.torch.training import flat, make_loss, make_model, muon_and_adamw

from .shared import MICRO_BATCH_SIZE, WRAPS, Work, error_of, sharded, whole, wrapped

CLIP_NORM = 0.2
Train = Callable[[nn.Module, Any, Work], Any]


def uneven(size: int) -> Work:
    """Three steps in which ranks have different numbers of samples, and one has none once."""
    return Work("samples", [[7, 4, 6, 5][:size], [1, 11, 3, 2][:size], [9, 0, 5, 5][:size]], clip_norm=CLIP_NORM)


def two_adams(model: nn.Module) -> list[torch.optim.Optimizer]:
    """One for the weights and one for the biases."""
    held: tuple[list[Any], list[Any]] = ([], [])
    for p in model.parameters():
        held[p.ndim == 2].append(p)
    return [torch.optim.AdamW(held[1], lr=1e-2), torch.optim.Adam(held[0], lr=3e-2)]


def trained_whole(work: Work, make: Callable[[nn.Module], Any]) -> Tensor:
    model = make_model(work.problem)
    before, optimizers = flat(model), make(model)
    for batch in work.batches:
        model.zero_grad()
        make_loss(work.problem)(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        for optimizer in optimizers:
            optimizer.step()
    return flat(model) - before


def shared_accumulator(work: Work, wrap: str, make: Callable[[nn.Module], Any], **options: Any) -> Accumulator:
    model, how = wrapped(make_model(work.problem), wrap)
    return Accumulator(model, make(model), make_loss(work.problem), MICRO_BATCH_SIZE, **how, **options)


@pytest.mark.parametrize("wrap", WRAPS)
def test_two_optimizers_equal_the_full_batch(size: int, wrap: str) -> None:
    work = uneven(size)
    accumulator = shared_accumulator(work, wrap, two_adams, clip_norm=CLIP_NORM)
    before = whole(accumulator.model)
    for part in work.own(dist.get_rank()):
        assert accumulator.step(part).is_applied
    assert error_of(whole(accumulator.model) - before, trained_whole(work, two_adams)) <= 1e-9


@pytest.mark.parametrize("wrap", ["ddp", "fsdp, window"])
def test_muon_and_adamw(size: int, wrap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if wrap != "ddp":  # Muon multiplies matrices in bfloat16, which rounds otherwise if they are in shards
        monkeypatch.setattr(Tensor, "bfloat16", lambda tensor: tensor)
    work = uneven(size)
    accumulator = shared_accumulator(work, wrap, muon_and_adamw, clip_norm=CLIP_NORM)
    before = whole(accumulator.model)
    for part in work.own(dist.get_rank()):
        accumulator.step(part)
    assert error_of(whole(accumulator.model) - before, trained_whole(work, muon_and_adamw)) <= 1e-9


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_gradient_without_a_step_equals_that_of_the_full_batch(size: int, wrap: str) -> None:
    """It is left in .grad, clipped, in shards if the parameters are; the user's own step goes on from there."""
    work = uneven(size)
    accumulator = shared_accumulator(work, wrap, two_adams, clip_norm=CLIP_NORM)
    before = whole(accumulator.model)
    for part in work.own(dist.get_rank()):
        accumulator.model.zero_grad()
        step = accumulator.backward(part)
        assert not step.is_applied
        for p in accumulator.model.parameters():
            assert type(p.grad) is type(p.data)
        for optimizer in accumulator.optimizer:
            optimizer.step()
    assert accumulator.num_steps == 0
    assert error_of(whole(accumulator.model) - before, trained_whole(work, two_adams)) <= 1e-9


@pytest.mark.parametrize("wrap", ["ddp", "ddp, buckets as views", "fsdp, window"])
def test_lbfgs(size: int, wrap: str) -> None:
    work = uneven(size)

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def train(optimizer: Any, backward: Callable[[], Any]) -> None:
        def closure() -> Any:
            optimizer.zero_grad()
            return backward()

        optimizer.step(closure)

    plain = make_model(work.problem)
    before, optimizer = flat(plain), make(plain)
    for batch in work.batches:

        def of_full_batch(batch: Any = batch) -> Tensor:
            loss: Tensor = make_loss(work.problem)(plain, batch)
            loss.backward()
            return loss

        train(optimizer, of_full_batch)
    accumulator = shared_accumulator(work, wrap, make)
    for part in work.own(dist.get_rank()):
        train(accumulator.optimizer, lambda part=part: accumulator.backward(part).loss)  # type: ignore[misc]
    assert error_of(whole(accumulator.model) - before, flat(plain) - before) <= 1e-9


@pytest.mark.parametrize("call", ["step", "backward"])
@pytest.mark.parametrize("wrap", ["ddp", "fsdp, window"])
def test_a_bad_gradient_on_one_rank_for_one_optimizer_holds_all_back(size: int, wrap: str, call: str) -> None:
    work = uneven(size)
    accumulator = shared_accumulator(work, wrap, two_adams)
    plain_loss = accumulator.loss

    def bad_on_one_rank(model: Any, batch: Any) -> Tensor:
        x = batch["x"] * float("nan") if dist.get_rank() == size - 1 else batch["x"]
        return F.cross_entropy(model(x), batch["y"])

    accumulator.loss = bad_on_one_rank
    before = whole(accumulator.model)
    part = work.own(dist.get_rank())[0]
    with pytest.warns(BigBatchWarning, match="is not finite"):
        assert not getattr(accumulator, call)(part).is_applied
    assert torch.equal(whole(accumulator.model), before)
    assert all(p.grad is None for p in accumulator.model.parameters())
    accumulator.loss = plain_loss
    assert accumulator.step(part).is_applied


@pytest.mark.parametrize("share", [DistributedDataParallel, sharded])
def test_an_overflow_on_one_rank_lowers_the_scale_of_all_once(size: int, share: Any) -> None:
    work = uneven(size)
    model = share(make_model(work.problem).float())
    scaler = GradScaler("cpu", init_scale=2.0**100)

    def steep(model: Any, batch: Any) -> Tensor:
        slope = 1e12 if dist.get_rank() == 0 else 1.0
        return F.cross_entropy(model(batch["x"].float()), batch["y"]) * slope

    accumulator = Accumulator(model, two_adams(model), steep, MICRO_BATCH_SIZE, scaler=scaler)
    part = work.own(dist.get_rank())[0]
    before = whole(model)
    assert not accumulator.step(part).is_applied
    assert scaler.get_scale() == 2.0**99
    accumulator.backward(part)
    for optimizer in accumulator.optimizer:
        scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**98
    assert torch.equal(whole(model), before)
