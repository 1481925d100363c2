"""A loop over epochs of batches that can be stopped anywhere and taken up again."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from . import random
from .checkpoint import Every, Store
from .errors import OptionError, StateError
from .step import History
from .tree import Array, as_array
from .window import positive

Item = TypeVar("Item")
HISTORY = "history.jsonl"


class Resumable:
    """What the checkpoints of all frameworks have in common: the place in the data, random numbers, the history.

    A child says what the state is: `_state()`, and `_load(state, files)`, which changes all of it or nothing.
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
        self.num_batches = 0
        """How many batches are done, of all epochs."""
        self.epoch = self.place = 0
        """The epoch, and how many of its batches are done."""
        self._at_epoch: Any = None
        self._now: Any = None
        self._data: Any = None
        self._is_restored = False

    # --- the framework's -----------------------------------------------------------------------------------

    def _state(self) -> tuple[Any, Mapping[str, bytes]]:
        """What is trained: a tree, and files."""
        raise NotImplementedError

    def _load(self, state: Any, files: Mapping[str, bytes]) -> None:
        raise NotImplementedError

    def _random(self, data: Any) -> dict[str, Any]:
        """Where random numbers are."""
        return random.state()

    def _set_random(self, found: dict[str, Any], data: Any) -> None:
        random.restore(found)

    # --- saving --------------------------------------------------------------------------------------------

    def save(self, *, wait: bool = False) -> None:
        """A checkpoint now: copied at once, written while training goes on."""
        trained, files = self._state()
        state = {
            "trained": trained,
            "place": [self.epoch, self.place, self.num_batches],
            "random": self._random(self._data),
            "random_of_epoch": self._at_epoch,
        }
        own = {} if self.history is None else {HISTORY: self.history.to_lines()}
        self._store.save(self.num_batches, state, {**files, **own}, wait=wait)
        self._every.saved(self.num_batches)

    def _restore(self) -> bool:
        """Takes up the newest checkpoint that is whole; False if there is none."""
        self._is_restored = True
        found = self._store.load()
        if found is None:
            return False
        try:
            state = found.state
            epoch, place, num_batches = state["place"]
            steps = None if self.history is None else History.from_lines(found.files.get(HISTORY, b""), found.path)
            self._load(state["trained"], found.files)
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, StateError):
                raise
            raise StateError(f"{found.path} is no checkpoint of such a run: {error!r}") from error
        self.epoch, self.place, self.num_batches = epoch, place, num_batches
        self._at_epoch, self._now = state["random_of_epoch"], state["random"]
        if steps is not None and self.history is not None:
            self.history.become(steps)
        if self._at_epoch is None:  # saved by hand, in a loop of the user's
            self._set_random(self._now, None)
        self._every.saved(num_batches)
        return True

    def wait(self) -> None:
        """Until what is being written is on the disk."""
        self._store.wait()

    def close(self) -> None:
        """Waits, and lets others have the folder."""
        self._store.close()

    def __enter__(self) -> "Resumable":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    # --- the loop ------------------------------------------------------------------------------------------

    def batches(self, data: Iterable[Item], epochs: int = 1) -> Iterator[Item]:
        """The batches of all epochs that are still to be done, in the order that they would have had.

            for batch in checkpoints.batches(loader, epochs=10):
                accumulator.step(batch)

        A checkpoint is taken after a batch when it is due, and one at the end. Whoever draws the order, or the
        batches, from the global random numbers gets the same ones again: those of the epoch's beginning are kept.
        """
        positive("epochs", epochs)
        if iter(data) is data:
            raise OptionError(
                f"data is a {type(data).__name__}, which can be gone through once and not taken up in the middle: "
                "pass something that can be iterated again, such as a list or a data loader"
            )
        self._data = data
        if not self._is_restored:
            self._restore()
        while self.epoch < epochs:
            yield from self._rest_of_epoch(data)
            self.epoch, self.place, self._at_epoch = self.epoch + 1, 0, None
            if self.history is not None:
                self.history.end_epoch()
        self.save(wait=True)

    def _rest_of_epoch(self, data: Iterable[Item]) -> Iterator[Item]:
        self._begin_epoch(data)
        if self._at_epoch is None:
            if self._now is not None:
                self._set_random(self._now, data)
                self._now = None
            self._at_epoch = self._random(data)
        else:
            self._set_random(self._at_epoch, data)
        num_done = self.place
        number = -1
        for number, item in enumerate(data):
            if number >= num_done:
                yield item
                self.place, self.num_batches = number + 1, self.num_batches + 1
                if self._every.is_due(self.num_batches):
                    self.save()
            if number == num_done - 1:  # the last one that was done before
                self._set_random(self._now, data)
                self._now = None
        if number + 1 < num_done:
            raise StateError(
                f"the checkpoint was taken after {num_done} batches of epoch {self.epoch + 1} but data has only "
                f"{number + 1}: go on with the data that it was begun with"
            )

    def _begin_epoch(self, data: Any) -> None:
        """Tells whoever shuffles by the number of the epoch."""
        for part in (data, getattr(data, "sampler", None), getattr(data, "batch_sampler", None)):
            if callable(tell := getattr(part, "set_epoch", None)):
                tell(self.epoch)
