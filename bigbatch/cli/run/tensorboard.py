"""TensorBoard event files, written by TensorBoard's own writer."""

import math
from pathlib import Path

from ...core.errors import MissingExtraError
from ..summary import Record


class EventFile:
    """An event file with the loss, the gradient norm and the learning rate of each step.

    Args:
        folder: Where to write it.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise MissingExtraError('--tensorboard needs tensorboard: pip install "bigbatch[tensorboard]"') from error
        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder))

    def add(self, record: Record) -> None:
        figures = {"loss": record.loss, "grad_norm": record.grad_norm, "lr": record.lr}
        values = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in figures.items()
            if value is not None and math.isfinite(value)
        ]
        self._writer.add_event(self._event(step=record.step + 1, summary=self._summary(value=values)))

    def close(self) -> None:
        self._writer.close()
