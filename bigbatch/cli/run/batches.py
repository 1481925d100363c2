"""The batches of a run, epoch by epoch, and the place in them."""

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from ..config import Config
from ..task import Task
from .randomness import Stream

Item = TypeVar("Item")
OWN_SEQUENCE = 2**31
"""Added to the seed: batches and weights drawn from the same numbers would have something in common."""


class Batches:
    """They draw from random numbers of their own, so that they can be gone through again without the steps between.

    for batch, is_last in batches.rest_of_epoch():
        …
        batches.done(is_last)
    """

    def __init__(self, task: Task, config: Config) -> None:
        self.task = task
        self.options = {"batch_size": config.batch_size, "seed": config.seed}
        self.epoch = self.place = 0
        self._stream = Stream((config.seed + OWN_SEQUENCE) % 2**32)
        self._start = self._stream.state

    def rest_of_epoch(self) -> Iterator[tuple[Any, bool]]:
        """The batches of the epoch that are not done, each with whether it is the last.

        The one that follows is drawn already when a batch is given: how else would one know.
        """
        num_done = self.place
        self._stream.state = self._start
        for place, batch in enumerate(marked(self._drawn())):
            if place >= num_done:
                yield batch

    def _drawn(self) -> Iterator[Any]:
        drawn = self.task.epoch(epoch=self.epoch, **self.options)
        while True:
            with self._stream.flowing():
                try:
                    batch = next(drawn)
                except StopIteration:
                    return
            yield batch

    def done(self, is_last: bool) -> None:
        self.epoch, self.place = (self.epoch + 1, 0) if is_last else (self.epoch, self.place + 1)
        if is_last:
            self._start = self._stream.state

    def state(self) -> dict[str, Any]:
        """The place, and the random numbers at the beginning of its epoch."""
        return {"epoch": self.epoch, "place": self.place, "start": self._start}

    def load(self, state: dict[str, Any]) -> None:
        self.epoch, self.place = state["epoch"], state["place"]
        self._start = state["start"]


def marked(items: Iterable[Item]) -> Iterator[tuple[Item, bool]]:
    """Every item, and whether it is the last."""
    iterator = iter(items)
    for item in iterator:
        for following in iterator:
            yield item, False
            item = following
        yield item, True
