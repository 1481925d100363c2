"""One rank with a GPU and NCCL, as far as only a device can show it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from bigbatch import OptionError
from bigbatch.torch import Accumulator
from tests.ranks.shared import whole

from .test_gpu import count, data, feed, loss, make_model, pytestmark  # noqa: F401
from .training import flat


@pytest.fixture(autouse=True, params=["nccl", "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:gloo"])
def _group(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group(request.param, store=store, rank=0, world_size=1, device_id=torch.device("cuda:0"))
    yield
    dist.destroy_process_group()


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    for child in model.children():
        if list(child.parameters()):
            fully_shard(child, **options)
    return fully_shard(model, **options)


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, device_ids=[0])


WAYS = [(ddp, {}), (sharded, {"reduce": "window"}), (sharded, {"reduce": "micro_batch"})]


@pytest.mark.parametrize("way", ["batch", "window", "micro_batch"])
@pytest.mark.parametrize(("share", "how"), WAYS, ids=["ddp", "fsdp, window", "fsdp, micro_batch"])
def test_the_update_is_that_of_the_full_batch_in_float64(
    share: Callable[[nn.Module], nn.Module], how: dict[str, Any], way: str
) -> None:
    if dist.get_backend_config() == "cpu:gloo,cuda:gloo" and share is sharded:
        pytest.skip("gloo does not scatter what is on a GPU")
    full = make_model(torch.float64)
    before = flat(full)
    loss(full, data(dtype=torch.float64)).backward()
    torch.optim.SGD(full.parameters(), lr=0.1).step()
    ours = share(make_model(torch.float64))
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    accumulator = Accumulator(ours, optimizer, loss, 4, accumulation_steps=100, weight=count, **how)
    feed(accumulator, way, data(dtype=torch.float64))
    expected = flat(full) - before
    assert float((whole(ours) - before - expected).norm() / expected.norm()) < 1e-12


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_host_does_not_wait_within_a_window() -> None:
    """The host waits for the device only at the end of a step."""
    if "nccl" not in dist.get_backend_config():
        pytest.skip("gloo brings what is on a GPU to the host")
    model = ddp(make_model())
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, 4)
    batch = data()
    for _ in range(2):
        accumulator.step(batch)
    end = accumulator._update._prepare
    seen = []

    def prepare(sums: Any, *more: Any) -> Any:
        torch.cuda.set_sync_debug_mode("default")
        seen.append(len(sums))
        return end(sums, *more)

    accumulator._update._prepare = prepare  # type: ignore[method-assign]
    try:
        torch.cuda.set_sync_debug_mode("error")
        accumulator.step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert seen == [4]


def test_bf16_compression() -> None:
    if "gloo" in dist.get_backend_config() and "nccl" not in dist.get_backend_config():
        pytest.skip("torch's hook wants NCCL")
    full, model = make_model(), make_model()
    before = flat(full)
    loss(full, data()).backward()
    torch.optim.SGD(full.parameters(), lr=0.1).step()
    shared = DistributedDataParallel(model, device_ids=[0])
    shared.register_comm_hook(dist.group.WORLD, default_hooks.bf16_compress_hook)
    Accumulator(shared, torch.optim.SGD(shared.parameters(), lr=0.1), loss, 4).step(data())
    expected = flat(full) - before
    assert 1e-5 < float((flat(model) - before - expected).norm() / expected.norm()) < 1e-2


@pytest.mark.parametrize("reduce", ["window", "micro_batch"])
def test_mixed_precision_of_fsdp(reduce: Any) -> None:
    if "nccl" not in dist.get_backend_config():
        pytest.skip("gloo does not scatter what is on a GPU")
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    full = make_model()
    before = flat(full)
    loss(full, data()).backward()
    torch.optim.SGD(full.parameters(), lr=0.1).step()
    model = sharded(make_model(), mp_policy=policy)
    step = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, 4, reduce=reduce).step(data())
    assert step.is_applied
    expected = flat(full) - before
    assert float((whole(model) - before - expected).norm() / expected.norm()) < 3e-2


@pytest.mark.parametrize("share", [ddp, sharded])
def test_fp16_with_a_scaler(share: Callable[[nn.Module], nn.Module]) -> None:
    if share is sharded and "nccl" not in dist.get_backend_config():
        pytest.skip("gloo does not scatter what is on a GPU")
    model = share(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = Accumulator(model, optimizer, loss, 4, precision="fp16")
    accumulator.scaler._init_scale = 2.0**40  # far too large: the first steps overflow and are skipped
    applied = [accumulator.step(data()).is_applied for _ in range(40)]
    assert not applied[0]
    assert applied[-1]


@pytest.mark.parametrize("bucket_view", [True, False])
def test_captured_passes_under_ddp(bucket_view: bool) -> None:
    full, model = make_model(torch.float64), make_model(torch.float64)
    optimizer = torch.optim.SGD(full.parameters(), lr=0.1)
    ours = DistributedDataParallel(model, device_ids=[0], gradient_as_bucket_view=bucket_view)
    accumulator = Accumulator(ours, torch.optim.SGD(ours.parameters(), lr=0.1), loss, 8, capture=True)
    for size in (53, 53, 48, 53, 53, 7):
        optimizer.zero_grad()
        loss(full, data(size, torch.float64)).backward()
        optimizer.step()
        accumulator.step(data(size, torch.float64))
    assert accumulator._captured is not None
    assert accumulator._captured.num_replays > 10
    assert float((flat(model) - flat(full)).norm() / flat(full).norm()) < 1e-12


def test_fully_shard_cannot_be_captured() -> None:
    if "nccl" not in dist.get_backend_config():
        pytest.skip("gloo does not scatter what is on a GPU")
    model = sharded(make_model())
    with pytest.raises(OptionError, match="fully_shard gathers parameters in every pass"):
        Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, 8, capture=True)
