"""The whole job: train over a stream of micro-batches."""

from collections.abc import Iterable
from typing import Any

from ..core.step import History
from ..core.train import run_epochs
from ..core.window import AccumulationSteps
from .accumulator import Accumulator, Loss


def train_with_accumulation(
    model: Any,
    data: Iterable[Any],
    optimizer: Any,
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

    with an accumulator that gets the other options: `weight`, `clip_norm` and so on. `data` gives micro-batches, and
    the same again each time it is iterated: a list, a tf.data.Dataset, not a generator.
    """
    return run_epochs(Accumulator(model, optimizer, loss, **options).step, data, accumulation_steps, epochs)
