"""A batch on the host is copied to the device part by part, while the previous part computes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bigbatch import Window
from bigbatch.torch import Accumulator, verify

from .test_gpu import Batch, count, data, loss, make_model, pytestmark  # noqa: F401
from .training import flat


def on_host(batch: Batch, *, is_pinned: bool = False) -> Batch:
    x, y = (tensor.cpu() for tensor in batch)
    return (x.pin_memory(), y.pin_memory()) if is_pinned else (x, y)


def trained(batches: list[Any], loss: Any = loss, **options: Any) -> Tensor:
    model = make_model(torch.float64)
    options = {"micro_batch_size": 8, "weight": count, **options}
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, **options)
    for batch in batches:
        accumulator.step(batch)
    return flat(model)


@pytest.mark.parametrize("is_pinned", [True, False])
@pytest.mark.parametrize("capture", [True, False])
def test_same_result_as_from_the_device(is_pinned: bool, capture: bool) -> None:
    batches = [data(size, torch.float64) for size in (53, 7, 64, 53, 53, 53)]
    expected = trained(batches)
    found = trained([on_host(batch, is_pinned=is_pinned) for batch in batches], capture=capture)
    assert torch.equal(found, expected)


def test_windows_and_nests() -> None:
    def of(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        assert batch["x"].is_cuda
        assert batch["name"] == "here"
        return loss(model, (batch["x"], batch["more"][0])) * batch["factor"]

    def nested(batch: Batch) -> dict[str, Any]:
        factor = torch.tensor(2.0, device=batch[0].device)
        return {"x": batch[0], "more": [batch[1]], "name": "here", "factor": factor}

    batch = data(53, torch.float64)
    cut = list(zip(batch[0].split(8), batch[1].split(8), strict=True))
    weight = {"weight": lambda b: count((b["x"], b["more"][0]))}
    expected = trained([Window(map(nested, cut))] * 3, of, **weight)
    assert torch.equal(trained([Window(nested(on_host(part)) for part in cut)] * 3, of, **weight), expected)
    assert torch.equal(trained([nested(on_host(batch))] * 3, of, **weight), expected)


def test_tensors_already_on_the_device_stay() -> None:
    def of(model: nn.Module, batch: Batch) -> Tensor:
        assert batch[0].is_cuda
        assert batch[1].is_cpu
        return loss(model, (batch[0], batch[1].cuda()))

    x, y = data(53, torch.float64)
    assert torch.equal(trained([(x, y.cpu())], of), trained([(x, y)]))


def test_the_order_of_axes_is_kept() -> None:
    seen = []

    def of(model: nn.Module, x: Tensor) -> Tensor:
        seen.append(x.is_contiguous(memory_format=torch.channels_last))
        return model(x).square().mean()

    model = nn.Conv2d(3, 4, 3).cuda()
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), of, 4)
    accumulator.step(torch.randn(10, 3, 8, 8).to(memory_format=torch.channels_last))
    assert seen == [True] * 3


@pytest.mark.parametrize("capture", [True, False])
def test_device_holds_two_micro_batches(capture: bool) -> None:
    model = nn.Linear(64, 1).cuda()
    accumulator = Accumulator(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, x: m(x).mean(), 1024, capture=capture
    )
    batch = torch.randn(64 * 1024, 64).pin_memory()  # 16 MiB; a micro-batch 256 KiB
    for _ in range(2):
        accumulator.step(batch)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    accumulator.step(batch)
    assert torch.cuda.max_memory_allocated() - before < 2**20


def test_an_error_in_the_middle_leaves_no_copy_behind() -> None:
    calls = []

    def of(model: nn.Module, batch: Batch) -> Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise ValueError("bad luck")
        return loss(model, batch)

    batch = on_host(data(53, torch.float64))
    model = make_model(torch.float64)
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), of, 8, weight=count)
    with pytest.raises(ValueError, match="bad luck"):
        accumulator.step(batch)
    accumulator.step(batch)
    assert torch.equal(flat(model), trained([data(53, torch.float64)]))


def test_pinned_memory_may_be_written_to_once_the_step_returns() -> None:
    """The step waits for its copies, even if the host does not wait for the step."""
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8)), nn.Linear(2048, 1)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
    accumulator = Accumulator(model, optimizer, lambda m, x: m(x).mean() * 0 + x.mean(), 1024)
    batch = torch.ones(32 * 1024, 2048).pin_memory()
    steps = []
    for value in (1.0, 2.0, 3.0):
        batch.fill_(value)
        steps.append(accumulator.step(batch))
    batch.fill_(4.0)
    assert [step.loss for step in steps] == pytest.approx([1.0, 2.0, 3.0])


def test_expanded_and_strided_tensors() -> None:
    x, y = data(53, torch.float64)
    row = x[:1].cpu()
    wide = torch.stack([x.cpu()] * 3, 2)
    for host in (row.expand(53, 64), wide[:, :, 1], x.cpu().t().contiguous().t()):
        assert torch.equal(trained([(host, y.cpu())] * 3), trained([(host.cuda(), y)] * 3))


def test_window_partly_on_the_device() -> None:
    def of(model: nn.Module, batch: Batch) -> Tensor:
        return loss(model, (batch[0].cuda(), batch[1].cuda()))

    parts = [data(8, torch.float64), on_host(data(8, torch.float64)), data(5, torch.float64)]
    for window in (parts, parts[1:], parts[:2]):
        expected = trained([Window((x.cuda(), y.cuda()) for x, y in window)])
        assert torch.equal(trained([Window(window)], of), expected)


def test_verify_with_a_batch_on_the_host() -> None:
    found = verify(make_model(), on_host(data()), loss, 8)
    assert found.is_exact, str(found)
