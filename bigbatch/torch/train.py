"""The whole job: train over a stream of micro-batches."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..core.errors import BatchError
from ..core.step import History
from ..core.window import AccumulationSteps, positive, windows
from .accumulator import Accumulator, Loss


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
    """
    positive("epochs", epochs)
    if epochs > 1 and iter(data) is data:
        raise BatchError(
            f"data is a {type(data).__name__}, which is spent after 1 of {epochs} epochs: "
            "pass something that can be iterated again, such as a list or a DataLoader"
        )
    accumulator = Accumulator(model, optimizer, loss, accumulation_steps=accumulation_steps, **options)
    history = History()
    stream = windows(data, accumulation_steps)
    for epoch in range(epochs):
        before = len(history)
        for window in stream:
            history.append(accumulator.step(window))
        if len(history) == before:
            raise BatchError(
                f"data gave 0 micro-batches in epoch {epoch + 1} of {epochs}: pass something that is not "
                "empty and can be iterated again, such as a list or a DataLoader"
            )
        history.end_epoch()
    return history
