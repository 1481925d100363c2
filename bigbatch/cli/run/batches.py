"""The batches of a run, which draw from random numbers of their own."""

from collections.abc import Iterator
from typing import Any

from ...core.errors import BatchError
from ..config import Config
from ..task import Task
from .randomness import Stream

_OWN_SEQUENCE = 2**31
"""Added to the seed: batches and weights drawn from the same numbers would have something in common."""


class Batches:
    """The batches of one epoch, each with whether it is the last. Iterate again for the next epoch.

    The batch that follows is drawn before one is given out: how else would one know which is the last. Nobody notices
    what batches draw, and they do not notice what a model draws, so they can be repeated without the steps between.

    Args:
        task: The task that has them.
        config: Its batch size and seed.
    """

    def __init__(self, task: Task, config: Config) -> None:
        self.task = task
        self.stream = Stream((config.seed + _OWN_SEQUENCE) % 2**32)
        self._options = {"batch_size": config.batch_size, "seed": config.seed}
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[tuple[Any, bool]]:
        drawn = self._drawn()
        try:
            batch = next(drawn)
        except StopIteration:
            raise BatchError(f"batches() of {self.task.name} gave 0 batches in epoch {self._epoch + 1}") from None
        for following in drawn:
            yield batch, False
            batch = following
        yield batch, True

    def _drawn(self) -> Iterator[Any]:
        drawn = self.task.epoch(epoch=self._epoch, **self._options)
        while True:
            with self.stream.flowing():
                try:
                    batch = next(drawn)
                except StopIteration:
                    return
            yield batch
