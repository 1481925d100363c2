"""The parts of a step: order of calls, options, schedules, bad input. An error changes nothing."""

import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import (
    BatchError,
    BigBatchError,
    BigBatchWarning,
    GradientError,
    LossError,
    OptionError,
    OrderError,
    WeightError,
    Window,
)
from bigbatch.torch import Accumulator


def make_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def make_batch(size: int = 11) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(size, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (size,), generator=generator)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def make(micro_batch_size: int | None = 4, optimizer: str = "SGD", **options: Any) -> Accumulator:
    model = make_model()
    return Accumulator(
        model,
        getattr(torch.optim, optimizer)(model.parameters(), lr=0.1),
        options.pop("loss", loss),
        micro_batch_size,
        **options,
    )


def snapshot(accumulator: Accumulator) -> list[Tensor]:
    return [p.detach().clone() for p in accumulator.model.parameters()]


def assert_untouched(accumulator: Accumulator, before: list[Tensor]) -> None:
    for now, then in zip(accumulator.model.parameters(), before, strict=True):
        assert torch.equal(now, then)
        assert now.grad is None


def assert_exact_step(accumulator: Accumulator) -> None:
    """Asserts that the next step is that of the full batch, so that nothing is left of an earlier error."""
    model = make_model()
    model.load_state_dict(accumulator.model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss(model, make_batch()).backward()
    optimizer.step()
    accumulator.loss, accumulator.weight, accumulator.micro_batch_size = loss, None, 4
    assert accumulator.step(make_batch()).is_applied
    for ours, full in zip(accumulator.model.parameters(), model.parameters(), strict=True):
        assert torch.allclose(ours, full, rtol=1e-12, atol=1e-15)


def test_a_batch_smaller_than_the_micro_batch_just_runs() -> None:
    step = make(micro_batch_size=100).step(make_batch(11))
    assert (step.num_micro_batches, step.micro_batch_size, step.weight) == (1, 11, 11)


def test_step_reports_what_it_did() -> None:
    accumulator = make()
    model = make_model()
    full = loss(model, make_batch())
    full.backward()
    norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()]))
    step = accumulator.step(make_batch())
    assert step.loss == pytest.approx(full.item(), rel=1e-12)
    assert step.grad_norm == pytest.approx(norm.item(), rel=1e-12)
    assert (step.num_micro_batches, step.micro_batch_size, step.weight) == (3, 4, 11)
    assert step.is_applied
    assert step.noise_scale is None


def test_reduction_sum_adds_up() -> None:
    def summed(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    model = make_model()
    full = summed(model, make_batch())
    full.backward()
    norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()])).item()
    step = make(loss=summed, reduction="sum").step(make_batch())
    assert step.loss == pytest.approx(full.item(), rel=1e-12)
    assert step.grad_norm == pytest.approx(norm, rel=1e-12)
    accumulator = make(reduction="sum", accumulation_steps=5)
    for x, y in zip(*(t.split(4) for t in make_batch()), strict=True):
        with accumulator.micro_batch() as micro:
            micro.backward(summed(accumulator.model, (x, y)))
    assert accumulator.flush().grad_norm == pytest.approx(norm, rel=1e-12)


@pytest.mark.parametrize("one_at_a_time", [False, True])
def test_weights_per_sample_are_summed(one_at_a_time: bool) -> None:
    x, y = make_batch()
    s = torch.linspace(0, 2, len(y), dtype=torch.float64)

    def weighted_loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return (F.cross_entropy(model(batch[0]), batch[1], reduction="none") * batch[2]).sum() / batch[2].sum()

    model = make_model()
    weighted_loss(model, (x, y, s)).backward()
    norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()])).item()
    if one_at_a_time:
        accumulator = make(accumulation_steps=9)
        for part in zip(x.split(4), y.split(4), s.split(4), strict=True):
            with accumulator.micro_batch(weight=part[2]) as micro:
                micro.backward(weighted_loss(accumulator.model, part))
        step = accumulator.flush()
    else:
        step = make(loss=weighted_loss, weight=lambda batch: batch[2]).step((x, y, s))
    assert step.grad_norm == pytest.approx(norm, rel=1e-12)
    assert step.weight == pytest.approx(s.sum().item())


@pytest.mark.parametrize("weights", [(1e-40, 3.0, 5.0), (5e-324, 1e300, 2e300), (1e-40, 1e300, 1e-40), (0, 1e50, 1e60)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tiny_first_weight(dtype: torch.dtype, weights: tuple[float, ...]) -> None:
    model, full = make_model().to(dtype), make_model().to(dtype)
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), accumulation_steps=3)
    x, y = make_batch()
    parts = list(zip(x.to(dtype).split(4), y.split(4), strict=True))
    sum(weight / sum(weights) * loss(full, part) for weight, part in zip(weights, parts, strict=True)).backward()
    torch.optim.SGD(full.parameters(), lr=0.1).step()
    for weight, part in zip(weights, parts, strict=True):
        with accumulator.micro_batch(weight=weight) as micro:
            micro.backward(loss(model, part))
    assert micro.step.is_applied
    for ours, theirs in zip(model.parameters(), full.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5 if dtype is torch.float32 else 1e-12, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint64, torch.float8_e4m3fn, torch.bool, torch.int8])
def test_weights_of_any_dtype_are_summed(dtype: torch.dtype) -> None:
    assert make(weight=lambda batch: torch.ones(len(batch[1])).to(dtype)).step(make_batch()).weight == 11


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_in_low_precision_are_summed_exactly(dtype: torch.dtype) -> None:
    step = make(micro_batch_size=4000, weight=lambda batch: torch.ones(len(batch[1]), dtype=dtype) * 20).step(
        make_batch(7001)
    )
    assert step.weight == 140020


def test_a_loss_with_one_axis_of_one_is_a_scalar() -> None:
    def sometimes_with_an_axis(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        value = loss(model, batch)
        return value.reshape(1) if len(batch[1]) == 4 else value

    step = make(loss=sometimes_with_an_axis).step(make_batch())
    assert step.loss == pytest.approx(make().step(make_batch()).loss)


def test_total_weight_of_zero_changes_nothing_and_is_reported() -> None:
    for accumulator in (make(weight=lambda _: 0), make(weight=lambda _: torch.zeros(3), optimizer="AdamW")):
        before = snapshot(accumulator)
        step = accumulator.step(make_batch())
        assert not step.is_applied
        assert step.weight == 0
        assert step.loss != step.loss
        assert_untouched(accumulator, before)
        assert not accumulator.optimizer.state
    accumulator = make(accumulation_steps=2)
    before = snapshot(accumulator)
    for _ in range(2):
        with accumulator.micro_batch(weight=0) as micro:
            micro.backward(loss(accumulator.model, make_batch()))
    assert not micro.step.is_applied
    assert_untouched(accumulator, before)
    assert_exact_step(accumulator)


def test_full_window_steps_and_flush_steps_the_rest() -> None:
    accumulator = make(accumulation_steps=2)
    seen = []
    for x, y in zip(*(t.split(4) for t in make_batch()), strict=True):
        with accumulator.micro_batch(weight=len(y)) as micro:
            micro.backward(loss(accumulator.model, (x, y)))
        seen.append(micro.step)
    last = accumulator.flush()
    assert [s and s.weight for s in seen] == [None, 8, None]
    assert last.weight == 3
    assert accumulator.flush() is None
    assert accumulator.num_steps == 2


def test_accumulation_steps_may_ramp_up() -> None:
    accumulator = make(accumulation_steps=lambda step: step + 1)
    made = []
    for _ in range(6):
        with accumulator.micro_batch(weight=11) as micro:
            micro.backward(loss(accumulator.model, make_batch()))
        made.append(micro.step is not None)
    assert made == [True, False, True, False, False, True]


def test_a_schedule_counts_steps_not_micro_batches() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    accumulator = Accumulator(model, optimizer, loss, 2, scheduler=scheduler)
    for _ in range(3):
        accumulator.step(make_batch())
    assert optimizer.param_groups[0]["lr"] == 0.5**3


def test_failing_schedule_keeps_the_count_of_applied_steps() -> None:
    accumulator = make()
    accumulator.scheduler = torch.optim.lr_scheduler.OneCycleLR(accumulator.optimizer, 0.1, total_steps=2)
    for _ in range(2):
        accumulator.step(make_batch())
    before = snapshot(accumulator)
    with pytest.raises(ValueError, match="Tried to step 3 times"):
        accumulator.step(make_batch())
    assert not torch.equal(snapshot(accumulator)[0], before[0])
    assert accumulator.num_steps == 3


def test_parameter_groups_including_one_added_later() -> None:
    accumulator = make()
    first, last = accumulator.model[0], accumulator.model[2]
    optimizer = torch.optim.SGD([{"params": first.weight, "lr": 0.5}, {"params": [first.bias], "lr": 0.0}])
    accumulator = Accumulator(accumulator.model, optimizer, loss, 4)
    before = snapshot(accumulator)
    accumulator.step(make_batch())
    moved = [not torch.equal(a, b) for a, b in zip(accumulator.model.parameters(), before, strict=True)]
    assert moved == [True, False, False, False]
    last.zero_grad()
    optimizer.add_param_group({"params": list(last.parameters()), "lr": 0.5})
    accumulator.step(make_batch())
    moved = [not torch.equal(a, b) for a, b in zip(accumulator.model.parameters(), before, strict=True)]
    assert moved == [True, False, True, True]


@pytest.mark.parametrize("way", ["norm", "value"])
def test_clipping_acts_on_the_whole_gradient(way: str) -> None:
    limit = 0.05
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loss(model, make_batch()).backward()
    if way == "norm":
        nn.utils.clip_grad_norm_(model.parameters(), limit)
    else:
        nn.utils.clip_grad_value_(model.parameters(), limit)
    optimizer.step()
    ours = make_model()
    accumulator = Accumulator(ours, torch.optim.SGD(ours.parameters(), lr=1.0), loss, 2, **{f"clip_{way}": limit})
    accumulator.step(make_batch())
    for a, b in zip(ours.parameters(), model.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-15)


def test_losses_are_fetched_when_read() -> None:
    """Until then they stay tensors."""
    step = make().step(make_batch())
    assert callable(step._terms)
    assert step.loss > 0
    assert not callable(step._terms)


# --- gradients that exist before a window ----------------------------------------------------------------------


def test_existing_gradients_are_refused_and_kept() -> None:
    accumulator = make()
    loss(accumulator.model, make_batch()).backward()
    before = snapshot(accumulator)
    theirs = [p.grad.clone() for p in accumulator.model.parameters()]
    with pytest.raises(GradientError, match=r"4 of 4 parameters hold a gradient.*0\.weight.*zero_grad"):
        accumulator.step(make_batch())
    for p, then, grad in zip(accumulator.model.parameters(), before, theirs, strict=True):
        assert torch.equal(p, then)
        assert torch.equal(p.grad, grad)
    accumulator.optimizer.zero_grad()
    assert_exact_step(accumulator)


@pytest.mark.parametrize("place", ["in the last block", "before flush"])
def test_existing_gradients_at_the_end_of_a_window_are_refused(place: str) -> None:
    """They would be lost, or applied to parameters without a gradient in the window."""
    accumulator = make(accumulation_steps=2)
    model, before = accumulator.model, snapshot(accumulator)

    def feed(batch: Any, more: Any = lambda: None) -> None:
        with accumulator.micro_batch(weight=len(batch[1])) as micro:
            micro.backward(loss(model, batch))
            more()

    def penalty() -> None:
        next(model.parameters()).square().sum().backward()

    whole = make_batch()
    first, second = zip(*(tensor.split([3, len(tensor) - 3]) for tensor in whole), strict=True)
    feed(first)
    with pytest.raises(GradientError, match=r"1 of 4 parameters hold a gradient.*0\.weight"):
        if place == "in the last block":
            feed(second, penalty)
        else:
            penalty()
            accumulator.flush()
    for p, then in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, then)
    accumulator.optimizer.zero_grad()
    if place == "before flush":
        feed(second)
    else:
        accumulator.flush()
    full = make()
    full.step(whole)
    for p, q in zip(model.parameters(), full.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


def test_first_weight_of_zero_is_not_the_reference() -> None:
    """Compared with 1 the others are tiny, and their gradients would vanish in float32."""
    seen: list[float] = []
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer.register_step_pre_hook(lambda *_: seen.append(float(model.weight.grad)))
    accumulator = Accumulator(model, optimizer, accumulation_steps=3)
    for weight, value in ((0, 9.0), (1e-30, 1e-11), (3e-30, 5e-11)):
        with accumulator.micro_batch(weight=weight) as micro:
            micro.backward((model.weight * value).sum())
    assert seen == [pytest.approx(4e-11, rel=1e-6)]


def test_zeroed_gradients_are_accepted() -> None:
    accumulator = make()
    loss(accumulator.model, make_batch()).backward()
    accumulator.optimizer.zero_grad(set_to_none=False)
    assert_exact_step(accumulator)


def test_foreign_backward_between_micro_batches_is_refused_and_the_window_continues() -> None:
    accumulator = make(accumulation_steps=3)
    parts = list(zip(*(t.split(4) for t in make_batch()), strict=True))

    def feed(part: tuple[Tensor, Tensor]) -> None:
        with accumulator.micro_batch(weight=len(part[1])) as micro:
            micro.backward(loss(accumulator.model, part))

    feed(parts[0])
    loss(accumulator.model, parts[1]).backward()
    with pytest.raises(GradientError):
        feed(parts[1])
    accumulator.optimizer.zero_grad()
    feed(parts[1])
    feed(parts[2])
    model = make_model()
    loss(model, make_batch()).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for ours, full in zip(accumulator.model.parameters(), model.parameters(), strict=True):
        assert torch.allclose(ours, full, rtol=1e-12, atol=1e-15)


# --- errors ---------------------------------------------------------------------------------------


def raise_in_the_middle(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    if len(batch[1]) < 4:
        raise ZeroDivisionError("the user's own")
    return loss(model, batch)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"loss": lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none")},
            LossError,
            r"shape \(4,\).*4 numbers",
        ),
        ({"loss": lambda m, b: loss(m, b).item()}, LossError, "is a float"),
        ({"loss": lambda m, b: loss(m, b).detach()}, LossError, "no graph"),
        ({"loss": lambda m, b: (loss(m, b), loss(m, b))}, LossError, "2 terms but the weight has 1"),
        ({"loss": lambda m, b: loss(make_model(), b)}, LossError, "none of the optimizer's parameters"),
        ({"loss": raise_in_the_middle}, ZeroDivisionError, "the user's own"),
        ({"weight": lambda b: -1}, WeightError, "micro-batch 1 is -1"),
        ({"weight": lambda b: float("nan")}, WeightError, "micro-batch 1 is nan"),
        ({"weight": lambda b: float("inf")}, WeightError, "micro-batch 1 is inf"),
        ({"weight": lambda b: None}, WeightError, "micro-batch 1 is None"),
        ({"weight": lambda b: "4"}, WeightError, "micro-batch 1 is '4'"),
        ({"weight": lambda b: 1 if len(b[1]) == 4 else -2}, WeightError, "micro-batch 3 is -2"),
        ({"weight": lambda b: (1, 2)}, LossError, "1 term but the weight has 2"),
    ],
)
def test_bad_losses_and_weights_change_nothing(options: dict[str, Any], error: type[Exception], message: str) -> None:
    accumulator = make(optimizer="SGD", **options)
    before = snapshot(accumulator)
    with pytest.raises(error, match=message) as caught:
        accumulator.step(make_batch())
    assert "\n" not in str(caught.value)
    assert_untouched(accumulator, before)
    assert_exact_step(accumulator)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.zeros(0, 5), torch.zeros(0)), r"batch\[0\] has 0 samples"),
        ((torch.zeros(4, 5), torch.zeros(3)), r"batch\[0\] has 4 samples but batch\[1\] has 3"),
        ("text", "no tensor with a batch axis"),
        (Window([]), "0 micro-batches"),
        (
            Window([(torch.zeros(2, 5), torch.zeros(3))]),
            r"micro_batch\[0\]\[0\] has 2 samples but micro_batch\[0\]\[1\]",
        ),
    ],
)
def test_bad_batches_change_nothing(batch: Any, message: str) -> None:
    accumulator = make()
    before = snapshot(accumulator)
    with pytest.raises(BatchError, match=message):
        accumulator.step(batch)
    assert_untouched(accumulator, before)
    assert_exact_step(accumulator)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"micro_batch_size": 0}, "micro_batch_size is 0: pass a whole number of at least 1"),
        ({"micro_batch_size": 2.5}, "micro_batch_size is 2.5"),
        ({"micro_batch_size": "auto"}, "micro_batch_size is 'auto'"),
        ({"accumulation_steps": -1}, "accumulation_steps is -1"),
        ({"reduction": "max"}, "reduction='max' is unknown"),
        ({"precision": "fp8"}, "precision='fp8' is unknown"),
        ({"clip_norm": 0.0}, "clip_norm is 0.0"),
        ({"clip_value": float("nan")}, "clip_value is nan"),
        ({"accumulate_dtype": torch.bfloat16}, "narrower than torch.float32"),
        ({"accumulate_dtype": torch.int64}, "torch.int64"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make(**options)


def test_a_plateau_schedule_is_refused() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(OptionError, match="wants a metric"):
        Accumulator(model, optimizer, loss, 4, scheduler=scheduler)


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(OptionError, match="none of the model's 4"):
        Accumulator(make_model(), torch.optim.SGD(make_model().parameters()), loss, 4)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: make(None).step(make_batch()), OptionError, "where to cut"),
        (lambda: make(loss=None).step(make_batch()), OptionError, "needs a loss"),
        (lambda: make().micro_batch(weight=1).__enter__(), OptionError, "accumulation_steps"),
        (lambda: make(accumulation_steps=2).micro_batch().__enter__(), OptionError, "needs weight"),
        (lambda: make(accumulation_steps=2).micro_batch(weight=-3).__enter__(), WeightError, "-3"),
    ],
)
def test_calls_that_lack_an_option(call: Callable[[], Any], error: type[BigBatchError], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def feed_once(accumulator: Accumulator, weight: Any = 11) -> None:
    with accumulator.micro_batch(weight=weight) as micro:
        micro.backward(loss(accumulator.model, make_batch()))


def test_step_in_an_open_window_is_refused() -> None:
    accumulator = make(accumulation_steps=3)
    feed_once(accumulator)
    with pytest.raises(OrderError, match="a window of 1 micro-batches is open"):
        accumulator.step(make_batch())
    assert accumulator.flush().is_applied


def test_another_number_of_terms_in_a_window_is_refused() -> None:
    accumulator = make(accumulation_steps=3)
    feed_once(accumulator)
    with pytest.raises(WeightError, match="2 weights, those before it in the window have 1"):
        feed_once(accumulator, weight=(1, 2))
    assert accumulator.flush().weight == 11


def test_a_block_without_backward_is_refused_and_does_not_count() -> None:
    accumulator = make(accumulation_steps=3)
    feed_once(accumulator)
    with pytest.raises(OrderError, match="was not called"), accumulator.micro_batch(weight=3):
        pass
    assert accumulator.flush().weight == 11


def test_error_before_backward_keeps_the_window_and_after_it_drops_it() -> None:
    accumulator = make(accumulation_steps=3)
    before = snapshot(accumulator)
    feed_once(accumulator)
    with pytest.raises(ZeroDivisionError) as early, accumulator.micro_batch(weight=3):
        raise ZeroDivisionError
    assert not hasattr(early.value, "__notes__")
    feed_once(accumulator)
    with pytest.raises(OrderError, match="called twice") as late, accumulator.micro_batch(weight=11) as micro:
        micro.backward(loss(accumulator.model, make_batch()))
        micro.backward(loss(accumulator.model, make_batch()))
    assert "the window of 3 micro-batches was dropped" in late.value.__notes__[0]
    assert accumulator.flush() is None
    assert_untouched(accumulator, before)
    assert_exact_step(accumulator)


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError("in the middle of backward")


def test_failing_backward_leaves_no_gradients() -> None:
    def failing(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        hidden = model[1](model[0](batch[0]))
        if len(batch[1]) < 4:
            hidden = FailsInBackward.apply(hidden)  # the last layer already has its gradient
        return F.cross_entropy(model[2](hidden), batch[1])

    accumulator = make(loss=failing, accumulation_steps=4)
    before = snapshot(accumulator)
    with pytest.raises(RuntimeError, match="middle of backward"):
        accumulator.step(make_batch())
    assert_untouched(accumulator, before)
    feed_once(accumulator)
    with pytest.raises(RuntimeError, match="middle of backward"), accumulator.micro_batch(weight=3) as micro:
        micro.backward(failing(accumulator.model, make_batch(3)))
    assert_untouched(accumulator, before)
    assert_exact_step(accumulator)


def test_failing_backward_drops_the_window_even_if_caught() -> None:
    accumulator = make(accumulation_steps=3)
    before = snapshot(accumulator)
    feed_once(accumulator)
    with pytest.raises(OrderError, match=r"micro\.backward\(loss\) failed in this micro-batch") as caught:  # noqa: SIM117
        with accumulator.micro_batch(weight=3) as micro:
            with suppress(RuntimeError):
                micro.backward(FailsInBackward.apply(loss(accumulator.model, make_batch())))
    assert "the window of 1 micro-batches was dropped" in caught.value.__notes__[0]
    assert accumulator.flush() is None
    assert_untouched(accumulator, before)
    assert_exact_step(accumulator)


def test_backward_after_its_block_is_refused() -> None:
    accumulator = make(accumulation_steps=3)
    feed_once(accumulator)
    with pytest.raises(ZeroDivisionError), accumulator.micro_batch(weight=3) as micro:
        raise ZeroDivisionError
    with pytest.raises(OrderError, match="called after its block"):
        micro.backward(loss(accumulator.model, make_batch()))
    assert accumulator.flush().weight == 11


def test_errors_around_a_micro_batch_are_raised_before_it_is_added() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = Accumulator(model, optimizer, accumulation_steps=lambda step: [3][step])
    feed_once(accumulator)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(BigBatchWarning, match="BatchNorm"):
            feed_once(accumulator)
    model[1].eval()
    feed_once(accumulator)
    feed_once(accumulator)
    assert accumulator.num_steps == 1
    for _ in range(2):
        with pytest.raises(IndexError):  # of the ramp
            feed_once(accumulator)
    assert accumulator.flush() is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("one_at_a_time", [False, True])
def test_nonfinite_gradient_is_not_applied_and_is_reported(bad: float, one_at_a_time: bool) -> None:
    accumulator = make(accumulation_steps=3, optimizer="SGD")
    accumulator.scheduler = torch.optim.lr_scheduler.LambdaLR(accumulator.optimizer, lambda step: 1.0)
    before = snapshot(accumulator)
    x, y = make_batch()
    x[6, 2] = bad
    with pytest.warns(BigBatchWarning, match=r"step 1 was skipped: the gradient of 0\.weight is not finite"):
        if one_at_a_time:
            for part in zip(x.split(4), y.split(4), strict=True):
                with accumulator.micro_batch(weight=len(part[1])) as micro:
                    micro.backward(loss(accumulator.model, part))
            step = micro.step
        else:
            step = accumulator.step((x, y))
    assert not step.is_applied
    assert accumulator.scheduler.last_epoch == 0
    assert_untouched(accumulator, before)
    assert_exact_step(accumulator)


def test_infinite_gradient_without_nan_is_not_applied() -> None:
    """In most models an infinity turns into NaN on its way; here it does not."""
    model = nn.Linear(1, 1, bias=False)
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=1.0), lambda m, b: m(b).mean(), 2)
    before = model.weight.detach().clone()
    with pytest.warns(BigBatchWarning, match="step 1 was skipped: the gradient of weight is not finite"):
        step = accumulator.step(torch.tensor([[1.0], [2.0], [torch.inf], [3.0], [4.0]]))
    assert not step.is_applied
    assert step.grad_norm == torch.inf
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1e30), (torch.float64, 1e200)])
def test_a_gradient_too_large_to_square_is_still_finite(dtype: torch.dtype, size: float) -> None:
    model = nn.Linear(1, 1, bias=False, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1 / size)
    accumulator = Accumulator(model, optimizer, lambda m, b: (m(b) * size).mean(), 2)
    step = accumulator.step(torch.ones(5, 1, dtype=dtype))
    assert step.is_applied
    assert step.grad_norm == pytest.approx(size, rel=1e-6)


def test_batch_norm_warns_once() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)).double()
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, 4)
    with pytest.warns(BigBatchWarning, match=r"1 BatchNorm layer in training mode \(1\)"):
        accumulator.step(make_batch())
    accumulator.step(make_batch())
    model[1].eval()
    Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, 4).step(make_batch())
