"""A loop over epochs of batches that can be stopped anywhere and continued as if nothing had happened."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from ..errors import BigBatchError, OptionError, StateError
from ..history import History
from ..options import positive
from ..window import stream_of, windows
from . import random
from .schedule import Every
from .serialize import Array, as_array
from .store import Store

_Item = TypeVar("_Item")


class Resumable:
    """What the checkpoints of all frameworks share: the position in the data, random states, the history.

    A framework's class adds what is trained: `_state()` returns it, `_load(state, files)` loads all of it or nothing,
    and `_progress()` shows whether anything was trained.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        every: int | str | None = "10min",
        keep: int = 2,
        history: History | None = None,
        to_array: Callable[[Any], Array | None] = as_array,
        from_array: Callable[[Array], Any] = Array.numpy,
    ) -> None:
        self._every = Every(every)
        self._store = Store(folder, keep=keep, to_array=to_array, from_array=from_array)
        self.history = history
        self.num_batches = 0  # finished batches of all epochs
        self.epoch = self.place = 0  # the current epoch, and the number of its finished batches
        self._at_epoch: Any = None  # random state at the start of the current epoch; None between epochs
        self._at_batch: Any = None  # random state just before the current batch was read
        self._now: Any = None  # random state to restore once the finished batches are skipped; None if none is pending
        self._before: Any = None  # `_progress()` before the current batch; None if there is no current batch
        self._data: Any = None
        self._is_restored = False
        self.saved_lines = b""  # the history in the checkpoint that was loaded

    # --- what a framework adds -----------------------------------------------------------------------------

    def _state(self) -> tuple[Any, Mapping[str, bytes]]:
        """What is trained: a tree, and files."""
        raise NotImplementedError

    def _load(self, state: Any, files: Mapping[str, bytes]) -> None:
        raise NotImplementedError

    def _progress(self) -> Any:
        """A value that changes with every batch that is trained on. Does not wait for a device."""
        raise NotImplementedError

    def _random(self, data: Any) -> dict[str, Any]:
        """The random state, and the step number of `windows`, whose length may depend on it."""
        return {**random.state(), "step": data.next_step if isinstance(data, windows) else None}

    def _set_random(self, found: dict[str, Any], data: Any) -> None:
        random.restore(found)
        if isinstance(data, windows) and found["step"] is not None:
            data.next_step = found["step"]

    def _lines_from(self, first: int) -> tuple[Sequence[str], str]:
        """The lines of the history from this number on, and the last one, which may still change."""
        return ([], "") if self.history is None else self.history.lines_from(first)

    # --- saving --------------------------------------------------------------------------------------------

    def save(self, *, wait: bool = False) -> None:
        """Saves a checkpoint now: copies the state at once, and writes it in the background.

        The current batch counts as finished if it was trained on, also after the loop was left.

        Args:
            wait: Whether to wait until the checkpoint is written, and raise an error if it cannot be.
        """
        self._count_if_trained()
        self._every.saved(self.num_batches)
        try:
            trained, files = self._state()
        except OSError as error:  # from a framework that writes its state itself
            if wait:
                raise
            self._store.warn_not_written(error)
            return
        state = {
            "trained": trained,
            "place": [self.epoch, self.place, self.num_batches],
            "random": self._random(self._data),
            "random_of_epoch": self._at_epoch,
            "random_of_batch": None if self._before is None else self._at_batch,
        }
        new, last = self._lines_from(self._store.num_lines)
        state = {**state, "last_line": last}
        self._store.save(self.num_batches, state, files, new_lines="".join(new).encode(), wait=wait)

    def _restore(self) -> bool:
        """Loads the newest intact checkpoint; returns False if there is none."""
        self._is_restored = True
        found = self._store.load()
        if found is None:
            return False
        try:
            state = found.state
            epoch, place, num_batches = map(int, state["place"])
            at_epoch, at_batch, now = state["random_of_epoch"], state["random_of_batch"], state["random"]
            lines = found.log + state["last_line"].encode()
            steps = History.from_lines(lines, found.path)
            self._check_random(at_epoch, at_batch, now)
            self._load(state["trained"], found.files)
        except BigBatchError:
            raise
        except Exception as error:  # a checkpoint of something else may hold anything
            raise StateError(f"{found.path} is not a checkpoint of this kind of run: {error!r}") from error
        self.epoch, self.place, self.num_batches = epoch, place, num_batches
        self._at_epoch, self._at_batch, self._now, self._before = at_epoch, at_batch, now, None
        self.saved_lines = lines
        if self.history is not None:
            self.history.become(steps)
        if self._at_epoch is None:  # saved by hand, outside of batches()
            self._set_random(self._now, None)
        self._every.saved(num_batches)
        return True

    def _check_random(self, *states: Any) -> None:
        """Raises an error if a random state cannot be restored, and leaves the random state as it is."""
        own = self._random(None)
        try:
            for state in states:
                if state is not None:
                    self._set_random(state, None)
        finally:
            self._set_random(own, None)

    def wait(self) -> None:
        """Waits until the last checkpoint is written."""
        self._store.wait()

    def close(self) -> None:
        """Waits until the last checkpoint is written, and lets other processes use the folder."""
        self._store.close()

    def __enter__(self) -> "Resumable":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    # --- the loop ------------------------------------------------------------------------------------------

    def batches(self, data: Iterable[_Item], epochs: int = 1) -> Iterator[_Item]:
        """The unfinished batches of all epochs, in their original order.

            for batch in checkpoints.batches(loader, epochs=10):
                accumulator.step(batch)

        A checkpoint is saved after a batch when it is due, and at the end. Data that draws its order or its batches
        from the global random generators gets the same ones again: their state at the start of the epoch is saved.

        Args:
            data: Batches, or `windows` of micro-batches, in a list, a DataLoader or anything else that can be iterated
                again.
            epochs: How many epochs there are, including finished ones.
        """
        positive("epochs", epochs)
        stream = stream_of(data)
        if isinstance(stream, Iterator):  # iter() of a data loader would draw random numbers, and start its workers
            raise OptionError(
                f"data is a {type(stream).__name__}, which can be iterated only once: pass something that can be "
                "iterated again, such as a list or a data loader"
            )
        self._data = data
        if not self._is_restored:
            self._restore()
        elif self._at_epoch is not None and self._now is None:  # this process has left an earlier loop
            self._count_if_trained()
            self._now = self._random(data)
            self._at_batch = None if self._before is None else self._at_batch
        while self.epoch < epochs:
            yield from self._rest_of_epoch(data)
            self.epoch, self.place, self._at_epoch, self._at_batch = self.epoch + 1, 0, None, None
            if self.history is not None:
                self.history.end_epoch()
        self.save(wait=True)

    def _rest_of_epoch(self, data: Iterable[_Item]) -> Iterator[_Item]:
        self._begin_epoch(data)
        if self._at_epoch is None:
            self._continue_random(data)
            self._at_epoch = self._at_batch = self._random(data)
        else:
            self._set_random(self._at_epoch, data)
        num_done = self.place
        number = -1
        for number, item in enumerate(data):
            if number >= num_done:
                self._continue_random(data)  # the batch that was current when it was saved
                self._before = self._progress()
                yield item
                if self._before is not None:  # else save() has counted it
                    self._count()
                if self._every.is_due(self.num_batches) and not self._store.is_writing:
                    self.save()
            elif number == num_done - 1:  # the last finished one
                if self._at_batch is None:
                    self._continue_random(data)
                else:
                    self._set_random(self._at_batch, data)
            if number >= num_done - 1:
                self._at_batch = self._random(data)
        if number + 1 < num_done:
            raise StateError(
                f"the checkpoint was taken after {num_done} batches of epoch {self.epoch + 1} but data has only "
                f"{number + 1}: continue with the data that was used before"
            )

    def _begin_epoch(self, data: Any) -> None:
        """Tells samplers the epoch number, from which they shuffle."""
        data = stream_of(data)
        for part in (data, getattr(data, "sampler", None), getattr(data, "batch_sampler", None)):
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(self.epoch)

    def _continue_random(self, data: Any) -> None:
        """Restores the random state that was saved, once."""
        if self._now is not None:
            self._set_random(self._now, data)
            self._now = None

    def _count_if_trained(self) -> None:
        if self._before is not None and self._before != self._progress():
            self._count()

    def _count(self) -> None:
        """Counts the current batch as finished."""
        self.place, self.num_batches, self._before = self.place + 1, self.num_batches + 1, None
