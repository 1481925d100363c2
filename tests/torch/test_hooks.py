"""Hooks of parameters see the gradient of the whole batch, once per step, however it is cut."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import GradientError, Interrupted, OptionError
from bigbatch.torch import Accumulator, verify
from tests.problems import Problem, problems

from .test_interruption import is_pressed_at
from .training import WAYS, Run, adamw, assert_same_update, update_error

each_way = pytest.mark.parametrize("way", WAYS)


def each(model: nn.Module, register: str, hook: Callable[..., Any]) -> list[Any]:
    return [getattr(p, register)(hook) for p in model.parameters()]


def clamp_what_is_there(p: Tensor) -> None:
    p.grad.clamp_(-0.01, 0.01)


def zero_what_is_there(p: Tensor) -> None:
    p.grad.zero_()


def sign_what_is_there(p: Tensor) -> None:
    p.grad = p.grad.sign()


def normalise_in_place(g: Tensor) -> None:
    g.div_(g.norm())


def train_by_hook(model: nn.Module) -> None:
    """Steps every other parameter in the backward pass, as torch's tutorial does."""
    for number, p in enumerate(model.parameters()):
        if number % 2:
            own = torch.optim.Adam([p], lr=0.01)
            p.register_post_accumulate_grad_hook(lambda _, own=own: own.step() or own.zero_grad())


def two_kinds(model: nn.Module) -> None:
    each(model, "register_post_accumulate_grad_hook", clamp_what_is_there)
    each(model, "register_hook", lambda g: g.clamp(-0.02, 0.02))
    each(model, "register_hook", lambda g: 0.7 * g)


def clip_all_at_the_end(model: nn.Module) -> None:
    """Clips all gradients when the first parameter has its own, because that one comes last."""
    each(model, "register_hook", torch.tanh)
    first = next(model.parameters())
    first.register_post_accumulate_grad_hook(lambda _: nn.utils.clip_grad_norm_(model.parameters(), 0.01) and None)


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "clamp": lambda model: each(model, "register_hook", lambda g: g.clamp(-0.01, 0.01)),
    "normalise in place": lambda model: each(model, "register_hook", normalise_in_place),
    "clamp after": lambda model: each(model, "register_post_accumulate_grad_hook", clamp_what_is_there),
    "sign after": lambda model: each(model, "register_post_accumulate_grad_hook", sign_what_is_there),
    "frozen by a hook": lambda model: model[0].weight.register_post_accumulate_grad_hook(
        lambda p: setattr(p, "grad", None)
    ),
    "two kinds": two_kinds,
    "an optimizer in the backward pass": train_by_hook,
    "clipped by the last": clip_all_at_the_end,
}


def ragged() -> Problem:
    return next(p for p in problems() if p.name == "windows of 4 and 2")


@each_way
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_act_as_with_the_full_batch(name: str, way: str) -> None:
    full, ours = (Run(ragged(), adamw, epochs=2, clip_norm=0.5) for _ in range(2))
    HOOKS[name](full.model)
    HOOKS[name](ours.model)
    assert_same_update(ours.accumulated(way), full.full(), 1e-9)


@pytest.mark.parametrize("name", ["clamp", "sign after"])
def test_negative_control_the_plain_loop_runs_them_on_micro_batches(name: str) -> None:
    full, naive = Run(ragged()), Run(ragged())
    HOOKS[name](full.model)
    HOOKS[name](naive.model)
    assert update_error(naive.naive(), full.full()) > 0.1


@each_way
@pytest.mark.parametrize("name", ["a micro-batch without a token", "two terms, each by its own count"])
def test_hooks_with_tokens_and_with_terms(name: str, way: str) -> None:
    problem = next(p for p in problems() if p.name == name)
    full, ours = Run(problem), Run(problem)
    for run in (full, ours):
        each(run.model, "register_hook", lambda g: g.clamp(-0.003, 0.003))
    assert_same_update(ours.accumulated(way), full.full(), 1e-12)


@each_way
def test_hook_is_called_once_per_step(way: str) -> None:
    run, seen = Run(ragged(), epochs=2), []
    weight = run.model[0].weight
    weight.register_hook(lambda g: seen.append("before"))
    weight.register_post_accumulate_grad_hook(lambda p: seen.append("after"))
    run.accumulated(way)
    assert seen == ["before", "after"] * 4


def make(**options: Any) -> tuple[nn.Module, Accumulator, tuple[Tensor, Tensor]]:
    torch.manual_seed(3)
    model = nn.Linear(4, 3).to(options.pop("dtype", torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batch = (torch.randn(11, 4).to(model.weight), torch.randn(11, 3).to(model.weight))
    return model, Accumulator(model, optimizer, loss, 3, **options), batch


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    output = model(batch[0])
    is_low = output.dtype is torch.bfloat16
    return F.mse_loss(output.float(), batch[1].float()) if is_low else F.mse_loss(output, batch[1])


def test_norm_is_measured_after_the_hooks() -> None:
    model, accumulator, batch = make()
    each(model, "register_hook", torch.sign)
    assert accumulator.step(batch).grad_norm == pytest.approx(15**0.5)


def test_a_handle_removes_its_hook_in_the_loss_and_in_the_hook() -> None:
    model, accumulator, batch = make()
    expected = make()
    first = model.weight.register_hook(torch.zeros_like)
    second = model.bias.register_hook(lambda g: second.remove())
    accumulator.loss = lambda *args: first.remove() or loss(*args)
    accumulator.step(batch)
    expected[1].step(batch)
    assert model.weight.equal(expected[0].weight)
    assert not model.weight._backward_hooks
    assert not model.bias._backward_hooks


def test_hooks_of_parameters_outside_the_optimizer_stay() -> None:
    _, accumulator, batch = make()
    other, seen = nn.Linear(3, 3).double(), []
    other.weight.register_hook(lambda g: seen.append(1))
    accumulator.loss = lambda model, batch: loss(nn.Sequential(model, other), batch)
    accumulator.step(batch)
    assert len(seen) == 4


def test_gradients_wider_than_their_parameters() -> None:
    model, accumulator, batch = make(dtype=torch.bfloat16)
    seen = []
    model.weight.register_hook(lambda g: seen.append(g.dtype) or g.clamp(-1 / 1024, 1 / 1024).bfloat16())
    model.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", 3 * p.grad))
    before = model.weight.detach().clone()
    accumulator.step(batch)
    assert seen == [torch.float32]
    expected = before - 0.5 * 3 / 1024 * (before - model.weight).sign()
    assert model.weight.equal(expected.bfloat16())
    assert model.weight.grad_dtype is torch.bfloat16


def test_gradients_are_unscaled_and_overflows_skip_the_hooks() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    model, accumulator, batch = make(dtype=torch.float32, scaler=scaler)
    plain = make(dtype=torch.float32)
    for m in (model, plain[0]):
        each(m, "register_hook", lambda g: g.nan_to_num().clamp(-0.1, 0.1))
    assert not accumulator.step((batch[0] * torch.inf, batch[1])).is_applied
    assert model.weight.equal(plain[0].weight)
    assert scaler.get_scale() == 2.0**9
    accumulator.step(batch)
    plain[1].step(batch)
    torch.testing.assert_close(model.weight, plain[0].weight, rtol=1e-6, atol=0)


def test_hook_may_repair_a_nonfinite_gradient() -> None:
    model, accumulator, batch = make()
    each(model, "register_hook", partial(torch.nan_to_num, nan=1.0))
    before = model.weight.detach().clone()
    assert accumulator.step((batch[0] * torch.nan, batch[1])).is_applied
    assert model.weight.equal(before - 0.5)


def test_sparse_gradients() -> None:
    def trained(micro_batch_size: int) -> Tensor:
        torch.manual_seed(0)
        model = nn.EmbeddingBag(7, 3, sparse=True, mode="sum").double()
        model.weight.register_hook(lambda g: (g.coalesce() * 2).sin())
        accumulator = Accumulator(
            model, torch.optim.SGD(model.parameters(), 0.5), lambda m, b: m(b).square().mean(), micro_batch_size
        )
        accumulator.step(torch.arange(20).view(5, 4) % 7)
        return model.weight.detach()

    torch.testing.assert_close(trained(2), trained(5), rtol=1e-12, atol=1e-12)


def test_tied_parameters_have_one_gradient() -> None:
    def trained(micro_batch_size: int) -> Tensor:
        torch.manual_seed(0)
        first, second = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
        second.weight = first.weight
        model = nn.Sequential(first, nn.Tanh(), second)
        first.weight.register_hook(lambda g: g.clamp(-0.05, 0.05))
        accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), 0.5), loss, micro_batch_size)
        accumulator.step((torch.randn(7, 3).double(), torch.randn(7, 3).double()))
        return first.weight.detach()

    torch.testing.assert_close(trained(2), trained(7), rtol=1e-12, atol=1e-12)


def test_a_compiled_model() -> None:
    torch.compiler.reset()
    model, _, batch = make()
    plain = make()
    for m in (model, plain[0]):
        m.weight.register_hook(lambda g: g.clamp(-0.1, 0.1))
        m.weight.register_post_accumulate_grad_hook(sign_what_is_there)
    compiled = torch.compile(model, backend="aot_eager")
    accumulator = Accumulator(compiled, torch.optim.SGD(model.parameters(), lr=0.5), loss, 3)
    for _ in range(2):
        accumulator.step(batch)
        plain[1].step(batch)
    torch.testing.assert_close(model.weight, plain[0].weight, rtol=1e-12, atol=1e-12)


# --- errors -------------------------------------------------------------------------------------


def is_hooked(model: nn.Module) -> bool:
    """Whether the hooks act in a backward pass outside of windows."""
    model.zero_grad()
    model(torch.ones(1, 4, dtype=model.weight.dtype)).sum().backward()
    is_zero = not model.weight.grad.any() and not model.bias.grad.any()
    model.zero_grad()
    return is_zero


def add_zeroing_hooks(model: nn.Module) -> None:
    model.weight.register_hook(torch.zeros_like)
    model.bias.register_post_accumulate_grad_hook(zero_what_is_there)


@pytest.mark.parametrize("where", ["loss", "hook", "interrupt"])
def test_hooks_are_restored_after_an_error(where: str) -> None:
    model, accumulator, batch = make()
    add_zeroing_hooks(model)
    if where == "loss":
        accumulator.loss = lambda *_: 1 / 0
    elif where == "interrupt":
        accumulator.loss = lambda *args: accumulator.interrupt() or loss(*args)
    else:
        handle = model.weight.register_hook(lambda g: 1 / 0)
    before = model.weight.detach().clone()
    with pytest.raises(Interrupted if where == "interrupt" else ZeroDivisionError):
        accumulator.step(batch)
    if where == "hook":
        handle.remove()
    assert is_hooked(model)
    accumulator.loss = loss
    model.bias._post_accumulate_grad_hooks.clear()
    accumulator.step(batch)
    assert model.weight.equal(before)
    assert model.bias.ne(make()[0].bias).all()


def test_ctrl_c_at_any_line_keeps_the_hooks() -> None:
    for line in range(1, 10_000, 7):
        model, accumulator, batch = make()
        add_zeroing_hooks(model)
        is_pressed = is_pressed_at(line, lambda: accumulator.step(batch))  # noqa: B023
        assert is_hooked(model)
        if not is_pressed:
            break
    assert 100 < line < 9_900


def test_hook_that_returns_an_invalid_value() -> None:
    model, accumulator, batch = make()
    handle = model.bias.register_hook(lambda g: g[:2])
    with pytest.raises(GradientError, match=r"a hook of bias returned something of shape \(2,\) .* shape \(3,\)"):
        accumulator.step(batch)
    handle.remove()
    handle = model.bias.register_hook(lambda g: g.tolist())
    with pytest.raises(GradientError, match="a hook of bias returned something of type list"):
        accumulator.step(batch)
    handle.remove()
    assert model.weight.equal(make()[0].weight)
    model.weight.register_post_accumulate_grad_hook(lambda p: 2 * p.grad)
    with pytest.raises(GradientError, match=r"a post-accumulate hook of weight returned a Tensor: .* change \.grad"):
        accumulator.step(batch)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_optimizers_that_torch_runs_in_every_backward_pass_are_refused() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    model, _, _ = make()
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.5})
    with pytest.raises(OptionError, match=r"2 of 2 parameters .weight first. are stepped in every backward pass"):
        Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.5), loss, 3)


@each_way
def test_hook_registered_in_a_forward_pass(way: str) -> None:
    full, ours = Run(ragged(), epochs=2), Run(ragged(), epochs=2)
    for run in (full, ours):

        def register(layer: Any, *_: Any) -> None:
            if not layer.weight._backward_hooks:
                layer.weight.register_hook(lambda g: g.clamp(-0.003, 0.003))
                layer.bias.register_post_accumulate_grad_hook(zero_what_is_there)

        run.model[0].register_forward_pre_hook(register)
    assert_same_update(ours.accumulated(way), full.full(), 1e-12)
    assert not any(type(hook).__name__ == "Waiting" for hook in ours.model[0].weight._backward_hooks.values())


def test_hook_registered_in_a_forward_pass_in_bfloat16() -> None:
    """Before torch 2.10, bigbatch adds up such gradients by its own hooks, which must stay."""
    expected = make(dtype=torch.bfloat16)
    model, accumulator, batch = make(dtype=torch.bfloat16)
    expected[0].weight.register_hook(lambda g: g.clamp(-0.01, 0.01))

    def register(layer: Any, *_: Any) -> None:
        if not layer.weight._backward_hooks:
            layer.weight.register_hook(lambda g: g.clamp(-0.01, 0.01))

    model.register_forward_pre_hook(register)
    accumulator.step(batch)
    expected[1].step(batch)
    assert torch.equal(model.weight, expected[0].weight)
    assert torch.equal(model.bias, expected[0].bias)


@pytest.mark.parametrize("mode", ["all", "any"])
def test_hooks_on_several_gradients_at_once_are_refused(mode: Any) -> None:
    model, accumulator, batch = make()
    handle = torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), lambda _: None, mode=mode)
    with pytest.raises(GradientError, match=r"weight has 1 hook of register_multi_grad_hook.*register_post_accumulate"):
        accumulator.step(batch)
    accumulator.accumulation_steps = 2
    with pytest.raises(GradientError, match="register_multi_grad_hook"), accumulator.micro_batch(weight=3) as micro:
        micro.backward(loss(model, batch))
    with pytest.raises(GradientError, match="register_multi_grad_hook"):
        verify(model, batch, loss, 4)
    handle.remove()
    assert accumulator.step(batch).is_applied
