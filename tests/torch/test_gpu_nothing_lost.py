"""Interruptions, non-finite gradients and checkpoints on a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bigbatch import Interrupted, NonFiniteError, OrderError, WeightError
from bigbatch.torch import Accumulator, Checkpoints

from .test_gpu import data, loss, make_model, pytestmark  # noqa: F401


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(*pair) for pair in zip(one.parameters(), other.parameters(), strict=True))


def made(**options: Any) -> Any:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    return Accumulator(model, optimizer, loss, 8, **options)


def interrupt_after(accumulator: Any, num: int) -> None:
    """Asks the accumulator to stop during the micro-batch with this number, counted from 1."""
    backward = accumulator._backward
    num_left = num

    def interrupting(*args: Any) -> Any:
        nonlocal num_left
        num_left -= 1
        if not num_left:
            accumulator.interrupt()
            accumulator._backward = backward
        return backward(*args)

    accumulator._backward = interrupting


@pytest.mark.parametrize("capture", [False, True])
def test_step_interrupted_anywhere_continues(capture: bool) -> None:
    whole, broken = made(capture=capture), made(capture=capture)
    for number in range(7):
        expected = whole.step(data(53))
        if number:
            interrupt_after(broken, number)
            with pytest.raises(Interrupted, match=f"after {number} of 7 micro-batches"):
                broken.step(data(53))
            state = broken.state_dict()
            broken.forget()
            broken.load_state_dict(state)
        found = broken.step(data(53))
        assert (found.loss, found.grad_norm) == (expected.loss, expected.grad_norm)
        assert same(whole.model, broken.model)


@pytest.mark.filterwarnings("ignore:step . was skipped")
@pytest.mark.parametrize("capture", [False, True])
def test_too_many_skipped_steps_without_waiting(capture: bool) -> None:
    whole, ours = made(capture=capture), made(capture=capture, max_skipped=3)
    bad = tuple(part.clone() for part in data(53))
    bad[0][0] = torch.nan
    for _ in range(3):
        whole.step(data(53))
        ours.step(data(53))
    with pytest.raises(NonFiniteError, match="3 steps were skipped"):
        for _ in range(5):
            ours.step(bad)
    whole.step(data(53))
    ours.step(data(53))
    assert same(whole.model, ours.model)


@pytest.mark.parametrize("on_nonfinite", ["raise", "stop"])
def test_nonfinite_gradients_are_reported_at_once(on_nonfinite: Any) -> None:
    ours = made(on_nonfinite=on_nonfinite)
    before = [p.detach().clone() for p in ours.model.parameters()]
    bad = tuple(part.clone() for part in data(53))
    bad[0][0] = torch.nan
    if on_nonfinite == "raise":
        with pytest.raises(NonFiniteError, match="weight"):
            ours.step(bad)
    else:
        assert not ours.step(bad).is_applied
        assert ours.is_stopped
    assert all(torch.equal(*pair) for pair in zip(before, ours.model.parameters(), strict=True))


def test_negative_weights_on_the_device() -> None:
    ours = made(weight=lambda batch: torch.full((len(batch[1]),), -1.0, device="cuda"))
    before = [p.detach().clone() for p in ours.model.parameters()]
    with pytest.raises(WeightError):
        ours.step(data(53))
    assert all(torch.equal(*pair) for pair in zip(before, ours.model.parameters(), strict=True))


@pytest.mark.parametrize("capture", [False, True])
def test_parameters_changed_by_another_accumulator(capture: bool) -> None:
    torch.manual_seed(0)
    model = make_model()
    fed = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), accumulation_steps=2)
    other = Accumulator(model, torch.optim.AdamW(model.parameters(), fused=True), loss, 8, capture=capture)
    for _ in range(3):
        other.step(data(53))
    with fed.micro_batch(weight=8) as micro:
        micro.backward(loss(model, data(8)))
    other.step(data(53))
    with pytest.raises(OrderError), fed.micro_batch(weight=8) as micro:
        micro.backward(loss(model, data(8)))


class Dropped(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 32), nn.Dropout(0.3), nn.Linear(32, 10))


@pytest.mark.parametrize("stop", [1, 4, 7])
def test_loop_resumes(stop: int, tmp_path: Path) -> None:
    def run(folder: Path, stop: int | None = None) -> nn.Module:
        torch.manual_seed(0)
        model = Dropped().cuda()
        accumulator = Accumulator(model, torch.optim.AdamW(model.parameters(), fused=True), loss, 8)
        batches = [data(24), data(9), data(17)]
        with Checkpoints(folder, accumulator, every=1) as checkpoints:
            for batch in checkpoints.batches(batches, 3):
                if checkpoints.num_batches == stop:
                    break
                accumulator.step(batch)
        return model

    whole = run(tmp_path / "whole")
    run(tmp_path / "broken", stop)
    assert same(run(tmp_path / "broken"), whole)
