"""The same step, written in different ways. All start from the whole batch in memory.

Each function gets its own model and returns a function that makes one step.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bigbatch import Window
from bigbatch.torch import Accumulator

from .work import Batch, Step, Work

Make = Callable[[nn.Module, Work], Step]


def full_batch(model: nn.Module, work: Work) -> Step:
    optimizer = work.optimizer(model)

    def step() -> Tensor:
        with work.autocast():
            loss = work.loss(model, work.batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def by_hand(model: nn.Module, work: Work) -> Step:
    optimizer = work.optimizer(model)

    def step() -> Tensor:
        total = torch.zeros((), device=work.device)
        for micro_batch in work.micro_batches():
            with work.autocast():
                loss = work.loss(model, micro_batch) / work.num_micro_batches
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def by_tutorial(model: nn.Module, work: Work) -> Step:
    """The loop of many tutorials: it reads the loss of every micro-batch, which waits for the device."""
    optimizer = work.optimizer(model)

    def step() -> float:
        total = 0.0
        for micro_batch in work.micro_batches():
            with work.autocast():
                loss = work.loss(model, micro_batch) / work.num_micro_batches
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def by_moving(model: nn.Module, work: Work) -> Step:
    """Micro-batches in host memory, each moved to the device when it is needed."""

    def loss(model: nn.Module, micro_batch: Batch) -> Tensor:
        return work.loss(model, tuple(tensor.to(work.device) for tensor in micro_batch))

    return by_hand(model, replace(work, loss=loss))


def by_accelerate(model: nn.Module, work: Work) -> Step:
    from accelerate import Accelerator

    accelerator = Accelerator(
        gradient_accumulation_steps=work.num_micro_batches,
        mixed_precision=work.precision or "no",
        cpu=work.device == "cpu",
    )
    model, optimizer = accelerator.prepare(model, work.optimizer(model))

    def step() -> None:
        for micro_batch in work.micro_batches():
            with accelerator.accumulate(model):
                accelerator.backward(work.loss(model, micro_batch))
                optimizer.step()
                optimizer.zero_grad()

    return step


def accumulator_of(model: nn.Module, work: Work, **options: Any) -> Accumulator:
    return Accumulator(
        model, work.optimizer(model), work.loss, work.micro_batch_size, precision=work.precision, **options
    )


def bigbatch_batch(model: nn.Module, work: Work, **options: Any) -> Step:
    accumulator = accumulator_of(model, work, **options)
    return lambda: accumulator.step(work.batch)


def bigbatch_captured(model: nn.Module, work: Work) -> Step:
    return bigbatch_batch(model, work, capture=True)


def bigbatch_window(model: nn.Module, work: Work) -> Step:
    accumulator = Accumulator(model, work.optimizer(model), work.loss, precision=work.precision)
    return lambda: accumulator.step(Window(work.micro_batches()))


def bigbatch_micro_batch(model: nn.Module, work: Work) -> Step:
    accumulator = Accumulator(
        model, work.optimizer(model), accumulation_steps=work.num_micro_batches, precision=work.precision
    )

    def step() -> None:
        for micro_batch in work.micro_batches():
            with accumulator.micro_batch(weight=len(micro_batch[0])) as micro:
                micro.backward(work.loss(model, micro_batch))

    return step


def compiled(make: Make) -> Make:
    return lambda model, work: make(model, with_compiled_loss(work))


def with_compiled_loss(work: Work) -> Work:
    """Compiles the loss for fixed shapes."""
    backend = "inductor" if work.device == "cuda" else "eager"  # on a CPU this only tests that it runs
    return replace(work, loss=torch.compile(work.loss, dynamic=False, backend=backend))
