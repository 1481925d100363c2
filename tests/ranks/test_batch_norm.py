"""Running statistics of BatchNorm are those of the whole batch, over all ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bigbatch import OptionError
from bigbatch.torch import Accumulator, recalibrate
from tests.torch.training import sgd

from .shared import sharded

pytestmark = pytest.mark.filterwarnings("ignore::bigbatch.BigBatchWarning")
Batch = tuple[Tensor, Tensor]
WRAPS: dict[str, tuple[Any, dict[str, Any]]] = {
    "ddp": (DistributedDataParallel, {}),
    "fsdp, window": (sharded, {}),
    "fsdp, micro_batch": (sharded, {"reduce": "micro_batch"}),
}


def make(kind: Any = nn.BatchNorm1d) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(kind(3), nn.Linear(3, 4), kind(4, momentum=None), nn.Linear(4, 2)).double()


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def parts(shares: list[int]) -> list[Batch]:
    """What each rank has of one batch, with statistics of its own."""
    torch.manual_seed(sum(shares))
    drift = torch.arange(sum(shares), dtype=torch.float64)[:, None]
    x, y = torch.randn(sum(shares), 3).double() * (1 + drift) + drift, torch.randn(sum(shares), 2).double()
    return list(zip(x.split(shares), y.split(shares), strict=True))


def of_whole(steps: list[list[Batch]]) -> nn.Module:
    model = make()
    for step in steps:
        model[0](torch.cat([x for x, _ in step]))
    return model[0]


def assert_same(ours: nn.Module, expected: nn.Module) -> None:
    for name, value in expected.named_buffers():
        torch.testing.assert_close(dict(ours.named_buffers())[name], value, rtol=0, atol=1e-12)


def assert_same_on_all_ranks(model: nn.Module) -> None:
    own = torch.cat([b.flatten().double() for b in model.buffers()])
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    assert all(torch.equal(own, other) for other in found)


@pytest.mark.parametrize("wrap", WRAPS)
def test_uneven_ranks_and_ranks_without_data(rank: int, size: int, wrap: str) -> None:
    steps = [parts(shares + [4] * (size - 2)) for shares in ([9, 3], [0, 5], [2, 7])]
    model = make()
    wrapped, options = WRAPS[wrap]
    model = wrapped(model)
    inner: Any = model.module if wrap == "ddp" else model
    accumulator = Accumulator(model, sgd(model), loss, 3, **options)
    for step in steps:
        own = step[rank] if len(step[rank][0]) else None
        accumulator.step(own)
    assert_same(inner[0], of_whole(steps))
    assert inner[2].num_batches_tracked == 3
    assert_same_on_all_ranks(inner)


def test_one_micro_batch_at_a_time(rank: int, size: int) -> None:
    """The last rank has no data at all, and only takes part at the end."""
    step = parts([9, *[3] * (size - 2), 0])
    model = DistributedDataParallel(make())
    accumulator = Accumulator(model, sgd(model), accumulation_steps=100)
    for part in zip(*(t.split(3) for t in step[rank]), strict=True) if len(step[rank][0]) else ():
        with accumulator.micro_batch(weight=len(part[0])) as micro:
            micro.backward(loss(model, part))
    accumulator.flush()
    assert_same(model.module[0], of_whole([step]))
    assert_same_on_all_ranks(model.module)


def test_every_call_makes_an_update_also_for_ranks_without_data(rank: int, size: int) -> None:
    """A rank without data does not know how often the others call a layer."""
    steps = [parts([9, *[3] * (size - 2), 0]), parts([2, *[3] * (size - 2), 7])]

    def twice(model: nn.Module, batch: Batch) -> Tensor:
        return loss(model, batch) + model(batch[0] * 3 - 4).square().mean()

    model = DistributedDataParallel(make())
    accumulator = Accumulator(model, sgd(model), twice, 3)
    whole = make()
    for step in steps:
        accumulator.step(step[rank] if len(step[rank][0]) else None)
        x = torch.cat([x for x, _ in step])
        whole[0](x)
        whole[0](x * 3 - 4)
    assert_same(model.module[0], whole[0])
    assert_same_on_all_ranks(model.module)


def test_a_window_without_weight_changes_nothing(rank: int, size: int) -> None:
    def with_aux(model: nn.Module, batch: Batch) -> Any:
        return loss(model, batch), {"size": len(batch[0])}

    model = DistributedDataParallel(make())
    before = make()
    Accumulator(model, sgd(model), with_aux, 3, weight=lambda _: 0, has_aux=True).step(parts([6] * size)[rank])
    assert_same(model.module, before)


def test_negative_control_every_micro_batch(rank: int, size: int) -> None:
    step = parts([9, 3, *[4] * (size - 2)])
    model = DistributedDataParallel(make())
    Accumulator(model, sgd(model), loss, 3, batch_norm="micro_batch").step(step[rank])
    assert (model.module[0].running_mean - of_whole([step]).running_mean).abs().max() > 0.1


def synchronized(self: Any, x: Tensor) -> Tensor:
    """SyncBatchNorm's forward, which torch has for GPUs only (2.13), with a gradient of this rank alone."""
    count = torch.tensor(float(len(x)), dtype=x.dtype)
    mean = x.detach().sum(0)
    dist.all_reduce(count)
    dist.all_reduce(mean)
    mean /= count
    squares = (x.detach() - mean).square().sum(0)
    dist.all_reduce(squares)
    with torch.no_grad():
        self.num_batches_tracked.add_(1)
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(squares / (count - 1), self.momentum)
    normalised: Tensor = (x - mean) / (squares / count + self.eps).sqrt()
    return normalised


def test_synchronized_layers_count_ranks_once(rank: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.SyncBatchNorm, "forward", synchronized)
    steps = [parts(shares + [8] * (size - 2)) for shares in ([9, 8], [7, 10])]
    model = DistributedDataParallel(nn.Sequential(nn.Identity(), nn.Linear(3, 2)).double())
    model.module[0] = nn.SyncBatchNorm(3, affine=False).double()  # DDP refuses it on the CPU
    accumulator = Accumulator(model, sgd(model), loss, 5)
    for step in steps:
        accumulator.step(step[rank])  # in two micro-batches on every rank, of other sizes
    assert_same(model.module[0], of_whole(steps))
    assert_same_on_all_ranks(model.module)


def test_recalibrate_pools_all_ranks(rank: int, size: int) -> None:
    """The last rank has no batches, the others have different numbers of them."""
    step = parts([9, *[3] * (size - 2), 0])
    whole = make()
    recalibrate(whole, torch.cat([x for x, _ in step]).split(5))
    model = DistributedDataParallel(make())
    recalibrate(model, list(step[rank][0].split(2 + rank)) if len(step[rank][0]) else [])
    for name, value in whole.named_buffers():
        torch.testing.assert_close(dict(model.module.named_buffers())[name], value, rtol=0, atol=1e-10)
    assert_same_on_all_ranks(model.module)


def test_recalibrate_refuses_sharded_models(rank: int, size: int) -> None:
    with pytest.raises(OptionError, match="the model is in fully_shard"):
        recalibrate(sharded(make()), [torch.ones(3, 3, dtype=torch.float64)])
