"""The whole job: train over a stream of micro-batches."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..core.step import History
from ..core.train import run_epochs
from ..core.window import AccumulationSteps
from .accumulator import Accumulator
from .passes import Loss


def train_with_accumulation(
    model: nn.Module,
    data: Iterable[Any],
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    accumulation_steps: AccumulationSteps,
    epochs: int = 1,
    **options: Any,
) -> History:
    """Trains on windows of micro-batches and returns the history.

    Stands for

        for epoch in range(epochs):
            for window in windows(data, accumulation_steps):
                accumulator.step(window)

    with an accumulator that gets the other options: `weight`, `clip_norm`, `scheduler` and so on. `data` gives
    micro-batches, and the same again each time it is iterated: a list, a DataLoader, not a generator.
    With `on_nonfinite="stop"` the history ends with the step whose gradient or loss was not finite.
    """
    accumulator = Accumulator(model, optimizer, loss, accumulation_steps=accumulation_steps, **options)
    return run_epochs(
        accumulator.step,
        data,
        accumulation_steps,
        epochs,
        accumulator.flushed,
        lambda: accumulator.is_stopped,
    )
