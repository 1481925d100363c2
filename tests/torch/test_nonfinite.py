"""Non-finite gradients and losses: the step is skipped, an error is raised, or training stops."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from bigbatch import BigBatchWarning, NonFiniteError, OptionError, OrderError
from bigbatch.torch import Accumulator, train_with_accumulation

from .test_accumulator import assert_exact_step, assert_untouched, loss, make, make_batch, make_model, snapshot

WAYS = ("batch", "micro_batch")


def bad_batch() -> tuple[Tensor, Tensor]:
    x, y = make_batch()
    x[6] = torch.nan
    return x, y


def feed(accumulator: Accumulator, batch: Any, way: str = "batch") -> Any:
    if way == "batch":
        return accumulator.step(batch)
    accumulator.accumulation_steps = 3
    for part in zip(*(leaf.split(4) for leaf in batch), strict=True):
        with accumulator.micro_batch(weight=len(part[1])) as micro:
            micro.backward(loss(accumulator.model, part))
    return micro.step


def skip(accumulator: Accumulator, times: int = 1) -> None:
    for _ in range(times):
        with pytest.warns(BigBatchWarning, match="was skipped"):
            assert not feed(accumulator, bad_batch()).is_applied


@pytest.mark.parametrize("way", WAYS)
def test_raise_names_the_step_and_the_first_parameter(way: str) -> None:
    accumulator = make(optimizer="Adam", on_nonfinite="raise")
    feed(accumulator, make_batch(), way)
    accumulator.scheduler = torch.optim.lr_scheduler.StepLR(accumulator.optimizer, 1)
    before, state = snapshot(accumulator), accumulator.optimizer.state_dict()["state"][0]["step"].clone()
    with pytest.raises(NonFiniteError, match=r"the gradient of 0\.weight is not finite in step 2, so it was not taken"):
        feed(accumulator, bad_batch(), way)
    assert_untouched(accumulator, before)
    assert torch.equal(accumulator.optimizer.state_dict()["state"][0]["step"], state)
    assert accumulator.scheduler.last_epoch == 0
    assert accumulator.num_steps == 1


@pytest.mark.parametrize("way", WAYS)
def test_after_raise_the_next_step_is_exact(way: str) -> None:
    accumulator = make(on_nonfinite="raise")
    with pytest.raises(NonFiniteError):
        feed(accumulator, bad_batch(), way)
    assert_exact_step(accumulator)


def infinite_loss(model: nn.Module, batch: Any) -> Tensor:
    return loss(model, batch) + torch.inf  # its gradient is finite


def two_terms(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    return loss(model, batch), infinite_loss(model, batch)


def test_raise_acts_on_a_nonfinite_loss_with_a_finite_gradient() -> None:
    accumulator = make(on_nonfinite="raise", loss=infinite_loss)
    before = snapshot(accumulator)
    with pytest.raises(NonFiniteError, match=r"the loss is not finite in step 1.*all ignored.* pass weight=") as raised:
        accumulator.step(make_batch())
    assert "skip" not in str(raised.value)  # which would apply the step
    assert_untouched(accumulator, before)
    assert_exact_step(accumulator)
    terms = make(on_nonfinite="raise", loss=two_terms, weight=lambda batch: (len(batch[1]), 1))
    with pytest.raises(NonFiniteError, match="term 2 of the loss is not finite"):
        terms.step(make_batch())


def test_skip_applies_a_finite_gradient_of_a_nonfinite_loss() -> None:
    assert make(loss=infinite_loss).step(make_batch()).is_applied


def test_too_many_skipped_steps_name_the_first_one() -> None:
    accumulator = make(max_skipped=3)
    feed(accumulator, make_batch())
    skip(accumulator)
    feed(accumulator, make_batch())  # a good step resets the count
    accumulator.loss = lambda model, batch: loss(model[2], (model[1](batch[0] @ torch.ones(5, 7).double()), batch[1]))
    skip(accumulator)
    accumulator.loss = loss
    skip(accumulator)
    before = snapshot(accumulator)
    message = r"3 steps were skipped, starting at step 4, where the gradient of 2\.weight was not finite: .* 3$"
    with pytest.warns(BigBatchWarning, match="step 6 was skipped"), pytest.raises(NonFiniteError, match=message):
        feed(accumulator, bad_batch())
    assert_untouched(accumulator, before)
    with pytest.warns(BigBatchWarning), pytest.raises(NonFiniteError, match="4 steps were skipped"):
        feed(accumulator, bad_batch())
    assert_exact_step(accumulator)
    skip(accumulator, 2)


def test_the_count_is_saved() -> None:
    first, second = make(max_skipped=3), make(max_skipped=3)
    skip(first, 2)
    second.load_state_dict(first.state_dict())
    with (
        pytest.warns(BigBatchWarning),
        pytest.raises(NonFiniteError, match=r"3 steps were skipped, starting at step 1,"),
    ):
        feed(second, bad_batch())


def test_state_without_a_count_is_loaded() -> None:
    accumulator = make(max_skipped=2)
    skip(accumulator)
    state = accumulator.state_dict()
    del state["skipped"]
    accumulator.load_state_dict(state)
    skip(accumulator)


def fp16(**options: Any) -> Accumulator:
    model = make_model().float()
    scaler = GradScaler("cpu", init_scale=2.0**100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Accumulator(model, optimizer, weighted_loss, 4, scaler=scaler, **options)


def weighted_loss(model: nn.Module, batch: Any) -> Tensor:
    return loss(model, batch) * batch[2]


def overflowing() -> tuple[Tensor, Tensor, Tensor]:
    x, y = make_batch()
    return x.float(), y, torch.tensor(1e12)


@pytest.mark.parametrize("on_nonfinite", ["skip", "raise", "stop"])
def test_overflow_with_a_scaler_is_only_counted(on_nonfinite: Any) -> None:
    accumulator = fp16(on_nonfinite=on_nonfinite, max_skipped=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not accumulator.step(overflowing()).is_applied
        assert not accumulator.step(overflowing()).is_applied
    assert accumulator.scaler.get_scale() == 2.0**98
    assert not accumulator.is_stopped
    if on_nonfinite == "stop":
        assert not accumulator.step(overflowing()).is_applied
        assert accumulator.is_stopped
    else:
        with pytest.raises(NonFiniteError, match=r"3 steps were skipped, .* gradient of 0\.weight was not"):
            accumulator.step(overflowing())
    assert accumulator.scaler.get_scale() == 2.0**97


def test_nonfinite_loss_raises_with_a_scaler_too() -> None:
    accumulator = fp16(on_nonfinite="raise")
    x, y = make_batch()
    with pytest.raises(NonFiniteError, match="the loss is not finite in step 1"):
        accumulator.step((x.float() * torch.nan, y, torch.tensor(1.0)))
    accumulator.scaler.update(8.0)
    assert accumulator.step((x.float(), y, torch.tensor(1.0))).is_applied


@pytest.mark.parametrize("way", WAYS)
def test_stop_skips_and_refuses_further_steps(way: str) -> None:
    accumulator = make(on_nonfinite="stop")
    assert feed(accumulator, make_batch(), way).is_applied
    before, state = snapshot(accumulator), accumulator.state_dict()
    assert not accumulator.is_stopped
    assert not feed(accumulator, bad_batch(), way).is_applied
    assert accumulator.is_stopped
    for again in ("batch", "micro_batch"):
        with pytest.raises(
            OrderError, match=r"stopped because the gradient of 0\.weight was not finite in step 2: load"
        ):
            feed(accumulator, make_batch(), again)
    with pytest.raises(OrderError, match="training was stopped"):
        accumulator.flush()
    assert_untouched(accumulator, before)
    accumulator.load_state_dict(state)
    assert_exact_step(accumulator)


def test_stop_skips_a_nonfinite_loss() -> None:
    accumulator = make(on_nonfinite="stop", loss=infinite_loss)
    before = snapshot(accumulator)
    step = accumulator.step(make_batch())
    assert (step.is_applied, step.loss) == (False, torch.inf)
    assert accumulator.is_stopped
    assert_untouched(accumulator, before)


def test_training_ends_with_the_step_that_stopped_it() -> None:
    def data(batch: tuple[Tensor, Tensor]) -> list[Any]:
        return list(zip(*(leaf.split(2) for leaf in batch), strict=True))

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    micro_batches = data(make_batch()) + data(bad_batch()) + data(make_batch())
    history = train_with_accumulation(model, micro_batches, optimizer, loss, 2, epochs=3, on_nonfinite="stop")
    assert [step.is_applied for step in history] == [True, True, True, True, False]
    whole = train_with_accumulation(model, data(make_batch()), optimizer, loss, 2, epochs=3, on_nonfinite="stop")
    assert len(whole) == 9
    assert len(whole.losses) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_nonfinite": "ignore"}, "on_nonfinite='ignore' is unknown"),
        ({"max_skipped": 0}, "max_skipped is 0: pass a whole number of at least 1"),
        ({"max_skipped": 2.5}, r"max_skipped is 2\.5"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make(**options)
