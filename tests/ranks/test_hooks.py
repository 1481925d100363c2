"""Hooks of parameters see the gradient of all ranks, once per step."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler

from bigbatch import GradientError, RankError
from bigbatch.torch import Accumulator
from bigbatch.torch.distributed.shards import local
from tests.torch.training import flat, make_loss, make_model, sgd

from .shared import FEED, MICRO_BATCH_SIZE, Work, error_of, whole, wrapped


def clamp(p: Tensor) -> None:
    p.grad.clamp_(-0.01, 0.01)


def add_hooks(model: nn.Module, *, is_before: bool) -> list[int]:
    seen: list[int] = []
    for p in model.parameters():
        if is_before:
            p.register_hook(lambda g: g.clamp(-0.01, 0.01))
        else:
            p.register_post_accumulate_grad_hook(clamp)
    next(model.parameters()).register_post_accumulate_grad_hook(lambda _: seen.append(1))
    return seen


def train_whole(work: Work) -> Tensor:
    model = make_model(work.problem)
    add_hooks(model, is_before=True)
    before, optimizer = flat(model), sgd(model)
    for batch in work.batches:
        optimizer.zero_grad()
        make_loss(work.problem)(model, batch).backward()
        optimizer.step()
    return flat(model) - before


CASES = [
    ("ddp", True, "batch"),
    ("ddp", False, "micro_batch"),
    ("ddp, small buckets", True, "window"),
    ("ddp, buckets as views", False, "batch"),
    ("ddp, buckets as views", True, "micro_batch"),
    ("fsdp, window", False, "batch"),
    ("fsdp, micro_batch", False, "window"),
    ("fsdp, micro_batch", False, "batch"),
]


@pytest.mark.parametrize(("wrap", "is_before", "way"), CASES)
def test_hooks_act_on_the_gradient_of_all_ranks(rank: int, size: int, wrap: str, is_before: bool, way: str) -> None:
    work = Work("samples", [[9 if rank % 2 else 6 for rank in range(size)], [5] * size])
    model = make_model(work.problem)
    before = flat(model)
    model, how = wrapped(model, wrap)
    seen = add_hooks(model, is_before=is_before)
    accumulator = Accumulator(
        model, sgd(model), make_loss(work.problem), MICRO_BATCH_SIZE, accumulation_steps=1000, **how
    )
    for part in work.own(dist.get_rank()):
        FEED[way](accumulator, part, work)
    assert error_of(whole(model) - before, train_whole(work)) <= 1e-12
    assert len(seen) == 2


def test_torch_does_not_call_hooks_of_tensors_for_sharded_parameters(rank: int, size: int) -> None:
    """So bigbatch does not either. If torch starts to call them, `hooks.run` should too."""
    work = Work("samples", [[5] * size])
    model, how = wrapped(make_model(work.problem), "fsdp, window")
    seen = []
    for p in model.parameters():
        p.register_hook(lambda g: seen.append(1))
    part = work.own(rank)[0]
    make_loss(work.problem)(model, part).backward()
    assert not seen
    model.zero_grad()
    assert Accumulator(model, sgd(model), make_loss(work.problem), 2, **how).step(part).is_applied
    assert not seen


READING = {
    "reads": lambda p: p.register_hook(lambda g: float(g.norm()) and None),
    "reads after": lambda p: p.register_post_accumulate_grad_hook(lambda p: float(local(p.grad).norm()) and None),
    "returns what it got": lambda p: p.register_hook(lambda g: g),
}
CHANGING = {
    "returns another": lambda p: p.register_hook(lambda g: g.clamp(-0.01, 0.01)),
    "changes in place": lambda p: p.register_hook(lambda g: g.copy_(2 * g)),
    "changes after": lambda p: p.register_post_accumulate_grad_hook(clamp),
    "drops after": lambda p: p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None)),
}


def step_with_hooks(hook: Any, rank: int, size: int, wrap: str, way: str, **options: Any) -> tuple[Tensor, Work]:
    """Makes a step with hooks on the last rank only."""
    work = Work("samples", [[9 if rank % 2 else 6 for rank in range(size)]])
    model = make_model(work.problem)
    before = flat(model)
    model, how = wrapped(model, wrap)
    if rank == size - 1:
        hook(next(model.parameters()))
    accumulator = Accumulator(
        model, sgd(model), make_loss(work.problem), MICRO_BATCH_SIZE, accumulation_steps=1000, **how, **options
    )
    try:
        FEED[way](accumulator, work.own(rank)[0], work)
    finally:
        assert all(p.grad is None for p in model.parameters())
        update = whole(model) - before
    return update, work


ON_DDP = [("ddp", "batch"), ("ddp, buckets as views", "micro_batch")]
ON_FSDP = ("fsdp, window", "window")


@pytest.mark.parametrize(("wrap", "way"), [*ON_DDP, ON_FSDP])
@pytest.mark.parametrize("name", READING)
def test_hooks_on_some_ranks_may_read_the_gradient(rank: int, size: int, name: str, wrap: str, way: str) -> None:
    update, work = step_with_hooks(READING[name], rank, size, wrap, way)
    model = make_model(work.problem)
    before = flat(model)
    make_loss(work.problem)(model, work.batches[0]).backward()
    sgd(model).step()
    assert error_of(update, flat(model) - before) <= 1e-12


@pytest.mark.parametrize(
    ("name", "wrap", "way"),
    [
        *((name, *on) for name in CHANGING for on in ON_DDP),
        *((name, *ON_FSDP) for name in CHANGING if "after" in name),  # torch does not call the others for shards
    ],
)
def test_hooks_on_some_ranks_may_not_change_the_gradient(rank: int, size: int, name: str, wrap: str, way: str) -> None:
    with pytest.raises(RankError, match=rf"on 1 of {size} ranks, and ranks have 0 to 1 of them"):
        step_with_hooks(CHANGING[name], rank, size, wrap, way)


@pytest.mark.parametrize("way", ["batch", "window"])
def test_hooks_registered_in_a_forward_pass(rank: int, size: int, way: str) -> None:
    """A rank without data would not have these hooks, so its parameters would differ."""
    work = Work("samples", [[4] * size])
    model = make_model(work.problem)
    expected = make_model(work.problem)
    next(expected.parameters()).register_hook(lambda g: g.clamp(-0.01, 0.01))
    make_loss(work.problem)(expected, work.batches[0]).backward()
    before = flat(model)
    sgd(expected).step()

    def register(layer: Any, *_: Any) -> None:
        if not layer.weight._backward_hooks:
            layer.weight.register_hook(lambda g: g.clamp(-0.01, 0.01))

    model[0].register_forward_pre_hook(register)
    model, how = wrapped(model, "ddp")
    accumulator = Accumulator(model, sgd(model), make_loss(work.problem), MICRO_BATCH_SIZE, **how)
    with pytest.raises(GradientError, match="had 0 hooks of parameters when the step began and has 1 now"):
        FEED[way](accumulator, work.own(rank)[0], work)
    assert torch.equal(whole(model), before)
    FEED[way](accumulator, work.own(rank)[0], work)
    assert error_of(whole(model) - before, flat(expected) - before) <= 1e-12


def test_all_ranks_compute_the_norm_with_a_scaler(rank: int, size: int) -> None:
    """The norm of a sharded gradient needs all ranks, whichever of them have hooks."""
    work = Work("samples", [[4] * size])
    model, how = wrapped(make_model(work.problem).float(), "fsdp, window")
    if rank == size - 1:
        READING["reads after"](next(model.parameters()))
    accumulator = Accumulator(model, sgd(model), make_loss(work.problem), 2, scaler=GradScaler("cpu"), **how)
    batch = work.own(rank)[0]
    assert batch is not None
    assert accumulator.step({name: t.float() if t.is_floating_point() else t for name, t in batch.items()}).is_applied
