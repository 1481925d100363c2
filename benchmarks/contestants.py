"""The same step, written in each way. Every one starts from the whole batch in memory.

Each function gets a model of its own and returns what makes one step.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from accelerate import Accelerator
from lightning import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from bigbatch import Window
from bigbatch.torch import Accumulator

Batch = tuple[Tensor, Tensor]
MICRO_BATCH_SIZE = 32
NUM_MICRO_BATCHES = 8
LEARNING_RATE = 0.1


def micro_batches(batch: Batch) -> Iterable[Batch]:
    return zip(*(tensor.split(MICRO_BATCH_SIZE) for tensor in batch), strict=True)


def sgd(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=LEARNING_RATE)


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return cross_entropy(model(x), y)


def full_batch(model: nn.Module, batch: Batch) -> Callable[[], Any]:
    optimizer = sgd(model)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = mean_loss(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def by_hand(model: nn.Module, batch: Batch) -> Callable[[], Any]:
    optimizer = sgd(model)

    def step() -> Tensor:
        total = torch.zeros(())
        optimizer.zero_grad()
        for x, y in micro_batches(batch):
            loss = cross_entropy(model(x), y) / NUM_MICRO_BATCHES
            loss.backward()
            total += loss.detach()
        optimizer.step()
        return total

    return step


def bigbatch_batch(model: nn.Module, batch: Batch) -> Callable[[], Any]:
    accumulator = Accumulator(model, sgd(model), mean_loss, MICRO_BATCH_SIZE)
    return lambda: accumulator.step(batch)


def bigbatch_window(model: nn.Module, batch: Batch) -> Callable[[], Any]:
    accumulator = Accumulator(model, sgd(model), mean_loss)
    return lambda: accumulator.step(Window(micro_batches(batch)))


def bigbatch_micro_batch(model: nn.Module, batch: Batch) -> Callable[[], Any]:
    accumulator = Accumulator(model, sgd(model), accumulation_steps=NUM_MICRO_BATCHES)

    def step() -> None:
        for x, y in micro_batches(batch):
            with accumulator.micro_batch(weight=len(y)) as micro:
                micro.backward(cross_entropy(model(x), y))

    return step


def by_accelerate(model: nn.Module, batch: Batch) -> Callable[[], Any]:
    accelerator = Accelerator(gradient_accumulation_steps=NUM_MICRO_BATCHES, cpu=True)
    model, optimizer = accelerator.prepare(model, sgd(model))

    def step() -> None:
        for x, y in micro_batches(batch):
            with accelerator.accumulate(model):
                accelerator.backward(cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()

    return step


class Module(LightningModule):
    """The model as Lightning wants it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, micro_batch: Batch, _: int) -> Tensor:
        return mean_loss(self.model, micro_batch)

    def configure_optimizers(self) -> SGD:
        return sgd(self)


class Stream:
    """Micro-batches with a length: without one, Lightning asks for the next before it is done with the last."""

    def __init__(self, items: Iterable[Batch], length: int) -> None:
        self.items = items
        self.length = length

    def __iter__(self) -> Any:
        return iter(self.items)

    def __len__(self) -> int:
        return self.length


def lightning_fit(model: nn.Module, stream: Stream) -> None:
    """Lightning owns the loop. `barebones` is its own switch for measuring it: no logger, no progress bar."""
    trainer = Trainer(accelerator="cpu", max_epochs=1, accumulate_grad_batches=NUM_MICRO_BATCHES, barebones=True)
    trainer.fit(Module(model), stream)
