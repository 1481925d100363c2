"""Makes an epoch of `fit` yield windows of micro-batches instead of single batches.

Keras's own iterator decides when an epoch ends: by `steps_per_epoch`, by the number of batches, or because the data ran
out. It is only read ahead, so that is right for data of any kind, generators of unknown length included.
"""

from collections.abc import Iterator
from typing import Any

_END: tuple[int, int, Any] = (0, 0, None)
"""After the last batch of an epoch."""


class Window(list[Any]):
    """The micro-batches of one step, as the data of `fit` yield them."""


def group(epoch_iterator: Any, accumulation_steps: int) -> None:
    """From now on an epoch of `epoch_iterator` consists of windows. The last one may be short; none spans two epochs.

    Replaces a private method of Keras's EpochIterator (3.15), on this one object:

        for step, step, data in enumerate_iterator():               # a batch each
            yield step, step, data

    becomes

        for steps in every(accumulation_steps, enumerate_iterator()):
            yield first step, last step, Window(next(data) for each of the steps)
    """
    plain = epoch_iterator._enumerate_iterator
    is_torch = epoch_iterator.__class__.__name__ == "TorchEpochIterator"  # it yields lists of data, not iterators

    def windows() -> Iterator[tuple[int, int, Any]]:
        steps = plain()
        has_more = True
        while has_more:
            window, first, last = Window(), 0, 0
            while len(window) < accumulation_steps:
                step, _, data = next(steps, _END)
                if data is None:
                    has_more = False
                    break
                try:
                    window.append(next(data))
                except StopIteration:
                    _run_out(epoch_iterator)
                    has_more = False
                    break
                first, last = (step if len(window) == 1 else first), step
            if window:
                yield first, last, iter([window]) if is_torch else window

    epoch_iterator._enumerate_iterator = windows


def _run_out(epoch_iterator: Any) -> None:
    """Does what Keras does if the data run out before an epoch is over."""
    with epoch_iterator.catch_stop_iteration():
        raise StopIteration
