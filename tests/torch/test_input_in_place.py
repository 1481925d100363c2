"""Losses that write into their input, or change how autograd sees it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch.torch import Accumulator
from bigbatch.torch import batch as nest

from .training import sgd


class Masked(nn.Module):
    """Writes a parameter into its input, as masked autoencoders and prompt tuning do."""

    def __init__(self, write: Callable[["Masked", Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.token = nn.Parameter(torch.randn(4, dtype=torch.float64))
        self.mix = nn.Linear(4, 4, dtype=torch.float64)
        self.attention = nn.MultiheadAttention(4, 1, dtype=torch.float64)  # its leading axis is time
        self._write = write

    def forward(self, x: Tensor) -> Tensor:
        self._write(self, x)
        rows = torch.tanh(self.mix(x)).transpose(0, 1)
        return x + self.attention(rows, rows, rows)[0].transpose(0, 1)


def write_first(model: Masked, x: Tensor) -> None:
    x[:, 0] = model.token


def write_where(model: Masked, x: Tensor) -> None:
    x[x[..., 0] > 0] = model.token


def add(model: Masked, x: Tensor) -> None:
    x += model.token


def scale_twice(model: Masked, x: Tensor) -> None:
    x.mul_(model.token).mul_(0.5)


def fill(model: Masked, x: Tensor) -> None:
    x.masked_fill_(x > 0.5, model.token[0])


def write_without_gradient(model: Masked, x: Tensor) -> None:
    with torch.no_grad():
        x[:, 1] *= model.token


def penalise(model: Masked, x: Tensor) -> None:
    x.requires_grad_()


WRITES = [write_first, write_where, add, scale_twice, fill, write_without_gradient, penalise]


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x = torch.randn(11, 3, 4, dtype=torch.float64)
    return x, torch.randn_like(x)


def loss(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch.values() if isinstance(batch, dict) else batch
    error = F.mse_loss(model(x), y)
    if x.is_leaf and x.requires_grad:  # a gradient penalty
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return error + slope.square().mean()
    return error


@pytest.mark.parametrize("size", [1, 3, 10, 11, 20])  # 3 is also the number of time steps
@pytest.mark.parametrize("write", WRITES)
def test_a_loss_that_writes_into_its_input(write: Callable[[Masked, Tensor], Any], size: int) -> None:
    full, ours = Masked(write), Masked(write)
    optimizer, accumulator = sgd(full), Accumulator(ours, sgd(ours), loss, size)
    for batch in (data(), dict(zip("xy", data(), strict=True))):
        optimizer.zero_grad()
        again: Any = nest.map_tensors(torch.clone, batch)
        value = loss(full, again)
        value.backward()
        optimizer.step()
        assert accumulator.step(batch).loss == pytest.approx(value.item(), rel=1e-12)
        for p, q in zip(ours.parameters(), full.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-11, atol=1e-13)
        for tensor, whole in zip(nest.tensors(batch), nest.tensors(again), strict=True):
            # the loss has written into the user's batch, as with the full batch
            torch.testing.assert_close(tensor, whole.detach(), rtol=1e-11, atol=1e-13)
            assert tensor.grad_fn is None
            assert not tensor.requires_grad


def test_batch_with_requires_grad_gets_its_gradient() -> None:
    x, y = data()
    x.requires_grad_()
    model = Masked(lambda *_: None)
    loss_of_all = F.mse_loss(model(x), y)
    (expected,) = torch.autograd.grad(loss_of_all, x)
    Accumulator(model, sgd(model), lambda m, b: F.mse_loss(m(b[0]), b[1]), 4).step((x, y))
    torch.testing.assert_close(x.grad, expected, rtol=1e-12, atol=1e-15)


def test_micro_batches_share_memory_with_the_batch() -> None:
    x, y = data()
    parts, _ = nest.cut((x, y), 4)
    assert all(part[0].untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for part in parts)


def test_negative_control_views_cannot_be_written_into() -> None:
    model = Masked(write_first)
    with pytest.raises(RuntimeError, match="view"):
        loss(model, tuple(t.split(4)[0] for t in data()))
