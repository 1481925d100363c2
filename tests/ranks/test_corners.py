"""Corner cases in which a rank could wait forever, or the result could be silently wrong."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bigbatch import BatchError, GradientError, OptionError, OrderError, RankError, WeightError
from bigbatch.torch import Accumulator
from tests.problems import IGNORED
from tests.torch.training import Batch, flat, make_loss, make_model, sgd

from .shared import Work, error_of, sharded, train_whole, whole, wrapped
from .test_traps import every_wrap, make

Batches = list[Batch | None]


def by_micro_batch(accumulator: Accumulator, batches: Batches, loss: Any, weight: Any = None) -> None:
    for batch in batches:
        for start in range(0, 0 if batch is None else len(batch["y"]), 4):
            micro_batch = {name: tensor[start : start + 4] for name, tensor in batch.items()}
            with accumulator.micro_batch(weight=len(micro_batch["y"]) if weight is None else weight) as micro:
                micro.backward(loss(accumulator.model, micro_batch))
    accumulator.flush()


def assert_exact(accumulator: Accumulator, before: Tensor, work: Work) -> None:
    assert error_of(whole(accumulator.model) - before, train_whole(work)[0]) <= 1e-12


# --- forward passes without a backward pass --------------------------------------------------------------


@pytest.mark.parametrize("ranks", [[1], [0, 1, 2, 3]], ids=["on one rank", "on all"])
def test_a_stray_pass_before_micro_batches(rank: int, size: int, ranks: list[int]) -> None:
    work = Work("samples", [[8, 3] * (size // 2)])
    accumulator, before = make(work, "ddp", accumulation_steps=100)
    for _ in range(2):
        if rank in ranks:
            accumulator.model(torch.zeros(1, 64, dtype=torch.float64))
        by_micro_batch(accumulator, work.own(rank), make_loss(work.problem))
    work.batches *= 2
    assert_exact(accumulator, before, work)


class Cut(torch.autograd.Function):
    """Raises in the middle of a backward pass while the switch is on."""

    switch: bool

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if Cut.switch:
            raise RuntimeError("the backward pass broke")
        return gradient


@every_wrap
@pytest.mark.parametrize("way", ["batch", "micro_batch"])
def test_backward_pass_that_fails_in_the_middle(rank: int, size: int, wrap: str, way: str) -> None:
    work = Work("samples", [[8] * size] * 2)
    plain = make_loss(work.problem)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        inner: Any = model.module if hasattr(model, "module") else model
        handle = inner[1].register_forward_hook(lambda module, inputs, output: Cut.apply(output))
        try:
            return plain(model, batch)
        finally:
            handle.remove()

    Cut.switch = False
    accumulator, before = make(work, wrap, loss=loss, accumulation_steps=100)
    first, second = work.own(rank)
    accumulator.step(first)
    Cut.switch = True
    with pytest.raises(RuntimeError, match="the backward pass broke"):
        if way == "batch":
            accumulator.step(second)
        else:
            by_micro_batch(accumulator, [second], loss)
    Cut.switch = False
    accumulator.step(second)
    assert_exact(accumulator, before, work)


def test_layer_used_only_before_an_error(rank: int) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.one, self.two = nn.Linear(3, 1).double(), nn.Linear(3, 1).double()

        def forward(self, x: Tensor, has_two: bool) -> Tensor:
            return self.one(x) + self.two(x) if has_two else self.one(x)

    calls: list[int] = []

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise KeyError("data")
        return model(x, len(calls) == 1).square().mean()

    model = DistributedDataParallel(Two(), find_unused_parameters=True)
    before = model.module.two.weight.detach().clone()
    accumulator = Accumulator(model, sgd(model), loss, 2)
    batch = torch.ones(4, 3, dtype=torch.float64)
    with pytest.raises(KeyError):
        accumulator.step(batch)
    assert accumulator.step(batch).is_applied
    assert torch.equal(model.module.two.weight, before)


# --- parameters that are not reduced -------------------------------------------------------------------------


def test_a_parameter_that_is_not_in_the_model(size: int) -> None:
    work = Work("samples", [[4] * size])
    for wrap in ("ddp", "fsdp, window"):
        model, how = wrapped(make_model(work.problem), wrap)
        temperature = nn.Parameter(torch.ones((), dtype=torch.float64))
        optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
        accumulator = Accumulator(model, optimizer, make_loss(work.problem), 4, **how)
        with pytest.raises(OptionError, match=r"the gradients of 1 of 5 parameters .* are not reduced over ranks"):
            accumulator.step(work.own(dist.get_rank())[0])


def test_a_parameter_that_was_frozen_when_the_model_was_wrapped(size: int) -> None:
    work = Work("samples", [[4] * size])
    plain: Any = make_model(work.problem)
    plain[0].requires_grad_(False)
    model = DistributedDataParallel(plain)
    accumulator = Accumulator(model, torch.optim.SGD(plain[2].parameters(), lr=0.1), make_loss(work.problem), 4)
    plain[0].requires_grad_(True)
    accumulator.optimizer.add_param_group({"params": list(plain[0].parameters())})
    with pytest.raises(OptionError, match="the gradients of 2 of 4 parameters"):
        accumulator.step(work.own(dist.get_rank())[0])
    with pytest.raises(OptionError, match="made when 2 parameters were trainable, now 4 are"):
        Accumulator(model, sgd(model), make_loss(work.problem), 4)


def test_a_parameter_that_ddp_ignores(size: int) -> None:
    work = Work("samples", [[4] * size])
    plain = make_model(work.problem)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(plain, ["2.bias"])
    model = DistributedDataParallel(plain)
    accumulator = Accumulator(model, sgd(model), make_loss(work.problem), 4)
    with pytest.raises(OptionError, match=r"module.2.bias first. are not reduced"):
        accumulator.step(work.own(dist.get_rank())[0])


def test_optimizer_of_the_head_with_a_rank_without_data(rank: int, size: int) -> None:
    work = Work("samples", [[4] * size, [4, 0] * (size // 2)])
    plain: Any = make_model(work.problem)
    before = flat(plain)
    model = DistributedDataParallel(plain)
    accumulator = Accumulator(model, sgd(plain[2]), make_loss(work.problem), 2)
    full: Any = make_model(work.problem)
    optimizer = sgd(full[2])
    for batch, part in zip(work.batches, work.own(rank), strict=True):
        optimizer.zero_grad()
        make_loss(work.problem)(full, batch).backward()
        optimizer.step()
        accumulator.step(part)
    assert error_of(flat(plain) - before, flat(full) - before) <= 1e-12


def test_unused_first_layer_is_not_decayed(rank: int, size: int) -> None:
    """A rank without data must still send something to the others."""

    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.never, self.used = nn.Linear(3, 1).double(), nn.Linear(3, 1).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    model = DistributedDataParallel(Unused(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    accumulator = Accumulator(model, optimizer, lambda model, x: model(x).square().mean(), 2)
    for _ in range(2):
        accumulator.step(torch.ones(4, 3, dtype=torch.float64) if rank == 0 else None)
    assert torch.equal(model.module.never.weight, Unused().never.weight)
    assert not torch.equal(model.module.used.weight, Unused().used.weight)


# --- weight zero ---------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.parametrize("reduce", ["window", "micro_batch"])
def test_rank_repeats_a_micro_batch_that_has_weight(rank: int, size: int, reduce: Any) -> None:
    """The first text of a rank is completely masked, so its own loss would be 0/0."""
    work = Work("tokens", [[(9, 8, 7, 6, 5, 4, 3, 2), (0, 5, 6)] * (size // 2)] * 2)
    model = make_model(work.problem)
    before = flat(model)
    model.length.requires_grad_(False)
    model = sharded(model)
    accumulator = Accumulator(
        model,
        sgd(model),
        make_loss(work.problem),
        3,
        weight=lambda batch: (batch["y"] != IGNORED).sum(),
        reduce=reduce,
    )
    for part in work.own(rank):
        assert accumulator.step(part).is_applied
    assert_exact(accumulator, before, work)


@pytest.mark.filterwarnings("ignore:step 1 was skipped", "ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.parametrize("reduce", ["window", "micro_batch"])
def test_a_bad_batch_is_not_repeated_on_a_rank_whose_data_ends(rank: int, size: int, reduce: Any) -> None:
    """0 times NaN is NaN, so a rank without data must not run a batch of an earlier step."""
    work = Work("samples", [[4, 8] * (size // 2), [0, 8] * (size // 2)])
    accumulator, _ = make(work, f"fsdp, {reduce}")
    first, second = work.own(rank)
    assert first is not None
    bad = {**first, "x": torch.full_like(first["x"], torch.nan)} if rank == 0 else first
    assert not accumulator.step(bad).is_applied
    before = whole(accumulator.model)
    assert accumulator.step(second).is_applied
    del work.batches[0]
    assert_exact(accumulator, before, work)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(3, 1).double(), nn.Linear(3, 1).double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x).squeeze(1), self.two(x).squeeze(1)


def of_heads(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """The second term is a mean over what its mask leaves, which may be 0/0."""
    one, two = model(batch["x"])
    return one.square().mean(), (two.square() * batch["m"]).sum() / batch["m"].sum()


def weight_of_heads(batch: Batch) -> tuple[Any, Any]:
    return len(batch["x"]), batch["m"].sum()


def masked(rank: int, size: int) -> tuple[Batch, Batch]:
    """The whole batch and a rank's part of it. In the last micro-batch of rank 1 the second term has weight zero."""
    torch.manual_seed(5)
    batch = {"x": torch.randn(4 * size, 3, dtype=torch.float64), "m": torch.ones(4 * size, dtype=torch.float64)}
    batch["m"][6:8] = 0
    return batch, {name: tensor[4 * rank : 4 * rank + 4] for name, tensor in batch.items()}


@pytest.mark.parametrize("is_all", [False, True], ids=["in the last micro-batch", "in all of a rank"])
def test_term_with_weight_zero_on_one_rank(rank: int, size: int, is_all: bool) -> None:
    batch, part = masked(rank, size)
    if is_all:
        batch["m"][4:8] = 0
    full, model = Heads(), DistributedDataParallel(Heads())
    before = flat(full)
    sum(of_heads(full, batch)).backward()  # type: ignore[union-attr]
    sgd(full).step()
    accumulator = Accumulator(model, sgd(model), of_heads, 2, weight=weight_of_heads)
    assert accumulator.step(part).is_applied
    assert error_of(flat(model) - before, flat(full) - before) <= 1e-12


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
def test_term_with_weight_zero_is_refused_with_fully_shard(rank: int, size: int) -> None:
    _, part = masked(rank, size)
    model = sharded(Heads())
    before = whole(model)
    accumulator = Accumulator(model, sgd(model), of_heads, 2, weight=weight_of_heads)
    error, message = (WeightError, "cannot skip a term") if rank == 1 else (RankError, "rank 1 refused")
    with pytest.raises(error, match=message):
        accumulator.step(part)
    assert torch.equal(whole(model), before)


@pytest.mark.parametrize("weight", [0, -1])
@pytest.mark.parametrize("wrap", ["fsdp, window", "fsdp, micro_batch"])
def test_weights_that_are_refused_on_one_rank(rank: int, size: int, wrap: str, weight: int) -> None:
    work = Work("samples", [[4] * size])
    accumulator, before = make(work, wrap, accumulation_steps=2)
    with pytest.raises(WeightError if rank == 1 else RankError):
        by_micro_batch(accumulator, work.own(rank), make_loss(work.problem), weight if rank == 1 else 4)
    by_micro_batch(accumulator, work.own(rank), make_loss(work.problem))
    assert_exact(accumulator, before, work)


# --- refused on one rank while others have started -----------------------------------------------------------


@pytest.mark.parametrize("bad_rank", [0, 1])
@pytest.mark.parametrize("wrap", ["ddp", "fsdp, window"])
def test_bad_input_in_a_later_step_of_a_model_with_buffers(rank: int, size: int, wrap: str, bad_rank: int) -> None:
    work = Work("samples", [[9, 5] * (size // 2)] * 2)

    def normed() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)).double()
        return model.eval()

    full = normed()
    before = flat(full)
    loss = make_loss(work.problem)
    optimizer = sgd(full)
    model, how = wrapped(normed(), wrap)
    accumulator = Accumulator(model, sgd(model), loss, 4, **how)
    for number, (batch, part) in enumerate(zip(work.batches, work.own(rank), strict=True)):
        optimizer.zero_grad()
        loss(full, batch).backward()
        optimizer.step()
        if number == 1:
            bad = {"x": torch.zeros(3, 64), "y": torch.zeros(2)}
            with pytest.raises(BatchError if rank == bad_rank else RankError):
                accumulator.step(bad if rank == bad_rank else part)
        accumulator.step(part)
    assert error_of(whole(model) - before, flat(full) - before) <= 1e-12


def test_buffers_with_a_rank_whose_micro_batches_end_first(rank: int, size: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)).double()
    shared = DistributedDataParallel(model)
    shared.eval()
    work = Work("samples", [[16] + [4] * (size - 1)])
    accumulator = Accumulator(shared, sgd(shared), accumulation_steps=2)
    by_micro_batch(accumulator, work.own(rank), make_loss(work.problem))
    assert accumulator.num_steps == 2
    if rank == 0:  # an evaluation on one rank does not wait for the others
        with torch.no_grad():
            shared(work.batches[0]["x"])


def test_existing_gradient_on_one_rank(rank: int, size: int) -> None:
    work = Work("samples", [[4] * size])
    accumulator, before = make(work, "ddp")
    first = next(accumulator.model.parameters())
    if rank == 1:
        first.grad = torch.ones_like(first)
    with pytest.raises(GradientError if rank == 1 else RankError):
        accumulator.step(work.own(rank)[0])
    first.grad = None
    accumulator.step(work.own(rank)[0])
    assert_exact(accumulator, before, work)


def test_low_precision_loss_after_a_stray_pass(rank: int, size: int) -> None:
    work = Work("samples", [[8] * size])
    plain = make_loss(work.problem)
    accumulator, before = make(work, "ddp", loss=lambda model, batch: plain(model, batch).bfloat16())
    if rank == 1:
        accumulator.model(torch.zeros(1, 64, dtype=torch.float64))
    assert accumulator.step(work.own(rank)[0]).is_applied
    assert_exact(accumulator, before, work)


def test_different_terms_are_detected_by_a_rank_without_data(rank: int, size: int) -> None:
    terms = {0: 1, 1: 3}.get(rank)
    model = DistributedDataParallel(nn.Linear(3, 1).double())
    accumulator = Accumulator(
        model, sgd(model), lambda model, x: (model(x).mean(),) * (terms or 1), 2, weight=lambda x: (2,) * (terms or 1)
    )
    with pytest.raises(RankError, match="give every rank the same loss"):
        accumulator.step(None if terms is None else torch.ones(2, 3, dtype=torch.float64))


# --- options of fully_shard and compiled models -------------------------------------------------------------


def test_custom_gradient_divide_factor(rank: int, size: int) -> None:
    work = Work("samples", [[4, 9] * (size // 2)])
    accumulator, before = make(work, "fsdp, window")
    model: Any = accumulator.model
    model[0].set_gradient_divide_factor(1.0)
    with pytest.raises(OptionError, match="2 kinds of layers are divided by different numbers"):
        accumulator.step(work.own(rank)[0])
    for module in (model[2], model):
        module.set_gradient_divide_factor(1.0)
    accumulator.step(work.own(rank)[0])
    assert_exact(accumulator, before, work)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # torch's compiler's own
@pytest.mark.parametrize("wrap", ["ddp", "fsdp, window"])
def test_a_compiled_model(rank: int, size: int, wrap: str) -> None:
    work = Work("samples", [[4, 9] * (size // 2)] * 2)
    model = make_model(work.problem)
    before = flat(model)
    model, how = wrapped(model, wrap)
    compiled: Any = torch.compile(model, backend="eager")
    accumulator = Accumulator(compiled, sgd(model), make_loss(work.problem), 4, **how)
    for part in work.own(rank):
        accumulator.step(part)
    assert_exact(accumulator, before, work)


@pytest.mark.parametrize("wrap", ["ddp", "fsdp, window", "fsdp, micro_batch"])
def test_sums_wider_than_the_model_can_reduce(wrap: str) -> None:
    model, how = wrapped(nn.Linear(3, 1), wrap)
    with pytest.raises(OptionError, match=r"torch.float64: leave accumulate_dtype"):
        Accumulator(model, sgd(model), micro_batch_size=2, accumulate_dtype=torch.float64, **how)


# --- micro-batches that are left out ---------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [[1], [0, 1, 2, 3]], ids=["on one rank", "on all"])
@pytest.mark.parametrize("place", ["first", "last"])
def test_a_skipped_micro_batch(rank: int, size: int, ranks: list[int], place: str) -> None:
    """After a forward pass, in which DDP expects a backward pass. Ranks then fill their windows at other times."""
    work = Work("samples", [[8, 3] * (size // 2)] * 2)
    accumulator, before = make(work, "ddp", accumulation_steps=100)
    loss = make_loss(work.problem)

    def skip() -> None:
        if rank in ranks:
            with accumulator.micro_batch(weight=7) as micro:
                loss(accumulator.model, work.batches[0])
                micro.skip()

    for batch in work.own(rank):
        if place == "first":
            skip()
        by_micro_batch(accumulator, [batch], loss)  # flushes
        if place == "last":
            skip()
    assert accumulator.flush() is None
    assert_exact(accumulator, before, work)


@pytest.mark.parametrize("reduce", ["window", "micro_batch"])
def test_with_fully_shard_skip_is_refused(rank: int, size: int, reduce: str) -> None:
    work = Work("samples", [[8] * size])
    model = sharded(make_model(work.problem))
    accumulator = Accumulator(model, sgd(model), accumulation_steps=2, reduce=reduce)
    with (
        pytest.raises(OrderError, match="leave the micro-batch out on all ranks before the block"),
        accumulator.micro_batch(weight=8) as micro,
    ):
        micro.skip()
