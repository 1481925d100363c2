"""The run folder: the files that a run writes."""

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from safetensors.numpy import load_file, save

from ...core.checkpoint.files import (
    check_own,
    is_unfinished,
    open_own,
    read_plain,
    remove,
    remove_unfinished,
    write_whole,
)
from ...core.checkpoint.store import LOCK
from ...core.errors import OptionError
from ...core.json_values import json_line, to_json
from ...core.tensorboard import TensorBoard
from ..config import Config
from ..summary import Record, Summary

CONFIG, HISTORY, TIMES, SUMMARY, REPORT = "config.toml", "history.jsonl", "times.jsonl", "summary.json", "report.html"
FULL_BATCH, CHECKPOINTS, MODEL = "full_batch", "checkpoints", "model.safetensors"
FULL_BATCH_CONFIG = "full_batch.toml"  # there only while the full batch trains
_FILES = (CONFIG, HISTORY, TIMES, SUMMARY, REPORT, MODEL)
_UNFINISHED = "|".join(map(re.escape, (*_FILES, FULL_BATCH_CONFIG)))


class RunFolder:
    """A run folder. Files are written whole or not at all, except the two that grow by a line per step.

    Nothing is written through a link, and nothing is removed that bigbatch did not make.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open: dict[str, TextIO] = {}
        self._events: TensorBoard | None = None

    def check_new(self) -> None:
        """Raises OptionError unless all that is in the folder is a lock, and what a killed start has left."""
        if any(os.path.lexists(self.path / name) for name in (CONFIG, HISTORY)) or self._has_checkpoint():
            raise OptionError(
                f"{self.path} has a run already: pass another --out, or continue it with --resume {self.path}"
            )
        if os.path.lexists(self.path) and not self.path.is_dir():
            raise OptionError(f"{self.path} is not a folder: pass another --out")
        check_own(self.path / CHECKPOINTS, is_folder=True)
        found = {path.name for path in self._listed(self.path) if not is_unfinished(path, _UNFINISHED)}
        if others := sorted(found - {CHECKPOINTS}):
            raise OptionError(
                f"{self.path} is not empty, and not a run of bigbatch ({others[0]} is in it), so a run could "
                "overwrite something: pass another --out"
            )

    def _has_checkpoint(self) -> bool:
        return any(path.name != LOCK for path in self._listed(self.path / CHECKPOINTS))

    @staticmethod
    def _listed(folder: Path) -> list[Path]:
        return list(folder.iterdir()) if folder.is_dir() else []

    def check_own(self) -> None:
        """Raises StateError if a link, or something else that bigbatch does not make, has the name of one of ours."""
        for name in _FILES:
            check_own(self.path / name)
        for name in (CHECKPOINTS, FULL_BATCH):
            check_own(self.path / name, is_folder=True)

    def write(self, name: str, text: str) -> None:
        """Writes a text file."""
        write_whole(self.path / name, text.encode())

    def write_config(self, config: Config) -> None:
        self.write(CONFIG, config.as_toml())

    def config(self) -> str:
        """The options of the run, as they were written."""
        return read_plain(self.path / CONFIG).decode()

    def write_summary(self, summary: Summary) -> None:
        self.write(SUMMARY, json.dumps(to_json(asdict(summary)), indent=2, allow_nan=False) + "\n")

    def add_step(self, record: Record) -> str:
        """Adds a line to the history, which it returns, and one to the times, which differ between repetitions."""
        line = {name: value for name, value in vars(record).items() if value or name not in ("metrics", "summed")}
        seconds = line.pop("seconds")
        text = self._add(HISTORY, line)
        self._add(TIMES, {"step": record.step, "seconds": seconds})
        if self._events is not None:
            figures = {"loss": record.loss, "grad_norm": record.grad_norm, "lr": record.lr}
            self._events.add(record.step + 1, {**record.metrics, **figures})
        return text

    def _add(self, name: str, line: dict[str, Any]) -> str:
        if name not in self._open:
            descriptor = open_own(self.path / name, os.O_WRONLY | os.O_APPEND)
            self._open[name] = os.fdopen(descriptor, "a", encoding="utf-8")
        text = json_line(line)
        self._open[name].write(text)
        self._open[name].flush()
        return text

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open = {}
        if self._events is not None:
            self._events.close()

    def begin_with(self, history: bytes, *, has_events: bool = False) -> None:
        """Writes the history of the checkpoint, and makes the file of times as long: lost times are null."""
        remove_unfinished(self.path, _UNFINISHED)
        path = self.path / TIMES
        lines = read_plain(path).split(b"\n")[:-1] if path.exists() else []  # the last one is empty or cut off
        self._events = TensorBoard(self.path) if has_events else None
        write_whole(self.path / HISTORY, history)
        num_steps = history.count(b"\n")
        lost = "".join(json_line({"step": step, "seconds": None}) for step in range(len(lines), num_steps))
        write_whole(path, b"".join(line + b"\n" for line in lines[:num_steps]) + lost.encode())

    def clear(self) -> None:
        """Removes the files of a run that took no step, so that another run can start here."""
        for name in _FILES:
            remove(self.path / name)
        for name in (CHECKPOINTS, FULL_BATCH):
            remove(self.path / name)
        with suppress(OSError):  # there may be event files in it
            self.path.rmdir()

    def write_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        write_whole(self.path / MODEL, save({name: np.ascontiguousarray(array) for name, array in weights.items()}))

    def weights(self) -> dict[str, np.ndarray]:
        return dict(load_file(self.path / MODEL))

    def num_steps(self) -> int:
        """How many steps the history has so far."""
        path = self.path / HISTORY
        return path.read_bytes().count(b"\n") if path.exists() else 0


class ReadOnlyFolder(RunFolder):
    """The run folder on a rank that leaves the writing to rank 0."""

    def check_new(self) -> None:
        pass

    def clear(self) -> None:
        pass

    def write(self, name: str, text: str) -> None:
        pass

    def add_step(self, record: Record) -> str:
        return ""

    def begin_with(self, history: bytes, *, has_events: bool = False) -> None:
        pass
