"""`TensorBoard`: writes the figures of each step into an event file, with TensorBoard's own writer."""

import math
import os
import weakref
from collections.abc import Mapping

from .errors import MissingExtraError
from .step import Step


class TensorBoard:
    """Writes the loss, the gradient norm and the metrics of each step into an event file for TensorBoard.

        log = TensorBoard("runs/first")
        train_with_accumulation(model, loader, optimizer, loss, 4, on_step=log)

    or in your own loop

        for batch in loader:
            log(accumulator.step(batch))

    A metric with the name "loss" or "grad_norm" is called `metrics.loss` or `metrics.grad_norm`. A value that is not
    finite is left out. Reading the loss of a step waits until the device has computed it.

    Args:
        folder: Where the event file goes: what `tensorboard --logdir` gets, or a folder in it.
        first_step: How many steps were made before, if a training is continued.
    """

    def __init__(self, folder: str | os.PathLike[str], *, first_step: int = 0) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise MissingExtraError('TensorBoard needs tensorboard: pip install "bigbatch[tensorboard]"') from error
        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(os.fspath(folder))
        self.close = weakref.finalize(self, self._writer.close)
        """Writes what is left and closes the file. This happens by itself at the end of the process."""
        self.num_steps = first_step

    def __call__(self, step: Step) -> None:
        """Writes a step, which counts as the one after the last.

        Args:
            step: What `accumulator.step` returned.
        """
        own = {"loss": step.loss, "grad_norm": step.grad_norm}
        metrics = {f"metrics.{name}" if name in own else name: value for name, value in step.metrics.items()}
        self.add(self.num_steps + 1, {**metrics, **own})

    def add(self, number: int, figures: Mapping[str, float | None]) -> None:
        """Writes figures of your own.

        Args:
            number: The number of the step, from 1.
            figures: The values by name. None, and what is not finite, is left out.
        """
        values = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in figures.items()
            if value is not None and math.isfinite(value)
        ]
        self._writer.add_event(self._event(step=number, summary=self._summary(value=values)))
        self.num_steps = number
