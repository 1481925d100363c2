"""The run folder: the files that a run writes."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from safetensors.numpy import load_file, save

from ...core.checkpoint.files import write_whole
from ...core.checkpoint.loop import HISTORY
from ...core.errors import OptionError
from ...core.json_values import json_line, to_json
from ..config import Config
from ..summary import Record, Summary
from .tensorboard import EventFile

CONFIG, TIMES, SUMMARY, REPORT = "config.toml", "times.jsonl", "summary.json", "report.html"
FULL_BATCH, CHECKPOINTS, _MODEL = "full_batch", "checkpoints", "model.safetensors"


class RunFolder:
    """A run folder. Files are written whole or not at all, except the two that grow by a line per step."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open: dict[str, TextIO] = {}
        self._events: EventFile | None = None

    @classmethod
    def create(cls, path: Path, *, is_resumed: bool = False) -> "RunFolder":
        """Makes the folder; raises OptionError if it has a run that is not resumed."""
        if not is_resumed and any((path / name).exists() for name in (HISTORY, CHECKPOINTS)):
            raise OptionError(f"{path} has a run already: pass another --out, or continue it with --resume {path}")
        path.mkdir(parents=True, exist_ok=True)
        return cls(path)

    def write(self, name: str, text: str) -> None:
        """Writes a text file."""
        write_whole(self.path / name, text.encode())

    def write_config(self, config: Config) -> None:
        self.write(CONFIG, config.as_toml())

    def write_summary(self, summary: Summary) -> None:
        self.write(SUMMARY, json.dumps(to_json(asdict(summary)), indent=2, allow_nan=False) + "\n")

    def add_step(self, record: Record) -> None:
        """Adds a line to the history, and one to the times: the history is the same in every repetition of a run."""
        line = dict(vars(record))
        seconds = line.pop("seconds")
        self._add(HISTORY, line)
        self._add(TIMES, {"step": record.step, "seconds": seconds})
        if self._events is not None:
            self._events.add(record)

    def _add(self, name: str, line: dict[str, Any]) -> None:
        if name not in self._open:
            self._open[name] = (self.path / name).open("a+", encoding="utf-8")
        self._open[name].write(json_line(line))
        self._open[name].flush()

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open = {}
        if self._events is not None:
            self._events.close()

    def history(self) -> bytes:
        """The history so far: that of the open file, if there is one, whose name may lead to another file by now."""
        if HISTORY not in self._open:
            return (self.path / HISTORY).read_bytes()
        self._open[HISTORY].seek(0)  # writing still appends
        return self._open[HISTORY].read().encode()

    def begin_with(self, history: bytes, *, has_events: bool = False) -> None:
        """Writes the history of the checkpoint, and makes the file of times as long: lost times are null."""
        self._events = EventFile(self.path) if has_events else None
        write_whole(self.path / HISTORY, history)
        path = self.path / TIMES
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []  # the last one is empty or cut off
        num_steps = history.count(b"\n")
        lost = "".join(json_line({"step": step, "seconds": None}) for step in range(len(lines), num_steps))
        write_whole(path, b"".join(line + b"\n" for line in lines[:num_steps]) + lost.encode())

    def clear(self) -> None:
        """Removes the files that would keep another run from starting here."""
        for name in (HISTORY, TIMES):
            (self.path / name).unlink(missing_ok=True)
        shutil.rmtree(self.path / CHECKPOINTS, ignore_errors=True)

    def write_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        write_whole(self.path / _MODEL, save({name: np.ascontiguousarray(array) for name, array in weights.items()}))

    def weights(self) -> dict[str, np.ndarray]:
        return dict(load_file(self.path / _MODEL))

    def num_steps(self) -> int:
        """How many steps the history has so far."""
        path = self.path / HISTORY
        return path.read_bytes().count(b"\n") if path.exists() else 0


class ReadOnlyFolder(RunFolder):
    """The run folder on a rank that leaves the writing to rank 0."""

    def write(self, name: str, text: str) -> None:
        pass

    def add_step(self, record: Record) -> None:
        pass

    def begin_with(self, history: bytes, *, has_events: bool = False) -> None:
        pass
