"""The whole training loop in one call."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ..core.epochs import OnStep, check_one_way, run_epochs
from ..core.history import History
from ..core.window import AccumulationSteps
from .accumulator import Accumulator
from .backward import Loss


def train_with_accumulation(
    model: nn.Module,
    data: Iterable[Any],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    loss: Loss,
    accumulation_steps: AccumulationSteps | None = None,
    epochs: int = 1,
    *,
    micro_batch_size: int | None = None,
    on_step: OnStep | None = None,
    **options: Any,
) -> History:
    """Trains for some epochs and returns the history. With `accumulation_steps` it replaces the loop

        accumulator = Accumulator(model, optimizer, loss)
        for epoch in range(epochs):
            for window in windows(data, accumulation_steps):    # data yields micro-batches
                history.append(accumulator.step(window))

    and with `micro_batch_size` the loop

        accumulator = Accumulator(model, optimizer, loss, micro_batch_size)
        for epoch in range(epochs):
            for batch in data:                                  # data yields the batches that you want
                history.append(accumulator.step(batch))

    Args:
        model: The model, already on its device.
        data: Micro-batches or batches, the same ones each time it is iterated: a list or a DataLoader, not a generator.
        optimizer: An optimizer that holds the model's parameters, or a list of several.
        loss: `loss(model, micro_batch)` returns the mean over the micro-batch.
        accumulation_steps: The number of micro-batches in a window, or a function of the step number.
        epochs: Number of passes over the data.
        micro_batch_size: The number of samples in a micro-batch, in place of `accumulation_steps`.
        on_step: `on_step(step)` is called after each step: `bigbatch.TensorBoard(folder)`, or a function that logs. An
            exception in it ends the training.
        **options: The other options of `Accumulator`: the weight, clipping, a schedule and so on. If the accumulator
            stops at a step that is not finite, that step is the last of the history.
    """
    check_one_way(accumulation_steps, micro_batch_size)
    accumulator = Accumulator(
        model, optimizer, loss, micro_batch_size, accumulation_steps=accumulation_steps, **options
    )
    return run_epochs(
        accumulator.step, data, accumulation_steps, epochs, accumulator.flushed, lambda: accumulator.is_stopped, on_step
    )
