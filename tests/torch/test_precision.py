"""Mixed precision: autocast around the loss; unscale once, check once, step once."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler

from bigbatch import OptionError
from bigbatch.torch import Accumulator

Batch = tuple[Tensor, Tensor]


def make_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))


def data(size: int = 22) -> Batch:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, 16, generator=generator), torch.randint(0, 4, (size,), generator=generator)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def make(size: int = 4, **options: Any) -> Accumulator:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return Accumulator(
        model, optimizer, loss, size, accumulation_steps=100, scheduler=scheduler, clip_norm=0.3, **options
    )


def feed(accumulator: Accumulator, batch: Batch, way: str) -> Any:
    if way == "batch":
        return accumulator.step(batch)
    for part in zip(*(leaf.split(4) for leaf in batch), strict=True):
        with accumulator.micro_batch(weight=len(part[1])) as micro:
            micro.backward(loss(accumulator.model, part))
    return accumulator.flush()


@pytest.mark.parametrize("way", ["batch", "micro_batch"])
@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_the_update_is_that_of_the_full_batch_in_the_same_precision(
    precision: str, dtype: torch.dtype, way: str
) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = GradScaler("cpu", enabled=precision == "fp16")
    with torch.autocast("cpu", dtype):
        full = loss(model, data())
    scaler.scale(full).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    scaler.step(optimizer)

    accumulator = make(precision=precision)
    seen = []
    accumulator.model[0].register_forward_hook(lambda *args: seen.append(args[-1].dtype))
    step = feed(accumulator, data(), way)
    assert set(seen) == {dtype}
    assert step.is_applied
    eps = torch.finfo(dtype).eps
    assert step.loss == pytest.approx(full.item(), rel=eps)
    assert step.grad_norm == pytest.approx(norm.item(), rel=2 * eps)
    start = make_model()
    for ours, plain, before in zip(accumulator.model.parameters(), model.parameters(), start.parameters(), strict=True):
        assert (ours - plain).norm() <= 4 * eps * (plain - before).norm()


def overflow(batch: Batch) -> Batch:
    x, y = batch[0].clone(), batch[1]
    x[9] = 1e6  # in the third micro-batch, more than float16 holds
    return x, y


@pytest.mark.parametrize("way", ["batch", "micro_batch"])
@pytest.mark.parametrize("is_ours", [True, False])
def test_an_overflow_in_any_micro_batch_skips_the_whole_step(way: str, is_ours: bool) -> None:
    scaler = None if is_ours else GradScaler("cpu", init_scale=2.0**10)
    accumulator = make(precision="fp16", scaler=scaler)
    assert is_ours or accumulator.scaler is scaler
    assert feed(accumulator, data(), way).is_applied
    scale = accumulator.scaler.get_scale()
    before = copy.deepcopy(accumulator.model.state_dict())

    step = feed(accumulator, overflow(data()), way)
    assert not step.is_applied
    for name, value in accumulator.model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(p.grad is None for p in accumulator.model.parameters())
    assert accumulator.scaler.get_scale() == scale / 2
    assert accumulator.scheduler.last_epoch == 1

    clean = make(precision="fp16")
    clean.model.load_state_dict(before)
    assert feed(accumulator, data(), way).is_applied
    feed(clean, data(), way)
    for ours, other in zip(accumulator.model.parameters(), clean.model.parameters(), strict=True):
        assert torch.allclose(ours, other, rtol=1e-3, atol=1e-6)
    assert accumulator.scheduler.last_epoch == 2


def test_large_weights_do_not_overflow_one_micro_batch_at_a_time() -> None:
    """The sums stay as large as those of a mean, so the first step is applied, as with the full batch."""
    accumulator = make(precision="fp16")
    for part in zip(*(leaf.split(4) for leaf in data()), strict=True):
        with accumulator.micro_batch(weight=5000 * len(part[1])) as micro:
            micro.backward(loss(accumulator.model, part))
    assert accumulator.flush().is_applied


def test_unscaled_once_and_stepped_once() -> None:
    calls = []

    class Counting(GradScaler):
        def unscale_(self, optimizer: Any) -> None:
            calls.append("unscale")
            super().unscale_(optimizer)

        def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append("step")
            return super().step(optimizer, *args, **kwargs)

        def update(self, new_scale: Any = None) -> None:
            calls.append("update")
            super().update(new_scale)

    make(precision="fp16", scaler=Counting("cpu")).step(data())
    assert calls == ["unscale", "step", "update"]


def test_scaler_without_autocast() -> None:
    scaler = GradScaler("cpu", init_scale=8.0)
    accumulator, plain = make(scaler=scaler), make()
    accumulator.step(data())
    plain.step(data())
    for a, b in zip(accumulator.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-8)


def test_low_precision_parameters_and_a_scaler_are_refused() -> None:
    model = make_model().half()
    with pytest.raises(OptionError, match=r"4 of 4 are torch\.float16"):
        Accumulator(model, torch.optim.SGD(model.parameters()), loss, 4, precision="fp16")
