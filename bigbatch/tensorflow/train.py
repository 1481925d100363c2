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
    the same again each time it is iterated: a list, a tf.data.Dataset, not a generator. With on_nonfinite="stop"
    the run ends with the first step that is not finite.
    """
    accumulator = Accumulator(model, optimizer, loss, **options)
    return run_epochs(accumulator.step, data, accumulation_steps, epochs, is_stopped=lambda: accumulator.is_stopped)
