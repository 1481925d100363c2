"""Gradients are reduced once per window."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from bigbatch.torch import Accumulator
from tests.torch.training import flat, make_loss, make_model, sgd

from .shared import FEED, FSDP, Work, error_of, train_whole, wrapped

EIGHT = 8
"""The number of micro-batches in a window."""


def counting(model: DistributedDataParallel, what: list[str]) -> DistributedDataParallel:
    """A communication hook that counts buckets and then reduces as DDP does without a hook."""

    def hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        what.append("bucket")
        return default_hooks.allreduce_hook(group, bucket)

    model.register_comm_hook(dist.group.WORLD, hook)
    return model


def work(size: int) -> Work:
    return Work("samples", [[4 * EIGHT] * size] * 3)


def data_parallel(model: nn.Module) -> tuple[DistributedDataParallel, list[str]]:
    buckets: list[str] = []
    return counting(DistributedDataParallel(model, bucket_cap_mb=0.001), buckets), buckets


@pytest.mark.parametrize("way", FEED)
def test_every_bucket_of_ddp_once_a_window(size: int, way: str) -> None:
    shared = work(size)
    model, buckets = data_parallel(make_model(shared.problem))
    before = flat(model)
    accumulator = Accumulator(
        model, sgd(model), make_loss(shared.problem), micro_batch_size=4, accumulation_steps=EIGHT + 1
    )
    nums = []
    for batch in shared.own(dist.get_rank()):
        FEED[way](accumulator, batch, shared)
        nums.append(len(buckets))
        buckets.clear()
    assert nums == [1, 2, 2]  # DDP starts with one bucket; later each of the two layers has its own
    assert error_of(flat(model) - before, train_whole(shared)[0]) <= 1e-12


def test_negative_control_without_no_sync_it_is_eight_times(size: int) -> None:
    shared = work(size)
    model, buckets = data_parallel(make_model(shared.problem))
    loss = make_loss(shared.problem)
    for batch in shared.own(dist.get_rank())[:2]:
        buckets.clear()
        for start in range(0, 4 * EIGHT, 4):
            assert batch is not None
            micro_batch = {name: tensor[start : start + 4] for name, tensor in batch.items()}
            (loss(model, micro_batch) / EIGHT).backward()
    assert len(buckets) == EIGHT * 2


def reduce_scatters(step: Any) -> int:
    with profile(activities=[ProfilerActivity.CPU]) as found:
        step()
    return sum(event.count for event in found.key_averages() if event.key == "c10d::_reduce_scatter_base_")


@pytest.mark.filterwarnings("ignore::UserWarning")  # the profiler's own
@pytest.mark.parametrize("wrap", FSDP)
def test_every_group_of_fsdp_once_a_window_or_once_a_micro_batch(size: int, wrap: str) -> None:
    if wrap.startswith("hsdp") and size == 2:
        pytest.skip("shards over one rank are not scattered")
    shared = work(size)
    model, how = wrapped(make_model(shared.problem), wrap)
    accumulator = Accumulator(model, sgd(model), make_loss(shared.problem), micro_batch_size=4, **how)
    first, *others = shared.own(dist.get_rank())
    accumulator.step(first)
    num = reduce_scatters(lambda: accumulator.step(others[0]))
    assert num == (2 if how["reduce"] == "window" else 2 * EIGHT)  # two layers, each sharded by itself


def test_overlap_is_kept(size: int) -> None:
    """The reduction of the first bucket starts before the backward pass of the last micro-batch ends."""
    shared = work(size)
    inner: Any = make_model(shared.problem)
    model, order = data_parallel(inner)
    node: Any = get_gradient_edge(inner[0].weight).node  # its hooks run in every pass
    node.register_prehook(lambda gradients: order.append("first layer's gradient"))
    accumulator = Accumulator(model, sgd(model), make_loss(shared.problem), micro_batch_size=4)
    batches = shared.own(dist.get_rank())
    accumulator.step(batches[0])
    order.clear()
    accumulator.step(batches[1])
    passes = [k for k, what in enumerate(order) if what == "first layer's gradient"]
    assert len(passes) == EIGHT
    assert order.index("bucket") < passes[-1]
    assert order.index("bucket") > passes[-2]


def test_compression(size: int) -> None:
    """A hook of torch that rounds (the one for bf16 needs NCCL): the result is rounded and otherwise right."""
    shared = work(size)
    model = DistributedDataParallel(make_model(shared.problem))
    model.register_comm_hook(dist.group.WORLD, default_hooks.fp16_compress_hook)
    before = flat(model)
    accumulator = Accumulator(model, sgd(model), make_loss(shared.problem), micro_batch_size=4)
    for batch in shared.own(dist.get_rank()):
        accumulator.step(batch)
    expected: Tensor = train_whole(shared)[0]
    assert 1e-6 < error_of(flat(model) - before, expected) < 1e-3


def test_private_apis_of_torch_exist() -> None:
    reducer = DistributedDataParallel(nn.Linear(1, 1)).reducer
    assert hasattr(reducer, "_rebuild_buckets")
    assert hasattr(reducer, "_reset_state")
    assert torch.distributed.get_backend() == "gloo"
