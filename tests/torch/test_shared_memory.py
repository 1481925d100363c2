"""Gradients that torch leaves in the same memory: adding to one must not change another."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bigbatch.torch import Accumulator

ROWS = torch.randn(7, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
ROWS[:, 0] = torch.tensor([-1, -1, 1, 1, 1, -1, 1])


def made(*shape: int) -> nn.Parameter:
    count = torch.Size(shape).numel()
    return nn.Parameter(torch.linspace(-1, 1, count, dtype=torch.float64).view(shape))


def squared(x: Tensor) -> Tensor:
    return x.square().mean()


class Seed(nn.Module):
    """The gradient of `b` shares memory with the seed of the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = made(6), made(1)

    def forward(self, x: Tensor) -> Tensor:
        return squared(x @ self.a) + self.b.squeeze()


class Views(nn.Module):
    """Two pairs of gradients; each pair shares one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = made(6), made(3, 2), made(1), made(1)

    def forward(self, x: Tensor) -> Tensor:
        return squared(x @ (self.a.view(3, 2) + self.b.view(3, 2)).flatten()) + self.c.squeeze() + self.d.squeeze()


class Late(Views):
    """The same, but the first micro-batch does not use two of them."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x[x[:, 0] > 0]
        sure = self.c.squeeze() + self.d.squeeze()
        return sure + super().forward(rows) * len(rows) / len(x) if len(rows) else sure


class Stacked(nn.Module):
    """Tokens and a table of positions, as in image transformers: different parts of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.a, self.b = made(1, 2, 6), made(6), made(6)

    def forward(self, x: Tensor) -> Tensor:
        return squared(x @ (torch.stack([self.a, self.b]) + self.positions.squeeze(0)).T)


class SparseAndDense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.dense = nn.Embedding(5, 6, sparse=True, dtype=torch.float64), made(30)
        nn.init.ones_(self.table.weight)

    def forward(self, x: Tensor) -> Tensor:
        return squared(x @ (self.table(torch.arange(5)) + self.dense.view(5, 6)).T)


class TwoSparse(nn.Module):
    """Biases of users and of items, as in recommenders."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.things = (nn.Embedding(9, 1, sparse=True, dtype=torch.float64) for _ in range(2))
        nn.init.ones_(self.users.weight)
        nn.init.ones_(self.things.weight)

    def forward(self, x: Tensor) -> Tensor:
        user, thing = (x[:, 1].abs() * 2).long(), (x[:, 2].abs() * 2).long()
        return squared((self.users(user) + self.things(thing)).squeeze(1) - x[:, 3])


MODELS = [Seed, Views, Late, Stacked, SparseAndDense, TwoSparse]


def train(model: nn.Module, way: str, held: list[nn.Parameter], rows: Tensor = ROWS, **options: Any) -> list[Tensor]:
    """The update of the parameters that the optimizer holds."""
    before = [p.detach().clone() for p in held]
    sizes = [2, 4, 1] if len(rows) == 7 else [len(rows)]
    accumulator = Accumulator(
        model, torch.optim.SGD(held, lr=1.0), lambda model, x: model(x), 2, accumulation_steps=len(sizes), **options
    )
    if way == "batch":
        accumulator.step(rows)
    else:
        for part in rows.split(sizes):
            with accumulator.micro_batch(weight=len(part)) as micro:
                micro.backward(model(part))
    return [start - p.detach() for start, p in zip(before, held, strict=True)]


def expected(model: nn.Module, held: list[nn.Parameter], rows: Tensor = ROWS, clip_norm: float = 1e9) -> list[Tensor]:
    found = [g.to_dense() for g in torch.autograd.grad(model(rows), held)]
    norm = torch.cat([g.flatten() for g in found]).norm()
    return [g * min(1.0, clip_norm / (norm + 1e-6)) for g in found]


@pytest.mark.parametrize("way", ["batch", "micro_batch"])
@pytest.mark.parametrize("make_model", MODELS)
@pytest.mark.parametrize("option", ["plain", "clipped", "scaled"])
@pytest.mark.parametrize("size", [7, 1])
def test_gradients_are_added_once(make_model: Any, way: str, option: str, size: int) -> None:
    """A hand-written loop adds each gradient of a pair to both, from the second micro-batch on."""
    model, clip_norm = make_model(), 0.1 if option == "clipped" else 1e9
    held = list(model.parameters())
    options: dict[str, Any] = {"clip_norm": clip_norm}
    if option == "scaled":
        options["scaler"] = torch.amp.GradScaler("cpu", init_scale=8.0)
    rows = ROWS[-size:]
    wanted = expected(model, held, rows, clip_norm)
    for found, want in zip(train(model, way, held, rows, **options), wanted, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("way", ["batch", "micro_batch"])
@pytest.mark.parametrize("make_model", [Views, Stacked, SparseAndDense])
def test_memory_shared_with_parameters_outside_the_optimizer(make_model: Any, way: str) -> None:
    for number in range(len(list(make_model().parameters()))):
        model = make_model()
        held = [list(model.parameters())[number]]
        wanted = expected(model, held)
        for found, want in zip(train(model, way, held), wanted, strict=True):
            torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-14)


class GivesItsInput(torch.autograd.Function):
    """Its backward pass returns a view of the user's data."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return a @ x[0]

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return ctx.saved_tensors[0][0], None


@pytest.mark.parametrize("way", ["batch", "micro_batch"])
def test_data_of_the_user_does_not_change(way: str) -> None:
    model = nn.Module()
    model.a = made(6)
    model.forward = lambda x: GivesItsInput.apply(model.a, x)  # type: ignore[method-assign]
    rows = ROWS.clone()
    train(model, way, [model.a], rows)
    assert torch.equal(rows, ROWS)


@pytest.mark.parametrize("make_model", [Views, Stacked])
def test_negative_control_a_hand_written_loop_is_wrong(make_model: Any) -> None:
    model = make_model()
    wanted = expected(model, list(model.parameters()))
    for part in ROWS.split([2, 4, 1]):
        (model(part) * len(part) / len(ROWS)).backward()
    found = [p.grad for p in model.parameters()]
    assert not all(torch.allclose(f, w) for f, w in zip(found, wanted, strict=True))
