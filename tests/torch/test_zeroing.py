"""Gradients that the loss zeroes, changes or leaves behind in the middle of a window."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bigbatch import GradientError, Window
from bigbatch.torch import Accumulator

from .test_gradients import Sparse, tokens
from .test_gradients import mse as sparse_mse
from .training import sgd

Batch = tuple[Tensor, Tensor]


def mlp(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def data(dtype: torch.dtype = torch.float64) -> Batch:
    torch.manual_seed(1)
    return torch.randn(11, 6, dtype=dtype), torch.randint(0, 3, (11,))


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def change(model: nn.Module, how: Callable[[Tensor], Any]) -> None:
    for p in list(model.parameters())[1:]:
        if p.grad is not None:
            how(p.grad)


def attack(model: nn.Module, batch: Batch) -> None:
    """One step of an adversarial attack, which leaves gradients on the parameters."""
    x = batch[0].detach().clone().requires_grad_()
    loss(model, (x, batch[1])).backward()


def set_to_none(model: nn.Module, _: Batch) -> None:
    model[2].bias.grad = None


def zero_after_an_attack(model: nn.Module, batch: Batch) -> None:
    attack(model, batch)
    model.zero_grad(set_to_none=False)


def drop_after_an_attack(model: nn.Module, batch: Batch) -> None:
    attack(model, batch)
    model.zero_grad()


CHANGES: dict[str, Callable[[Any, Batch], Any]] = {
    "all": lambda model, _: model.zero_grad(),
    "all, to zeros": lambda model, _: model.zero_grad(set_to_none=False),
    "the last layer": lambda model, _: model[2].zero_grad(),
    "the first layer, to zeros": lambda model, _: model[0].zero_grad(set_to_none=False),
    "one bias to None": set_to_none,
    "all but one in place": lambda model, _: change(model, Tensor.zero_),
    "doubled": lambda model, _: change(model, lambda g: g.mul_(2)),
    "clipped": lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
    "after an attack": drop_after_an_attack,
    "after an attack, to zeros": zero_after_an_attack,
}


def step_error(model: nn.Module, step: Callable[[nn.Module, Batch], Any], batch: Batch) -> float:
    """The error of one step against a plain step on the whole batch."""
    full = mlp(next(model.parameters()).dtype)
    optimizer = sgd(full)
    loss(full, batch).backward()
    optimizer.step()
    step(model, batch)
    ours, whole = (torch.cat([p.detach().flatten() for p in m.parameters()]) for m in (model, full))
    start = torch.cat([p.detach().flatten() for p in mlp(whole.dtype).parameters()])
    return float((ours - whole).norm() / (whole - start).norm())


def by_batch(in_loss: Callable[[nn.Module, Batch], Tensor]) -> Callable[[nn.Module, Batch], Any]:
    return lambda model, batch: Accumulator(model, sgd(model), in_loss, 3).step(batch)


def by_window(in_loss: Callable[[nn.Module, Batch], Tensor]) -> Callable[[nn.Module, Batch], Any]:
    def step(model: nn.Module, batch: Batch) -> None:
        parts = Window(list(zip(*(t.split(4) for t in batch), strict=True)))
        Accumulator(model, sgd(model), in_loss).step(parts)

    return step


def by_micro_batch(in_loss: Callable[[nn.Module, Batch], Tensor]) -> Callable[[nn.Module, Batch], Any]:
    def step(model: nn.Module, batch: Batch) -> None:
        accumulator = Accumulator(model, sgd(model), accumulation_steps=9)
        for part in zip(*(t.split(4) for t in batch), strict=True):
            with accumulator.micro_batch(weight=len(part[1])) as micro:
                micro.backward(in_loss(model, part))
        accumulator.flush()

    return step


def by_hand(in_loss: Callable[[nn.Module, Batch], Tensor]) -> Callable[[nn.Module, Batch], Any]:
    def step(model: nn.Module, batch: Batch) -> None:
        optimizer = sgd(model)
        for part in zip(*(t.split(4) for t in batch), strict=True):
            (in_loss(model, part) * len(part[1]) / len(batch[1])).backward()
        optimizer.step()

    return step


WAYS = {"batch": by_batch, "window": by_window, "micro_batch": by_micro_batch}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CHANGES)
def test_gradient_changes_in_the_loss_have_no_effect(name: str, way: str) -> None:
    """With the full batch there are no gradients yet."""

    def in_loss(model: nn.Module, batch: Batch) -> Tensor:
        CHANGES[name](model, batch)
        return loss(model, batch)

    assert step_error(mlp(), WAYS[way](in_loss), data()) <= 1e-12
    assert step_error(mlp(), by_hand(in_loss), data()) > 1e-2  # negative control


@pytest.mark.parametrize("way", WAYS)
def test_zeroing_in_a_module_hook(way: str) -> None:
    model = mlp()
    model[1].register_forward_hook(lambda *_: model[0].zero_grad())
    assert step_error(model, WAYS[way](loss), data()) <= 1e-12


def test_zeroing_in_several_terms() -> None:
    def terms(model: nn.Sequential, batch: Batch) -> tuple[Tensor, Tensor]:
        model[0].zero_grad()
        half = loss(model, batch) / 2
        return half, half

    def step(model: nn.Module, batch: Batch) -> None:
        Accumulator(model, sgd(model), terms, 3, weight=lambda part: (len(part[1]), len(part[1]))).step(batch)

    assert step_error(mlp(), step, data()) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_zeroing_sums_wider_than_their_parameters(dtype: torch.dtype) -> None:
    def trained(in_loss: Callable[[nn.Module, Batch], Tensor]) -> list[Tensor]:
        model = mlp(dtype)
        seen: list[Tensor] = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer.register_step_pre_hook(lambda *_: seen.extend(p.grad.clone() for p in model.parameters()))
        Accumulator(model, optimizer, in_loss, 2).step(data(dtype))
        return seen

    def zeroing(model: nn.Module, batch: Batch) -> Tensor:
        model.zero_grad()
        return loss(model, batch)

    for ours, plain in zip(trained(zeroing), trained(loss), strict=True):
        assert torch.equal(ours, plain)


def test_zeroing_sparse_gradients() -> None:
    def trained(in_loss: Callable[[Any, Any], Tensor]) -> Tensor:
        torch.manual_seed(0)
        model = Sparse()
        Accumulator(model, sgd(model), in_loss, 1).step(tokens())
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    def zeroing(model: Any, batch: Any) -> Tensor:
        model.embed.zero_grad()
        return sparse_mse(model, batch)

    assert torch.equal(trained(zeroing), trained(sparse_mse))


@pytest.mark.parametrize("way", WAYS)
def test_gradients_that_the_loss_leaves_on_any_parameter_are_refused(way: str) -> None:
    for number, name in enumerate(["0.weight", "0.bias", "2.weight", "2.bias"]):

        def leaving(model: nn.Module, batch: Batch, number: int = number) -> Tensor:
            list(model.parameters())[number].square().sum().backward()
            return loss(model, batch)

        model = mlp()
        with pytest.raises(GradientError, match=rf"1 of 4 .*\({name} first\)"):
            WAYS[way](leaving)(model, data())
        for p, then in zip(model.parameters(), mlp().parameters(), strict=True):
            assert torch.equal(p, then)


def test_gradients_of_a_nested_backward_pass_count_as_with_the_full_batch() -> None:
    """Reentrant checkpoints repeat the forward pass in the backward pass, when the sums are in .grad."""
    model = mlp()

    def checkpointed(model: Any, batch: Batch) -> Tensor:
        hidden = checkpoint(model[:2], batch[0].requires_grad_(), use_reentrant=True)
        return F.cross_entropy(model[2](hidden), batch[1])

    assert step_error(model, by_batch(checkpointed), data()) <= 1e-12
    assert not data()[0].requires_grad
