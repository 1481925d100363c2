"""Epochs of windows over a stream of micro-batches."""

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

from .errors import BatchError
from .step import History, Step
from .window import AccumulationSteps, Window, positive, windows


def run_epochs(
    step: Callable[[Window[Any]], Step],
    data: Iterable[Any],
    accumulation_steps: AccumulationSteps,
    epochs: int,
    flushed: Callable[[], Iterable[Step]] = tuple,
    is_stopped: Callable[[], bool] = lambda: False,
) -> History:
    """Feeds every window of every epoch to `step`; refuses a stream that is spent before the end.

    `flushed` makes the steps that are left at the end of an epoch, those of other ranks too. The step after which
    `is_stopped` says so is the last.
    """
    positive("epochs", epochs)
    if epochs > 1 and iter(data) is data:
        raise BatchError(
            f"data is a {type(data).__name__}, which is spent after 1 of {epochs} epochs: "
            "pass something that can be iterated again, such as a list or a data loader"
        )
    history = History()
    stream = windows(data, accumulation_steps)
    for epoch in range(epochs):
        before = len(history)
        for made in chain(map(step, stream), _late(flushed)):
            history.append(made)
            if is_stopped():
                return history
        stream.next_step = len(history)
        if len(history) == before:
            raise BatchError(
                f"data gave 0 micro-batches in epoch {epoch + 1} of {epochs}: pass something that is not empty and "
                "can be iterated again, such as a list or a data loader"
            )
        history.end_epoch()
    return history


def _late(flushed: Callable[[], Iterable[Step]]) -> Iterable[Step]:
    """Asked for only once everything before is done."""
    yield from flushed()
