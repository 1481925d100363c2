"""Optimizers and schedulers that accelerate has prepared."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn
from torch.amp import GradScaler

from bigbatch import OptionError, OrderError, Window
from bigbatch.torch import Accumulator

from .test_accumulator import loss, make_batch, make_model


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    """Resets accelerate, which keeps its state for the whole process."""
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def prepared(num_steps: int) -> tuple[Accelerator, nn.Module, Any, Any]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=num_steps)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    return accelerator, *accelerator.prepare(model, optimizer, scheduler)


def full_steps(num: int) -> list[torch.Tensor]:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(num):
        optimizer.zero_grad()
        loss(model, make_batch()).backward()
        optimizer.step()
        scheduler.step()
    return [p.detach() for p in model.parameters()]


def assert_close(model: nn.Module, expected: list[torch.Tensor]) -> None:
    for ours, full in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(ours, full, rtol=1e-12, atol=1e-14)


def parts() -> list[Any]:
    return list(zip(*(t.split(4) for t in make_batch()), strict=True))


@pytest.mark.parametrize("is_inside", [True, False])
def test_with_one_step_everything_is_exact(is_inside: bool) -> None:
    accelerator, model, optimizer, scheduler = prepared(1)
    accumulator = Accumulator(model, optimizer, loss, 4, scheduler=scheduler)
    for _ in range(2):
        if is_inside:
            with accelerator.accumulate(model):
                assert accumulator.step(make_batch()).is_applied
        else:
            assert accumulator.step(make_batch()).is_applied
    assert_close(model, full_steps(2))


@pytest.mark.parametrize("what", ["optimizer", "scheduler"])
@pytest.mark.parametrize("call", ["batch", "window", "micro_batch", "flush"])
def test_step_inside_accumulate_is_refused_and_loses_nothing(call: str, what: str) -> None:
    accelerator, model, optimizer, scheduler = prepared(4)
    if what == "scheduler":
        optimizer = optimizer.optimizer
    accumulator = Accumulator(model, optimizer, loss, 4, scheduler=scheduler, accumulation_steps=len(parts()))

    def feed(part: Any) -> None:
        with accumulator.micro_batch(weight=len(part[1])) as micro:
            micro.backward(loss(model, part))

    if call == "flush":
        accumulator.accumulation_steps = 100
        for part in parts():
            feed(part)
    elif call == "micro_batch":
        for part in parts()[:-1]:
            feed(part)
    act = {
        "batch": lambda: accumulator.step(make_batch()),
        "window": lambda: accumulator.step(Window(parts())),
        "micro_batch": lambda: feed(parts()[-1]),
        "flush": accumulator.flush,
    }[call]
    kind = type(optimizer if what == "optimizer" else scheduler).__name__
    with (
        accelerator.accumulate(model),
        pytest.raises(OrderError, match=rf"holds back the {kind} for windows of 4 .*gradient_accumulation_steps=1"),
    ):
        act()
    assert_close(model, full_steps(0))
    assert scheduler.get_last_lr() == [0.1]
    accelerator.gradient_state._set_sync_gradients(True)
    act()
    assert_close(model, full_steps(1))
    assert scheduler.get_last_lr() == [0.05]


def test_optimizer_with_accelerates_scaler_is_refused() -> None:
    Accelerator(cpu=True)
    model = make_model().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu")
    with pytest.raises(OptionError, match=r"scale of 65536 .*optimizer\.optimizer"):
        Accumulator(model, AcceleratedOptimizer(optimizer, scaler=scaler), loss, 4)
    unwrapped = AcceleratedOptimizer(optimizer, scaler=scaler).optimizer
    x, y = make_batch()
    assert Accumulator(model, unwrapped, loss, 4, scaler=scaler).step((x.float(), y)).is_applied
