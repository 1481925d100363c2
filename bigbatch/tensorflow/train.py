"""The whole job: train over a stream of micro-batches."""

from collections.abc import Iterable
from typing import Any

from ..core.history import History
from ..core.train import check_one_way, run_epochs
from ..core.window import AccumulationSteps
from .accumulator import Accumulator
from .backward import Loss


def train_with_accumulation(
    model: Any,
    data: Iterable[Any],
    optimizer: Any,
    loss: Loss,
    accumulation_steps: AccumulationSteps | None = None,
    epochs: int = 1,
    *,
    micro_batch_size: int | None = None,
    **options: Any,
) -> History:
    """Trains on windows of micro-batches, or on batches, and returns the history.

    Stands for

        for epoch in range(epochs):
            for window in windows(data, accumulation_steps):
                accumulator.step(window)

    where `data` gives micro-batches; or, with `micro_batch_size` in place of `accumulation_steps`, where it gives the
    batches that you want, for

        for epoch in range(epochs):
            for batch in data:
                accumulator.step(batch)

    The accumulator gets the other options: `weight`, `clip_norm` and so on. `data` has to give the same again each
    time it is iterated: a list, a tf.data.Dataset, not a generator. With on_nonfinite="stop" the run ends with the
    first step that is not finite.
    """
    check_one_way(accumulation_steps, micro_batch_size)
    accumulator = Accumulator(model, optimizer, loss, micro_batch_size, **options)
    return run_epochs(accumulator.step, data, accumulation_steps, epochs, is_stopped=lambda: accumulator.is_stopped)
