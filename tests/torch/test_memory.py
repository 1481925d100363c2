"""Training needs the memory of one micro-batch, however many there are."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.memory import peak_bytes
from bigbatch import Window
from bigbatch.torch import Accumulator


def make() -> tuple[Accumulator, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())))
    batch = torch.randn(512, 64), torch.randn(512, 64)
    return Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, 32), batch


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def test_peak_memory_does_not_grow_with_the_number_of_micro_batches() -> None:
    accumulator, (x, y) = make()
    micro_batch = x[:128], y[:128]
    accumulator.step(Window([micro_batch] * 2))
    few, many = (peak_bytes(lambda: accumulator.step(Window([micro_batch] * num))) for num in (2, 64))  # noqa: B023
    assert many <= 1.02 * few


def test_peak_memory_does_not_grow_one_micro_batch_at_a_time() -> None:
    accumulator, (x, y) = make()
    accumulator.accumulation_steps = 1000

    def feed(num: int) -> None:
        for _ in range(num):
            with accumulator.micro_batch(weight=128) as micro:
                micro.backward(loss(accumulator.model, (x[:128], y[:128])))
        accumulator.flush()

    feed(2)
    assert peak_bytes(lambda: feed(64)) <= 1.02 * peak_bytes(lambda: feed(2))


def test_memory_holds_the_activations_of_one_micro_batch() -> None:
    accumulator, batch = make()
    accumulator.step(batch)

    def full() -> None:
        loss(accumulator.model, batch).backward()
        accumulator.optimizer.zero_grad()

    assert peak_bytes(lambda: accumulator.step(batch)) < peak_bytes(full) / 4
