"""Steps that the device skips by itself, and the optimizers that do this correctly."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bigbatch import BigBatchWarning, NonFiniteError
from bigbatch.torch import Accumulator, update
from bigbatch.torch.step_result import PendingResult, can_be_skipped_on_device
from bigbatch.torch.sums import Sums


def skipped(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> None:
    """Makes a step that the optimizer is told to skip, as on a device."""
    parameter.grad = torch.full_like(parameter, torch.inf)
    optimizer.grad_scale, optimizer.found_inf = None, torch.ones(())
    optimizer.step()
    del optimizer.grad_scale, optimizer.found_inf


def applied(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> None:
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_fused_sgd_with_momentum_may_skip_a_step() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.5, fused=True)
    assert not can_be_skipped_on_device(optimizer, [parameter])
    applied(optimizer, parameter)
    assert can_be_skipped_on_device(optimizer, [parameter])
    skipped(optimizer, parameter)
    applied(optimizer, parameter)
    assert torch.equal(parameter, torch.full((4,), -2.5))


def test_fused_sgd_creates_wrong_momentum_in_a_skipped_first_step() -> None:
    """So it may not skip its first step. If this test fails, torch has fixed it and `_lacks_momentum` can go."""
    parameter = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.5, fused=True)
    skipped(optimizer, parameter)
    assert optimizer.state[parameter]["momentum_buffer"] is not None


def test_other_fused_optimizers_may_skip_their_first_step() -> None:
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad):
        parameter, twin = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
        optimizer, other = kind([parameter], lr=0.1, fused=True), kind([twin], lr=0.1, fused=True)
        assert can_be_skipped_on_device(optimizer, [parameter])
        skipped(optimizer, parameter)
        applied(optimizer, parameter)
        applied(other, twin)
        assert torch.equal(parameter, twin)
        assert not torch.equal(twin, torch.ones(4))


def test_unfused_optimizers_cannot_skip() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    assert not can_be_skipped_on_device(torch.optim.AdamW([parameter]), [parameter])


def test_clipping_on_the_device_keeps_float64() -> None:
    sums = [Sums({nn.Parameter(torch.zeros(3, dtype=torch.float64)): torch.tensor([3.0, 4.0, 12.0]).double()})]
    sums.append(Sums({p: g.clone() for p, g in sums[0].items()}))
    sums[0].clip(13.0, 0.1, None)
    sums[1].clip(sums[1].norms_on_device()[1], 0.1, None)
    (at_once,), (later,) = (found.values() for found in sums)
    assert float((at_once - later).abs().max()) <= 1e-16


class OnHost(PendingResult):
    """A pending result without a GPU: its values are known when they are read."""

    def __init__(self, norms: Tensor, total: Tensor, *, if_applied: Any, if_skipped: Any) -> None:
        arrived: Any = SimpleNamespace(synchronize=lambda: None)
        self._waiting = (torch.cat([norms, total.reshape(1)]), arrived)
        self._if_applied, self._if_skipped = if_applied, if_skipped


def test_warning_raised_as_an_error_loses_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A skipped step is known only after the next one was applied, which must count."""
    monkeypatch.setattr(update, "PendingResult", OnHost)
    monkeypatch.setattr(update.Update, "_need_not_wait", lambda *_: True)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    accumulator = Accumulator(model, optimizer, lambda model, x: model(x).mean(), 2, max_skipped=2)
    good, bad = torch.ones(3, 2), torch.full((3, 2), torch.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in (good, bad):
            accumulator.step(batch)
        with pytest.raises(BigBatchWarning, match="step 2 was skipped"):
            accumulator.step(bad)
        assert accumulator.num_steps == 3
        with pytest.raises(BigBatchWarning, match="step 3 was skipped"):
            accumulator.step(good)
    assert accumulator.num_steps == 4
    with pytest.raises(NonFiniteError, match=r"2 steps were skipped, starting at step 2"):
        accumulator.step(good)
    assert accumulator.step(good).is_applied
