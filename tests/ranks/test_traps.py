"""Errors on one rank, and what is refused on all of them."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from bigbatch import (
    BatchError,
    BigBatchWarning,
    GradientError,
    LossError,
    NonFiniteError,
    OptionError,
    OrderError,
    RankError,
    Window,
)
from bigbatch.torch import Accumulator, train_with_accumulation, verify
from tests.torch.training import Batch, flat, make_loss, make_model, sgd

from .shared import WRAPS, Work, cpu_mesh, error_of, sharded, train_whole, whole, wrapped

every_wrap = pytest.mark.parametrize("wrap", ["ddp", "ddp, buckets as views", "fsdp, window", "fsdp, micro_batch"])


def make(work: Work, wrap: str, **options: Any) -> tuple[Accumulator, Tensor]:
    model = make_model(work.problem)
    before = flat(model)
    model, how = wrapped(model, wrap)
    options = {"loss": make_loss(work.problem), "micro_batch_size": 4, **how, **options}
    return Accumulator(model, sgd(model), **options), before


def uneven(size: int, num: int = 2) -> Work:
    return Work("samples", [[9 if rank % 2 else 6 for rank in range(size)]] * num)


# --- numbers ---------------------------------------------------------------------------------------------


@every_wrap
def test_nonfinite_gradient_on_one_rank_skips_the_step_on_all(rank: int, size: int, wrap: str) -> None:
    work = uneven(size)
    accumulator, before = make(work, wrap)
    batch = work.own(rank)[0]
    assert batch is not None
    bad = {**batch, "x": batch["x"].clone().fill_(torch.inf if rank == size - 1 else 0.5)}
    with pytest.warns(BigBatchWarning, match="step 1 was skipped"):
        step = accumulator.step(bad)
    assert not step.is_applied
    assert torch.equal(whole(accumulator.model), before)
    for part in work.own(rank):
        accumulator.step(part)
    assert error_of(whole(accumulator.model) - before, train_whole(work)[0]) <= 1e-12


@every_wrap
def test_shared_step_finishes_although_one_rank_is_interrupted(rank: int, size: int, wrap: str) -> None:
    work = uneven(size)
    accumulator, before = make(work, wrap)
    inner = accumulator.loss

    def interrupting(model: nn.Module, batch: Batch) -> Any:
        if rank == 0:
            accumulator.interrupt()
        return inner(model, batch)

    accumulator.loss = interrupting
    for part in work.own(rank):
        assert accumulator.step(part).is_applied
        assert accumulator.is_interrupted is (rank == 0)
    assert error_of(whole(accumulator.model) - before, train_whole(work)[0]) <= 1e-12


@every_wrap
@pytest.mark.parametrize("on_nonfinite", ["skip", "raise", "stop"])
def test_nonfinite_gradient_on_one_rank_is_reported_on_all(rank: int, size: int, wrap: str, on_nonfinite: Any) -> None:
    work = uneven(size)
    accumulator, before = make(work, wrap, on_nonfinite=on_nonfinite, max_skipped=1)
    batch = work.own(rank)[0]
    assert batch is not None
    bad = {**batch, "x": batch["x"].clone().fill_(torch.inf if rank == size - 1 else 0.5)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BigBatchWarning)
        if on_nonfinite == "stop":
            assert not accumulator.step(bad).is_applied
            assert accumulator.is_stopped
        else:
            with pytest.raises(NonFiniteError, match="step 1"):
                accumulator.step(bad)
    assert torch.equal(whole(accumulator.model), before)
    assert accumulator.is_stopped is (on_nonfinite == "stop")
    accumulator.load_state_dict(accumulator.state_dict())
    for part in work.own(rank):
        accumulator.step(part)
    assert error_of(whole(accumulator.model) - before, train_whole(work)[0]) <= 1e-12


@every_wrap
@pytest.mark.parametrize("way", ["batch", "micro_batch"])
def test_scaler_decides_the_same_on_all_ranks(rank: int, size: int, wrap: str, way: str) -> None:
    """An overflow on one rank lowers the scale on all. Without an overflow, scaling changes nothing."""
    work = Work("samples", [[8] * size] * 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    accumulator, before = make(work, wrap, scaler=scaler, accumulation_steps=2)

    def feed(batch: Batch, times: float) -> Any:
        if way == "batch":
            return accumulator.step({**batch, "x": batch["x"] * times})
        for start in (0, 4):
            x, y = (batch[name][start : start + 4] for name in "xy")
            with accumulator.micro_batch(weight=4) as micro:
                micro.backward(F.cross_entropy(accumulator.model(x * times), y))
        return micro.step

    first, second = work.own(rank)
    step = feed(first, torch.inf if rank == 0 else 1.0)
    assert not step.is_applied
    assert scaler.get_scale() == 2.0**9
    assert torch.equal(whole(accumulator.model), before)
    for batch in (first, second):
        assert feed(batch, 1.0).is_applied
    assert error_of(whole(accumulator.model) - before, train_whole(work)[0]) <= 1e-12


@every_wrap
def test_a_rank_whose_batch_has_no_samples(rank: int, size: int, wrap: str) -> None:
    work = Work("samples", [[5] + [0] * (size - 1)])
    accumulator, before = make(work, wrap)
    empty = {"x": torch.zeros(0, 64, dtype=torch.float64), "y": torch.zeros(0, dtype=torch.int64)}
    for batch in (empty, Window([])):
        accumulator.step(work.own(rank)[0] or batch)
    work.batches *= 2
    assert error_of(whole(accumulator.model) - before, train_whole(work)[0]) <= 1e-12


@every_wrap
def test_no_data_on_any_rank(size: int, wrap: str) -> None:
    accumulator, before = make(uneven(size), wrap)
    step = accumulator.step(None)
    assert not step.is_applied
    assert step.weight == 0
    assert torch.equal(whole(accumulator.model), before)


# --- ranks whose data ends first ------------------------------------------------------------------------


@every_wrap
def test_flush_takes_part_in_the_steps_of_other_ranks(rank: int, size: int, wrap: str) -> None:
    """Rank 0 has four batches, and each further rank one less. All ranks run two epochs."""
    shares = [[7 if step <= 3 - each else 0 for each in range(size)] for step in range(4)] * 2
    work = Work("samples", shares)
    accumulator, before = make(work, wrap)
    own = work.own(rank)
    losses = []
    for epoch in (own[:4], own[4:]):
        steps = [accumulator.step(batch) for batch in epoch if batch is not None]
        steps += accumulator.flushed()
        losses += [step.loss for step in steps]
    expected, expected_losses = train_whole(work)
    assert error_of(whole(accumulator.model) - before, expected) <= 1e-12
    assert losses == pytest.approx(expected_losses, rel=1e-12)
    assert accumulator.num_steps == 8


@pytest.mark.parametrize("wrap", ["ddp", "ddp, unused looked for"])
def test_micro_batches_end_first_on_some_ranks(rank: int, size: int, wrap: str) -> None:
    """Windows of 2: rank 0 has five micro-batches, each further rank one less."""
    nums = [5 - each for each in range(size)]
    work = Work("samples", [[4 * max(0, min(2, num - 2 * step)) for num in nums] for step in range(3)])
    accumulator, before = make(work, wrap, accumulation_steps=2)
    for batch in work.own(rank):
        for start in range(0, 0 if batch is None else len(batch["y"]), 4):
            with accumulator.micro_batch(weight=4) as micro:
                x, y = (batch[name][start : start + 4] for name in "xy")
                micro.backward(F.cross_entropy(accumulator.model(x), y))
    accumulator.flush()
    assert accumulator.num_steps == 3
    assert error_of(whole(accumulator.model) - before, train_whole(work)[0]) <= 1e-12


@every_wrap
def test_train_with_accumulation(rank: int, size: int, wrap: str) -> None:
    """Two epochs in windows of three: rank 0 has seven micro-batches, the others five."""
    work = Work("samples", [[12] * size, [12] + [8] * (size - 1), [4] + [0] * (size - 1)] * 2)
    model = make_model(work.problem)
    before = flat(model)
    model, how = wrapped(model, wrap)
    own = [batch for batch in work.own(rank)[:3] if batch is not None]
    cut = [{n: t[k : k + 4] for n, t in batch.items()} for batch in own for k in range(0, len(batch["y"]), 4)]
    history = train_with_accumulation(model, cut, sgd(model), make_loss(work.problem), 3, epochs=2, **how)
    work = Work("samples", work.shares[:3])
    work.batches *= 2
    expected, losses = train_whole(work)
    assert error_of(whole(model) - before, expected) <= 1e-12
    assert [step.loss for step in history] == pytest.approx(losses, rel=1e-12)


# --- bad input on one rank -------------------------------------------------------------------------------


@every_wrap
def test_bad_input_on_one_rank_raises_on_all(rank: int, size: int, wrap: str) -> None:
    work = uneven(size)
    accumulator, before = make(work, wrap)
    own = work.own(rank)
    bad = {"x": torch.zeros(3, 64), "y": torch.zeros(2)}
    error, message = (BatchError, "3") if rank == 1 else (RankError, f"rank 1 refused .* none of {size} ranks")
    with pytest.raises(error, match=message):
        accumulator.step(bad if rank == 1 else own[0])
    assert torch.equal(whole(accumulator.model), before)
    for part in own:
        accumulator.step(part)
    assert error_of(whole(accumulator.model) - before, train_whole(work)[0]) <= 1e-12


@every_wrap
def test_loss_that_raises_on_all_ranks_leaves_no_gradients(rank: int, size: int, wrap: str) -> None:
    work = uneven(size)
    calls = []

    def loss(model: nn.Module, batch: Batch) -> Any:
        calls.append(len(batch["y"]))
        value = make_loss(work.problem)(model, batch)
        return "no loss" if len(calls) == 2 else value

    accumulator, before = make(work, wrap, loss=loss)
    own = work.own(rank)
    with pytest.raises(LossError, match="the loss is a str"):
        accumulator.step(own[0])
    for part in own:
        accumulator.step(part)
    assert error_of(whole(accumulator.model) - before, train_whole(work)[0]) <= 1e-12


def test_losses_with_different_numbers_of_terms(rank: int, size: int) -> None:
    work = uneven(size)
    terms = 1 if rank == 0 else 2
    accumulator, before = make(
        work, "ddp", loss=lambda model, batch: model(batch["x"]).mean(), weight=lambda batch: (1,) * terms
    )
    with pytest.raises((RankError, LossError)):
        accumulator.step(work.own(rank)[0])
    assert torch.equal(whole(accumulator.model), before)


# --- DDP ----------------------------------------------------------------------------------------------------


def test_loss_that_bypasses_ddp(rank: int, size: int) -> None:
    """The loss uses model.module, so DDP is never called, but gradients are reduced."""
    work = uneven(size)
    plain = make_loss(work.problem)
    accumulator, before = make(work, "ddp", loss=lambda model, batch: plain(model.module, batch))
    for part in work.own(rank):
        accumulator.step(part)
    assert error_of(whole(accumulator.model) - before, train_whole(work)[0]) <= 1e-12


def test_a_call_of_the_model_without_a_backward_pass(rank: int, size: int) -> None:
    """One rank calls the model with gradients enabled. DDP alone would reduce in its next backward pass and hang."""
    work = Work("samples", [[4, 13] * (size // 2), [9, 0] * (size // 2)])
    accumulator, before = make(work, "ddp")
    for part in work.own(rank):
        if rank == 1:
            accumulator.model(torch.zeros(1, 64, dtype=torch.float64))
        accumulator.step(part)
    assert error_of(whole(accumulator.model) - before, train_whole(work)[0]) <= 1e-12


class Branches(nn.Module):
    """One of three layers is never used, another only if the first number is above one half."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.sometimes, self.never = (nn.Linear(64, 1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        always = self.always(x)
        return always + self.sometimes(x) if x[0, 0] > 0.5 else always


def of_branches(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def decaying(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)


@pytest.mark.parametrize("place", ["first", "last", "none"])
def test_parameters_that_only_some_micro_batches_use(rank: int, size: int, place: str) -> None:
    """Parameters that no rank uses have no gradient and are not decayed, as in the full batch."""
    torch.manual_seed(1)
    batch = torch.rand(4 * size, 64, dtype=torch.float64) / 4
    if place != "none":
        batch[0 if place == "first" else -2, 0] = 1.0  # in one micro-batch of one rank
    full, model = (Branches().double() for _ in range(2))
    optimizer = decaying(full)
    parts = [of_branches(full, micro_batch) for micro_batch in batch.split(2)]
    (sum(parts) / len(parts)).backward()  # type: ignore[union-attr]
    optimizer.step()
    model = DistributedDataParallel(model, find_unused_parameters=True)
    accumulator = Accumulator(model, decaying(model), of_branches, micro_batch_size=2)
    for step in range(2):
        assert accumulator.step(batch[4 * rank : 4 * rank + 4]).is_applied
        if step == 0:
            assert float((flat(model) - flat(full)).abs().max()) < 1e-12
    assert torch.equal(model.module.never.weight, full.never.weight)
    assert torch.equal(full.never.weight, Branches().double().never.weight)


def test_unused_parameters_are_refused_with_the_remedy(rank: int) -> None:
    model = DistributedDataParallel(Branches().double())
    before = flat(model)
    accumulator = Accumulator(model, decaying(model), of_branches, micro_batch_size=2, accumulation_steps=1)
    batch = torch.rand(4, 64, dtype=torch.float64)
    with pytest.raises(GradientError, match="find_unused_parameters=True"):  # noqa: SIM117
        with accumulator.micro_batch(weight=4) as micro:
            micro.backward(of_branches(model, batch))
    assert torch.equal(flat(model), before)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_gradients(rank: int, size: int) -> None:
    """A rank without data must contribute a sparse gradient too."""

    def make_embedding() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(20, 3, sparse=True), nn.Flatten(), nn.Linear(6, 1)).double()

    ids = torch.arange(10).reshape(5, 2) % 7
    full, model = make_embedding(), make_embedding()
    before = flat(full)
    optimizer = torch.optim.SGD(full.parameters(), lr=0.1)
    shared = DistributedDataParallel(model)
    accumulator = Accumulator(shared, torch.optim.SGD(shared.parameters(), lr=0.1), of_branches, micro_batch_size=2)
    for _ in range(2):
        optimizer.zero_grad()
        of_branches(full, ids).backward()
        optimizer.step()
        accumulator.step({0: ids[:4], 1: ids[4:]}.get(rank))
    assert error_of(flat(model) - before, flat(full) - before) <= 1e-12


@pytest.mark.filterwarnings("ignore:the model is a plain")
@pytest.mark.parametrize("sizes", [(6, 9), (6, 0)], ids=["uneven", "a rank with none"])
def test_a_loss_in_low_precision(rank: int, size: int, sizes: tuple[int, int]) -> None:
    """bfloat16 losses on uneven ranks, compared with one process that cuts the batch in the same way."""
    work = Work("samples", [[sizes[each % 2] for each in range(size)]])

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return make_loss(work.problem)(model, batch).bfloat16()

    alone = make_model(work.problem)
    before = flat(alone)
    parts = [part for each in range(size) if (part := work.own(each)[0]) is not None]
    cut = [{n: t[k : k + 4] for n, t in part.items()} for part in parts for k in range(0, len(part["y"]), 4)]
    Accumulator(alone, sgd(alone), loss).step(Window(cut))
    accumulator, _ = make(work, "ddp", loss=loss)
    for _ in range(1):
        accumulator.step(work.own(rank)[0])
    assert error_of(whole(accumulator.model) - before, flat(alone) - before) <= 1e-12


def test_a_group_of_some_ranks(rank: int, size: int) -> None:
    """Two models in one job, each trained by half of the ranks."""
    groups = [dist.new_group(list(range(first, size, 2))) for first in (0, 1)]
    group = groups[rank % 2]
    work = Work("samples", [[5 + each for each in range(dist.get_world_size(group))]])
    model = make_model(work.problem)
    before = flat(model)
    shared = DistributedDataParallel(model, process_group=group)
    accumulator = Accumulator(shared, sgd(shared), make_loss(work.problem), 4, group=group)
    accumulator.step(work.own(dist.get_rank(group))[0])
    assert error_of(flat(model) - before, train_whole(work)[0]) <= 1e-12
    if size > 2:
        with pytest.raises(OptionError, match=f"group has {size} ranks but .* over {size // 2}"):
            Accumulator(shared, sgd(shared), make_loss(work.problem), 4, group=dist.group.WORLD)


def test_buffers_are_those_of_rank_0_after_uneven_windows(rank: int, size: int) -> None:
    """BatchNorm in eval mode, and a buffer that DDP must broadcast equally often on every rank."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)).double()
    shared = DistributedDataParallel(model)
    shared.eval()
    work = Work("samples", [[4, 13] * (size // 2), [9, 0] * (size // 2), [0, 9] * (size // 2)])
    accumulator = Accumulator(shared, sgd(shared), make_loss(work.problem), 4)
    for part in work.own(rank):
        accumulator.step(part)
    found = [torch.zeros_like(flat(model)) for _ in range(size)]
    dist.all_gather(found, flat(model))
    assert all(torch.equal(found[0], each) for each in found)


def test_sync_batch_norm_needs_equally_many_micro_batches(rank: int, size: int) -> None:
    work = uneven(size)

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.SyncBatchNorm(64).double()
            self.norm.forward = lambda x: x  # type: ignore[method-assign] # runs only on GPUs
            self.inner = make_model(work.problem)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.norm(x) + self.norm.weight.sum() * 0 + self.norm.bias.sum() * 0)

    model = sharded(Normed())  # DDP refuses it on a CPU
    accumulator = Accumulator(model, sgd(model), make_loss(work.problem), 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BigBatchWarning)
        with pytest.raises(OrderError, match="ranks have 2 to 3 micro-batches"):
            accumulator.step(work.own(rank)[0])


# --- refusals ---------------------------------------------------------------------------------------------


def linear(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).to(dtype)


def low_inside(**policy: Any) -> nn.Module:
    return sharded(linear(), mp_policy=MixedPrecisionPolicy(**policy))


def half_sharded() -> nn.Module:
    model = linear()
    fully_shard(model[0], mesh=cpu_mesh())
    return model


def one_left_out() -> nn.Module:
    model = linear()
    return fully_shard(model, mesh=cpu_mesh(), ignored_params=set(model[1].parameters()))


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (lambda: DistributedDataParallel(linear(), static_graph=True), {}, "static_graph=True stops reducing"),
        (lambda: DistributedDataParallel(linear(torch.bfloat16)), {}, "4 parameters .* torch.bfloat16"),
        (lambda: nn.Sequential(DistributedDataParallel(linear())), {}, "wrap the whole model"),
        (lambda: FullyShardedDataParallel(linear(), device_id=torch.device("cpu")), {}, "the first FSDP"),
        (lambda: low_inside(param_dtype=torch.bfloat16), {}, "inside of the model in torch.bfloat16"),
        (lambda: sharded(linear(torch.bfloat16)), {"reduce": "micro_batch"}, "of its shards in torch.bfloat16"),
        (half_sharded, {}, "call fully_shard on the whole model too"),
        (one_left_out, {}, "2 of 4 parameters .1.weight first. are not sharded"),
        (linear, {"group": "WORLD"}, "the model is a plain Sequential"),
        (lambda: DistributedDataParallel(linear()), {"reduce": "never"}, "reduce='never' is unknown"),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_refusals(model: Any, options: dict[str, Any], message: str) -> None:
    shared = model()
    if "group" in options:
        options = {"group": dist.group.WORLD}
    with pytest.raises(OptionError, match=message):
        Accumulator(shared, sgd(shared), of_branches, 2, **options)


@pytest.mark.parametrize(
    "policy",
    [{"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}, {"reduce_dtype": torch.float32}, {}],
    ids=["mixed", "reduced in float32", "plain"],
)
def test_mixed_precision_of_fsdp_is_close(rank: int, size: int, policy: dict[str, Any]) -> None:
    def make_it() -> nn.Module:
        torch.manual_seed(0)
        return linear()

    torch.manual_seed(2)
    batch = torch.randn(11 * size, 4)
    full, model = make_it(), make_it()
    before = flat(full)
    of_branches(full, batch).backward()
    sgd(full).step()
    model = sharded(model, mp_policy=MixedPrecisionPolicy(**policy, output_dtype=torch.float32))
    accumulator = Accumulator(model, sgd(model), of_branches, micro_batch_size=4)
    accumulator.step(batch[11 * rank : 11 * rank + 11])
    assert error_of(whole(model) - before, flat(full) - before) < (1e-2 if "param_dtype" in policy else 1e-6)


def test_contexts_that_prevent_the_reduction_are_refused(rank: int, size: int) -> None:
    work = uneven(size)
    accumulator, before = make(work, "ddp")
    model: Any = accumulator.model
    with model.join(), pytest.raises(OrderError, match=r"inside of model.join"):
        accumulator.step(work.own(rank)[0])
    with model.no_sync(), pytest.raises(OrderError, match=r"inside of model.no_sync"):
        accumulator.step(work.own(rank)[0])
    assert torch.equal(flat(accumulator.model), before)


def test_plain_model_warns(size: int) -> None:
    model = linear()
    with pytest.warns(BigBatchWarning, match=f"each of {size} ranks trains its own"):
        Accumulator(model, sgd(model), of_branches, 2)


@pytest.mark.parametrize("wrap", ["fsdp, window", "fsdp, micro_batch"])
def test_sharded_models_need_equally_many_micro_batches(rank: int, size: int, wrap: str) -> None:
    work = Work("samples", [[4] * size])
    accumulator, before = make(work, wrap, accumulation_steps=3)
    batch = work.own(rank)[0]
    assert batch is not None

    def feed() -> None:
        with accumulator.micro_batch(weight=4) as micro:
            micro.backward(make_loss(work.problem)(accumulator.model, batch))

    feed()
    if rank == 0:
        with pytest.raises(OrderError, match=f"{size - 1} of {size} ranks .rank 1 first. have no micro-batch"):
            feed()
    else:
        with pytest.raises(OrderError, match="ends its window while 1 of"):
            accumulator.flush()
    assert torch.equal(whole(accumulator.model), before)
    feed()  # the windows have not changed
    accumulator.flush()
    assert error_of(whole(accumulator.model) - before, train_whole(work)[0]) <= 1e-12


def test_several_terms_cannot_be_fed_to_a_sharded_model(size: int) -> None:
    accumulator, _ = make(uneven(size), "fsdp, window", accumulation_steps=2)
    with pytest.raises(OptionError, match="a loss of 2 terms"), accumulator.micro_batch(weight=(1, 2)):
        pass


def test_low_precision_loss_of_a_sharded_model_is_refused(rank: int, size: int) -> None:
    work = uneven(size)
    plain = make_loss(work.problem)
    accumulator, before = make(work, "fsdp, window", loss=lambda model, batch: plain(model, batch).bfloat16())
    with pytest.raises(LossError, match="return it in float32"):
        accumulator.step(work.own(rank)[0])
    assert torch.equal(whole(accumulator.model), before)


def attacked(model: Any, batch: Batch) -> Tensor:
    """The gradient with respect to the input passes through the model too."""
    x = batch["x"].detach().requires_grad_(True)
    (direction,) = torch.autograd.grad(F.cross_entropy(model(x), batch["y"], reduction="sum"), x)
    return F.cross_entropy(model((x + 0.1 * direction.sign()).detach()), batch["y"])


@pytest.mark.parametrize("wrap", ["ddp", "fsdp, window"])
def test_loss_that_runs_its_own_backward_pass(rank: int, size: int, wrap: str) -> None:
    """With fully_shard it would reduce in the last pass, so step() refuses it. One micro-batch at a time is exact."""
    work = Work("samples", [[8] * size])
    whole_model = make_model(work.problem)
    accumulator, before = make(work, wrap, loss=attacked, accumulation_steps=2)
    attacked(whole_model, work.batches[0]).backward()
    sgd(whole_model).step()
    batch = work.own(rank)[0]
    assert batch is not None
    if wrap == "fsdp, window":
        with pytest.raises(GradientError, match=r"changed by the loss.*with fully_shard .* micro_batch\(\) only"):
            accumulator.step(batch)
        assert torch.equal(whole(accumulator.model), before)
        for part in (slice(0, 4), slice(4, 8)):
            micro_batch = {name: tensor[part] for name, tensor in batch.items()}
            with accumulator.micro_batch(weight=4) as micro:
                micro.backward(attacked(accumulator.model, micro_batch))
    else:
        accumulator.step(batch)
    assert error_of(whole(accumulator.model) - before, flat(whole_model) - before) <= 1e-12


def test_verify_uses_the_batch_of_this_rank(rank: int, size: int) -> None:
    work = uneven(size)
    accumulator, before = make(work, "ddp")
    batch = work.own(rank)[0]
    verification = verify(accumulator.model, batch, make_loss(work.problem), micro_batch_size=4)
    assert verification.is_exact
    assert set(verification.errors) == {name for name, _ in accumulator.model.module.named_parameters()}
    assert torch.equal(flat(accumulator.model), before)
    if rank == 0:  # nothing is shared, so one rank may run it alone
        assert verify(accumulator.model, batch, make_loss(work.problem), micro_batch_size=2).is_exact


def test_all_wraps_are_tested() -> None:
    assert len(WRAPS) == 8
