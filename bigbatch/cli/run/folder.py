"""The run folder: what a run leaves behind."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from safetensors.numpy import load_file, save

from ...core.checkpoint.files import write_whole
from ...core.errors import OptionError, StateError
from ...core.text import from_json, to_json
from ..config import Config

CONFIG, HISTORY, TIMES, SUMMARY, MODEL, REPORT = (
    "config.toml", "history.jsonl", "times.jsonl", "summary.json", "model.safetensors", "report.html",
)  # fmt: skip
FULL_BATCH, CHECKPOINTS = "full_batch", "checkpoints"


class RunFolder:
    """Where a run writes; each file is there whole or not at all, but for those that grow by lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open: dict[str, TextIO] = {}

    @classmethod
    def create(cls, path: Path, *, is_continued: bool = False) -> "RunFolder":
        """Makes the folder; refuses one that holds another run."""
        if not is_continued and any((path / name).exists() for name in (HISTORY, CHECKPOINTS)):
            raise OptionError(f"{path} holds a run already: pass another --out, or --resume {path} to go on with it")
        path.mkdir(parents=True, exist_ok=True)
        return cls(path)

    def write(self, name: str, text: str) -> None:
        """A file of text, which is there whole or not at all."""
        write_whole(self.path / name, text.encode())

    def write_config(self, config: Config) -> None:
        self.write(CONFIG, config.as_toml())

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        self.write(SUMMARY, json.dumps(to_json(summary), indent=2, allow_nan=False) + "\n")

    def add_step(self, record: Mapping[str, Any], seconds: float) -> None:
        """One more line of the history, which says nothing of the time, and one of the times."""
        self._add(HISTORY, record)
        self._add(TIMES, {"step": record["step"], "seconds": seconds})

    def _add(self, name: str, record: Mapping[str, Any]) -> None:
        if name not in self._open:
            self._open[name] = (self.path / name).open("a+", encoding="utf-8")
        self._open[name].write(json.dumps(to_json(record), allow_nan=False) + "\n")
        self._open[name].flush()

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open = {}

    def history(self) -> bytes:
        """What is in the history so far; of the file that we opened, whatever has that name now."""
        if HISTORY not in self._open:
            return (self.path / HISTORY).read_bytes()
        self._open[HISTORY].seek(0)  # what is added goes to the end all the same
        return self._open[HISTORY].read().encode()

    def begin_with(self, history: bytes) -> None:
        """The history as it was when the run was saved, whatever became of the file; and as many times."""
        write_whole(self.path / HISTORY, history)
        path = self.path / TIMES
        lines = path.read_bytes().split(b"\n") if path.exists() else []
        num = history.count(b"\n")
        kept = lines[: min(num, len(lines) - 1)]  # after the last line comes nothing, or one that was cut off
        missing = [json.dumps({"step": step, "seconds": None}).encode() for step in range(len(kept), num)]
        write_whole(path, b"".join(line + b"\n" for line in (*kept, *missing)))

    def refuse_without_checkpoint(self) -> None:
        """Raises StateError if the run ended; one that was killed before its first checkpoint can start again."""
        if (self.path / SUMMARY).exists():
            raise StateError(
                f"{self.path} holds a run that ended but no checkpoint to go on from: start anew without --resume"
            )

    def clear(self) -> None:
        """Removes what a run would refuse to start in."""
        for name in (HISTORY, TIMES):
            (self.path / name).unlink(missing_ok=True)
        shutil.rmtree(self.path / CHECKPOINTS, ignore_errors=True)

    def write_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        write_whole(self.path / MODEL, save({name: np.ascontiguousarray(array) for name, array in weights.items()}))

    def weights(self) -> dict[str, np.ndarray]:
        found: dict[str, np.ndarray] = load_file(self.path / MODEL)
        return found

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = from_json(json.loads((self.path / SUMMARY).read_text(encoding="utf-8")))
        return found

    def num_steps(self) -> int:
        """How many steps are in the history so far."""
        path = self.path / HISTORY
        return path.read_bytes().count(b"\n") if path.exists() else 0


class OthersFolder(RunFolder):
    """The folder of a run for a rank that leaves the writing to the first."""

    def write(self, name: str, text: str) -> None:
        pass

    def add_step(self, record: Mapping[str, Any], seconds: float) -> None:
        pass

    def begin_with(self, history: bytes) -> None:
        pass
