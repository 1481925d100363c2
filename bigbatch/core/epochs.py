"""Epochs of windows over a stream of micro-batches."""

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

from .errors import BatchError, OptionError
from .history import History
from .options import check_callable, positive
from .step import Step
from .window import AccumulationSteps, windows

OnStep = Callable[[Step], Any]


def run_epochs(
    step: Callable[[Any], Step],
    data: Iterable[Any],
    accumulation_steps: AccumulationSteps | None,
    epochs: int,
    flushed: Callable[[], Iterable[Step]] = tuple,
    is_stopped: Callable[[], bool] = lambda: False,
    on_step: OnStep | None = None,
) -> History:
    """Calls `step` with every window of every epoch; returns the history.

    Args:
        step: Takes one step of the optimizer.
        data: Micro-batches, or without `accumulation_steps` the batches themselves.
        accumulation_steps: The number of micro-batches in a window, or a function of the step number.
        epochs: How many times to iterate over the data.
        flushed: Returns the steps that remain at the end of an epoch, including those of other ranks.
        is_stopped: Whether to stop after the step that was just taken.
        on_step: Called with each step once it is in the history.
    """
    check_callable("on_step", on_step)
    positive("epochs", epochs)
    if epochs > 1 and iter(data) is data:
        raise BatchError(
            f"data is a {type(data).__name__}, which is exhausted after 1 of {epochs} epochs: "
            "pass something that can be iterated again, such as a list or a data loader"
        )
    history = History()
    stream: Iterable[Any] = data if accumulation_steps is None else windows(data, accumulation_steps)
    for epoch in range(epochs):
        before = len(history)
        for taken in chain(map(step, stream), flushed()):
            history.append(taken)
            if on_step is not None:
                on_step(taken)
            if is_stopped():
                return history
        if isinstance(stream, windows):
            stream.next_step = len(history)
        if len(history) == before:
            kind = "batches" if accumulation_steps is None else "micro-batches"
            raise BatchError(
                f"data gave 0 {kind} in epoch {epoch + 1} of {epochs}: pass something that is not empty and "
                "can be iterated again, such as a list or a data loader"
            )
        history.end_epoch()
    return history


def check_one_way(accumulation_steps: AccumulationSteps | None, micro_batch_size: int | None) -> None:
    """Raises OptionError unless exactly one of the two is given, since it decides what `data` yields."""
    if (accumulation_steps is None) == (micro_batch_size is None):
        raise OptionError(
            f"accumulation_steps={accumulation_steps!r} and micro_batch_size={micro_batch_size!r}: pass exactly one, "
            "accumulation_steps if data yields micro-batches, or micro_batch_size if it yields batches to cut"
        )
