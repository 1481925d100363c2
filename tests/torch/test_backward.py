"""`backward(batch)`: the gradient of the whole batch in .grad, without a step, for loops that step in their own way."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import ExponentialLR

from bigbatch import BigBatchWarning, GradientError, Interrupted, NonFiniteError, OptionError, OrderError, Window
from bigbatch.torch import Accumulator
from bigbatch.torch import batch as nest
from tests.problems import Problem, problems

from .test_accumulator import assert_exact_step, assert_untouched, loss, make, make_batch, make_model, snapshot
from .training import Run, flat, make_batches, muon_and_adamw


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def apart(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def bad_batch() -> tuple[Tensor, Tensor]:
    x, y = make_batch()
    x[6] = torch.nan
    return x, y


# --- the gradient ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_window", [False, True])
@pytest.mark.parametrize("problem", problems(), ids=lambda problem: problem.name)
def test_it_is_that_of_the_full_batch(problem: Problem, is_window: bool) -> None:
    full, ours = Run(problem, muon_and_adamw), Run(problem, muon_and_adamw)
    accumulator = ours._accumulator(micro_batch_size=problem.micro_batch_size)
    for batch in make_batches(problem):
        full.model.zero_grad()
        terms = full.loss(full.model, batch)
        whole = sum(terms) if isinstance(terms, tuple) else terms
        whole.backward()
        norm = float(nn.utils.get_total_norm([p.grad for p in full.model.parameters() if p.grad is not None]))
        if problem.clip_norm is not None:
            nn.utils.clip_grad_norm_(full.model.parameters(), problem.clip_norm)
        ours.model.zero_grad()
        step = accumulator.backward(Window(nest.cut(batch, problem.micro_batch_size)[0]) if is_window else batch)
        assert apart(gradient(ours.model), gradient(full.model)) <= 1e-12
        assert [p.grad is None for p in ours.model.parameters()] == [p.grad is None for p in full.model.parameters()]
        assert (step.loss, step.grad_norm) == pytest.approx((whole.item(), norm), rel=1e-12)
        assert not step.is_applied
    assert accumulator.num_steps == 0
    assert torch.equal(flat(ours.model), ours.before)


def test_negative_control_a_mean_of_means_is_another_gradient() -> None:
    accumulator = make(weight=lambda batch: 1)
    accumulator.backward(make_batch())
    plain = make_model()
    loss(plain, make_batch()).backward()
    assert apart(gradient(accumulator.model), gradient(plain)) > 1e-3


def test_nothing_else_happens() -> None:
    accumulator = make(optimizer="AdamW")
    accumulator.scheduler = ExponentialLR(accumulator.optimizer, 0.5)
    before = snapshot(accumulator)
    accumulator.backward(make_batch())
    assert not accumulator.optimizer.state
    assert accumulator.optimizer.param_groups[0]["lr"] == 0.1
    assert accumulator.num_steps == accumulator.state_dict()["num_steps"] == 0
    accumulator.optimizer.zero_grad()
    assert_untouched(accumulator, before)
    assert_exact_step(make(optimizer="SGD"))


@pytest.mark.parametrize("grad_dtype", [None, torch.float32])
def test_the_gradient_has_the_dtype_that_torch_gives_it(grad_dtype: torch.dtype | None) -> None:
    """Sums of bfloat16 parameters are float32. They are rounded once, unless the parameter takes float32."""
    model, reference = make_model().bfloat16(), make_model()
    reference.load_state_dict(model.state_dict())
    if grad_dtype is not None:
        for p in model.parameters():
            p.grad_dtype = grad_dtype
    x, y = make_batch()
    x = x.bfloat16()
    Accumulator(model, torch.optim.SGD(model.parameters()), loss, 4).backward((x, y))
    loss(reference, (x.double(), y)).backward()
    assert {p.grad.dtype for p in model.parameters()} == {grad_dtype or torch.bfloat16}
    assert {p.grad_dtype for p in model.parameters()} == {grad_dtype or torch.bfloat16}
    assert apart(gradient(model).double(), gradient(reference)) < 0.02
    assert torch.equal(gradient(model), gradient(model).bfloat16()) == (grad_dtype is None)


def test_hooks_run_once_on_the_whole_gradient_and_clipping_comes_after() -> None:
    seen: list[float] = []

    def halve(gradient: Tensor) -> Tensor:
        seen.append(float(gradient.norm()))
        return gradient / 2

    plain = make_model()
    accumulator = make(clip_norm=0.01, clip_value=0.004)
    for model in (accumulator.model, plain):
        model[0].weight.register_hook(halve)
    accumulator.backward(make_batch())
    loss(plain, make_batch()).backward()
    nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    nn.utils.clip_grad_value_(plain.parameters(), 0.004)
    assert apart(gradient(accumulator.model), gradient(plain)) < 1e-12
    assert len(seen) == 2
    assert seen[0] == pytest.approx(seen[1], rel=1e-12)


def test_a_batch_without_weight_leaves_no_gradient() -> None:
    accumulator = make(weight=lambda batch: 0)
    before = snapshot(accumulator)
    step = accumulator.backward(make_batch())
    assert (step.weight, step.is_applied) == (0, False)
    assert_untouched(accumulator, before)


def test_running_statistics_are_updated_once() -> None:
    def with_norm() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(5), make_model()).double()

    plain, ours = with_norm(), with_norm()
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BigBatchWarning)
        Accumulator(ours, optimizer, loss, 4).backward(make_batch())
    loss(plain, make_batch()).backward()
    for now, full in zip(ours.buffers(), plain.buffers(), strict=True):
        assert torch.allclose(now, full, rtol=1e-12)


def test_aux_is_that_of_the_whole_batch() -> None:
    def with_aux(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        logits = model(batch[0])
        return F.cross_entropy(logits, batch[1]), {"right": (logits.argmax(1) == batch[1]).sum(), "logits": logits}

    accumulator = make(loss=with_aux, has_aux=True)
    step = accumulator.backward(make_batch())
    logits = accumulator.model(make_batch()[0])
    assert torch.allclose(step.aux["logits"], logits, rtol=1e-12)
    assert step.metrics == {"right": int((logits.argmax(1) == make_batch()[1]).sum())}


# --- loops that need it ------------------------------------------------------------------------------------------


def sharpness_aware(model: nn.Module, optimizer: torch.optim.Optimizer, backward: Callable[[], Any]) -> None:
    """One step of SAM: the gradient is that at the worst place near the parameters."""
    optimizer.zero_grad()
    backward()
    parameters = [p for p in model.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm([p.grad for p in parameters])
    moves = [0.05 * p.grad / norm for p in parameters]
    with torch.no_grad():
        torch._foreach_add_(parameters, moves)
    optimizer.zero_grad()
    backward()
    with torch.no_grad():
        torch._foreach_sub_(parameters, moves)
    optimizer.step()
    optimizer.zero_grad()


def test_sam() -> None:
    accumulator, plain = make(), make_model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    start = flat(plain)
    for _ in range(5):
        sharpness_aware(plain, optimizer, lambda: loss(plain, make_batch()).backward())
        sharpness_aware(accumulator.model, accumulator.optimizer, lambda: accumulator.backward(make_batch()))
    assert apart(flat(accumulator.model) - start, flat(plain) - start) < 1e-12


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs(line_search: Any) -> None:
    def train(backward: Callable[[], Any], optimizer: torch.optim.Optimizer) -> None:
        def closure() -> Any:
            optimizer.zero_grad()
            return backward()

        for _ in range(4):
            optimizer.step(closure)  # type: ignore[arg-type]

    plain, ours = make_model(), make_model()
    start = flat(plain)
    optimizers = [torch.optim.LBFGS(m.parameters(), max_iter=5, line_search_fn=line_search) for m in (plain, ours)]

    def of_full_batch() -> Tensor:
        value = loss(plain, make_batch())
        value.backward()
        return value

    accumulator = Accumulator(ours, optimizers[1], loss, 4)
    train(of_full_batch, optimizers[0])
    train(lambda: accumulator.backward(make_batch()).loss, optimizers[1])
    assert apart(flat(ours) - start, flat(plain) - start) < 1e-9


def test_your_own_clipping_and_step() -> None:
    ours, own = make(clip_norm=0.05, optimizer="AdamW"), make(optimizer="AdamW")
    for _ in range(3):
        ours.step(make_batch())
        own.optimizer.zero_grad()
        own.backward(make_batch())
        nn.utils.clip_grad_norm_(own.model.parameters(), 0.05)
        own.optimizer.step()
    assert apart(flat(own.model), flat(ours.model)) < 1e-13


class Both(nn.Module):
    """A generator and a discriminator."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 5)).double()
        self.discriminator = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def fools(model: Any, batch: Any) -> Tensor:
    return F.softplus(-model.discriminator(model.generator(batch[1]))).mean()


def tells_apart(model: Any, batch: Any) -> Tensor:
    real, noise = batch
    made = model.generator(noise).detach()
    return F.softplus(-model.discriminator(real)).mean() + F.softplus(model.discriminator(made)).mean()


def test_a_gan_with_two_accumulators() -> None:
    """The loss of the generator also reaches the discriminator, whose optimizer zeroes that as in any loop."""
    batch = make_batch()[0], torch.randn(11, 3, generator=torch.Generator().manual_seed(1)).double()
    plain, ours = Both(), Both()
    start = flat(plain)

    def optimizers(model: Both) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(m.parameters(), lr=0.01) for m in (model.discriminator, model.generator)]

    losses = (tells_apart, fools)
    made = optimizers(plain)
    accumulators = [Accumulator(ours, o, f, 4) for o, f in zip(optimizers(ours), losses, strict=True)]
    for _ in range(3):
        for optimizer, of_one, accumulator in zip(made, losses, accumulators, strict=True):
            optimizer.zero_grad()
            of_one(plain, batch).backward()
            optimizer.step()
            accumulator.optimizer.zero_grad()
            assert accumulator.backward(batch).num_micro_batches == 3
            accumulator.optimizer.step()
    assert apart(flat(ours) - start, flat(plain) - start) < 1e-12


# --- with a GradScaler -------------------------------------------------------------------------------------------


def with_scaler(scale: float, **options: Any) -> tuple[Accumulator, Any]:
    model = make_model().float()
    held = list(model.parameters())
    optimizers = [torch.optim.AdamW(held[:2], lr=0.01), torch.optim.SGD(held[2:], lr=0.1)]
    x, y = make_batch()
    scaler = GradScaler("cpu", init_scale=scale)
    return Accumulator(model, optimizers, loss, 4, scaler=scaler, **options), (x.float(), y)


def test_it_is_unscaled_and_the_scaler_goes_on() -> None:
    stepped, batch = with_scaler(2.0**10)
    ours, _ = with_scaler(2.0**10)
    for _ in range(3):
        stepped.step(batch)
        ours.backward(batch)
        for optimizer in ours.optimizer:
            ours.scaler.step(optimizer)
            optimizer.zero_grad()
        ours.scaler.update()
    assert torch.equal(flat(ours.model), flat(stepped.model))
    assert ours.scaler.state_dict() == stepped.scaler.state_dict()


def test_an_overflow_leaves_nothing_and_lowers_the_scale() -> None:
    ours, batch = with_scaler(2.0**126)
    ours.loss = lambda model, batch: loss(model, batch) * 16.0
    before = snapshot(ours)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = ours.backward(batch)
    assert not torch.isfinite(torch.tensor(step.grad_norm))
    for optimizer in ours.optimizer:
        ours.scaler.step(optimizer)
    ours.scaler.update()
    assert_untouched(ours, before)
    assert ours.scaler.get_scale() == 2.0**125
    ours.scaler.update(2.0**4)
    assert ours.backward(batch).grad_norm == pytest.approx(float(gradient(ours.model).norm()), rel=1e-6)


def test_it_unscales_anew_without_an_update_in_between() -> None:
    """SAM takes two gradients a step. `unscale_` alone would refuse the second."""
    ours, batch = with_scaler(2.0**10)
    ours.backward(batch)
    first = gradient(ours.model)
    ours.model.zero_grad()
    ours.backward(batch)
    assert torch.equal(gradient(ours.model), first)
    ours.model.zero_grad()
    assert ours.step(batch).is_applied


# --- a gradient that is not finite -------------------------------------------------------------------------------


def test_one_that_is_not_finite_is_told_and_not_left() -> None:
    accumulator = make(max_skipped=2)
    before = snapshot(accumulator)
    with pytest.warns(BigBatchWarning, match=r"backward\(\) left no gradient in \.grad: .* of 0\.weight is not"):
        step = accumulator.backward(bad_batch())
    assert not torch.isfinite(torch.tensor(step.grad_norm))
    assert_untouched(accumulator, before)
    with pytest.warns(BigBatchWarning), pytest.raises(NonFiniteError, match="the last 2 steps were skipped"):
        accumulator.backward(bad_batch())
    assert_untouched(accumulator, before)
    assert_exact_step(accumulator)


def test_without_a_size_its_own_name_is_in_the_message() -> None:
    with pytest.raises(OptionError, match=r"^backward\(\) needs to know where to cut the batch: pass micro_batch_size"):
        make(micro_batch_size=None).backward(make_batch())


def test_raise_and_stop() -> None:
    accumulator = make(on_nonfinite="raise")
    before = snapshot(accumulator)
    with pytest.raises(NonFiniteError, match=r"0\.weight is not finite in backward\(\), so \.grad has no gradient"):
        accumulator.backward(bad_batch())
    accumulator.loss = lambda model, batch: loss(model, batch) + torch.inf
    with pytest.raises(NonFiniteError, match="the loss is not finite"):
        accumulator.backward(make_batch())
    assert_untouched(accumulator, before)
    assert_exact_step(accumulator)
    accumulator = make(on_nonfinite="stop")
    accumulator.backward(bad_batch())
    assert accumulator.is_stopped
    with pytest.raises(OrderError, match="training was stopped"):
        accumulator.backward(make_batch())


# --- refused -----------------------------------------------------------------------------------------------------


def test_a_gradient_that_is_there_already_is_refused() -> None:
    accumulator = make()
    accumulator.backward(make_batch())
    before = gradient(accumulator.model)
    for call in (accumulator.backward, accumulator.step):
        with pytest.raises(GradientError, match=r"4 of 4 parameters hold a gradient .*: call optimizer\.zero_grad\(\)"):
            call(make_batch())
    assert torch.equal(gradient(accumulator.model), before)
    accumulator.optimizer.zero_grad()
    assert_exact_step(accumulator)


def test_an_optimizer_with_a_closure_is_refused_by_steps() -> None:
    model = make_model()
    accumulator = Accumulator(model, torch.optim.LBFGS(model.parameters()), loss, 4, accumulation_steps=2)
    before = snapshot(accumulator)
    ask = r"LBFGS computes the loss several times in one step, .*accumulator\.backward\(batch\)\.loss.*step\(closure\)"
    with pytest.raises(OptionError, match=ask):
        accumulator.step(make_batch())
    with pytest.raises(OptionError, match=ask), accumulator.micro_batch(weight=1):
        pass
    assert_untouched(accumulator, before)


def test_an_open_window_and_an_interrupted_step_are_refused_and_kept() -> None:
    accumulator = make(accumulation_steps=2)
    with accumulator.micro_batch(weight=11) as micro:
        micro.backward(loss(accumulator.model, make_batch()))
    with pytest.raises(OrderError, match=r"a window of 1 micro-batches is open: call flush\(\) before backward\(\)"):
        accumulator.backward(make_batch())
    accumulator.flush()

    def interrupting(model: nn.Module, batch: Any) -> Tensor:
        accumulator.interrupt()
        return loss(model, batch)

    accumulator.loss = interrupting
    with pytest.raises(Interrupted):
        accumulator.step(make_batch())
    with pytest.raises(OrderError, match=r"backward\(\) was called after a step that was interrupted with 1 micro"):
        accumulator.backward(make_batch())
    accumulator.loss = loss
    assert accumulator.step(make_batch()).is_applied


def test_it_runs_to_its_end_when_interrupted() -> None:
    """Inside a closure, an exception would leave the optimizer in the middle of its step."""
    accumulator = make()
    accumulator.interrupt()
    assert accumulator.backward(make_batch()).num_micro_batches == 3
    assert accumulator.is_interrupted
    accumulator.optimizer.zero_grad()
    with pytest.raises(Interrupted, match="before this batch"):
        accumulator.step(make_batch())
    assert_exact_step(accumulator)


def test_it_needs_a_loss() -> None:
    with pytest.raises(OptionError, match=r"backward\(\) needs a loss"):
        make(loss=None).backward(make_batch())
