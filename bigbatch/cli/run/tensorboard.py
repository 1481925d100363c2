"""TensorBoard's event files, by its own writer."""

import math
from collections.abc import Mapping
from pathlib import Path

from ...core.errors import MissingExtraError


class EventFile:
    """One scalar a step for each figure."""

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise MissingExtraError('--tensorboard needs tensorboard: pip install "bigbatch[tensorboard]"') from error
        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder))

    def add(self, step: int, figures: Mapping[str, float | None]) -> None:
        values = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in figures.items()
            if value is not None and math.isfinite(value)
        ]
        self._writer.add_event(self._event(step=step, summary=self._summary(value=values)))

    def close(self) -> None:
        self._writer.close()
