"""Groups a stream of micro-batches into windows, and says where a batch is cut."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, pairwise
from typing import Any, Generic, TypeVar, overload

from .errors import BatchError
from .options import positive
from .weight import is_number

T = TypeVar("T")
AccumulationSteps = int | Callable[[int], int]


class Window(Sequence[T], Generic[T]):
    """The micro-batches that make up one step, in order.

    Args:
        micro_batches: Any iterable.
    """

    __slots__ = ("_micro_batches",)

    def __init__(self, micro_batches: Iterable[T]) -> None:
        self._micro_batches = tuple(micro_batches)

    def __len__(self) -> int:
        return len(self._micro_batches)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> "Window[T]": ...
    def __getitem__(self, index: int | slice) -> "T | Window[T]":
        picked = self._micro_batches[index]
        return Window(picked) if isinstance(index, slice) else picked  # type: ignore[arg-type, return-value]

    def __repr__(self) -> str:
        return f"Window of {len(self)} micro-batches"


class windows(Generic[T]):  # noqa: N801 - reads as the function that it stands for, like `range`
    """Groups a stream of micro-batches into windows; the last one may be shorter. Stands for

        window = []
        for micro_batch in stream:
            window.append(micro_batch)
            if len(window) == accumulation_steps:
                yield window
                window = []
        if window:
            yield window

    Args:
        iterable: The micro-batches. If it can be iterated again, so can this.
        accumulation_steps: The number of micro-batches in a window, or a function of the step number (a batch-size
            ramp).
        first_step: The first step number. It counts on when this is iterated again, epoch after epoch.
    """

    def __init__(self, iterable: Iterable[T], accumulation_steps: AccumulationSteps, *, first_step: int = 0) -> None:
        if not callable(accumulation_steps):
            positive("accumulation_steps", accumulation_steps)
        self.iterable = iterable
        self._accumulation_steps = accumulation_steps
        self.next_step = first_step

    def __iter__(self) -> Iterator[Window[T]]:
        stream = iter(self.iterable)
        for first in stream:
            num = steps_at(self._accumulation_steps, self.next_step)
            self.next_step += 1
            yield Window(chain([first], islice(stream, num - 1)))

    def __len__(self) -> int:
        if callable(self._accumulation_steps):
            raise TypeError("windows of a varying number of micro-batches have no length")
        return -(-len(self.iterable) // self._accumulation_steps)  # type: ignore[arg-type]


def check_lists(batch: Any, num_samples: int) -> None:
    """Raises BatchError for a list with one number per sample: it is not cut, but probably should be."""
    if type(batch) is list and len(batch) == num_samples > 1 and all(map(is_number, batch)):
        raise BatchError(
            f"a list of {num_samples} numbers is passed whole to every micro-batch, and there are as many samples: "
            "pass an array if it is part of the batch, or a tuple if it is not"
        )
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    for part in parts:
        check_lists(part, num_samples)


def stream_of(data: Any) -> Any:
    """The micro-batches that windows are made of; the data itself if it has no windows."""
    return data.iterable if isinstance(data, windows) else data


def steps_at(accumulation_steps: AccumulationSteps, step: int) -> int:
    """The number of micro-batches in the window of this step."""
    if callable(accumulation_steps):
        return positive(f"accumulation_steps({step})", accumulation_steps(step))
    return accumulation_steps


@functools.lru_cache
def cuts(batch_size: int, micro_batch_size: int, *, avoid_single_sample: bool = False) -> tuple[slice, ...]:
    """Where a batch is cut into micro-batches: all are full but the last, which has the rest.

    TensorFlow cuts at the same places in its graphs. JAX's micro-batches have these sizes but take strided samples.

    Args:
        batch_size: The number of samples.
        micro_batch_size: The size of a full micro-batch.
        avoid_single_sample: Whether a last micro-batch of one sample gets a second one from the micro-batch before, if
            that has more than two: BatchNorm has no statistics of a single sample.
    """
    stops = [*range(micro_batch_size, batch_size, micro_batch_size), batch_size]
    if avoid_single_sample and len(stops) > 1 and batch_size % micro_batch_size == 1 and micro_batch_size > 2:
        stops[-2] -= 1
    return tuple(slice(start, stop) for start, stop in pairwise([0, *stops]))


def rank_slices(batch_size: int, num_ranks: int) -> list[slice]:
    """Each rank's part of a batch, as even as possible. If the batch is small, some ranks have nothing."""
    ends = [-(-batch_size * rank // num_ranks) for rank in range(num_ranks + 1)]
    return [slice(start, stop) for start, stop in pairwise(ends)]
