"""The batches of a run, with random numbers of their own."""

from collections.abc import Iterator
from typing import Any

from ...core.errors import BatchError
from ..config import Config
from ..task import Task
from .randomness import Stream

_SEED_OFFSET = 2**31
"""Added to the seed, so that batches and initial weights are not drawn from the same numbers."""


class Batches:
    """The batches of one epoch, each with whether it is the last. Iterate again for the next epoch.

    Batches draw from a stream of random numbers that the model does not share, so they can be repeated without
    repeating the steps between them. Each batch is drawn one ahead, to know which one is the last.
    """

    def __init__(self, task: Task, config: Config) -> None:
        self.task = task
        self.stream = Stream((config.seed + _SEED_OFFSET) % 2**32)
        self._options = {"batch_size": config.batch_size, "seed": config.seed}
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[tuple[Any, bool]]:
        drawn = self._draw()
        try:
            batch = next(drawn)
        except StopIteration:
            raise BatchError(f"batches() of {self.task.name} gave 0 batches in epoch {self._epoch + 1}") from None
        for following in drawn:
            yield batch, False
            batch = following
        yield batch, True

    def _draw(self) -> Iterator[Any]:
        batches = self.task.epoch(epoch=self._epoch, **self._options)
        while True:
            with self.stream.active():
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            yield batch
