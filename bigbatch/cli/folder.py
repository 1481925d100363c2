"""The run folder: what a run leaves behind."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from safetensors.numpy import load_file, save

from ..core.errors import OptionError, StateError
from ..core.files import write_whole
from ..core.step import from_json, to_json
from .config import Config

CONFIG, HISTORY, SUMMARY, MODEL, REPORT = (
    "config.toml", "history.jsonl", "summary.json", "model.safetensors", "report.html",
)  # fmt: skip
FULL_BATCH, STATE = "full_batch", "state"


class RunFolder:
    """Where a run writes; each file is there whole or not at all, but for the history, which grows by lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._history: TextIO | None = None

    @classmethod
    def create(cls, path: Path, *, is_continued: bool = False) -> "RunFolder":
        """Makes the folder; refuses one that holds another run."""
        if not is_continued and (path / HISTORY).exists():
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

    def add_step(self, record: Mapping[str, Any]) -> None:
        """One more line of the history, on the disk when this returns."""
        if self._history is None:
            self._history = (self.path / HISTORY).open("a", encoding="utf-8")
        self._history.write(json.dumps(to_json(record), allow_nan=False) + "\n")
        self._history.flush()

    def close(self) -> None:
        if self._history is not None:
            self._history.close()
            self._history = None

    def keep_steps(self, num: int) -> None:
        """Shortens the history to its first steps: those that a saved state has behind it."""
        path = self.path / HISTORY
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        if len(lines) < num:
            raise StateError(f"{path} has {len(lines)} steps but the saved state {num}: the run cannot go on")
        self.write(HISTORY, "".join(lines[:num]))

    def save_state(self, write: Callable[[Path], None]) -> None:
        """What `write` puts into a folder; each file takes the place of the one before when all are written."""
        part, state = self.path / f"{STATE}.part", self.path / STATE
        try:
            part.mkdir(exist_ok=True)
            write(part)
            state.mkdir(exist_ok=True)
            for file in part.iterdir():
                file.replace(state / file.name)
        finally:
            shutil.rmtree(part, ignore_errors=True)

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

    def add_step(self, record: Mapping[str, Any]) -> None:
        pass

    def keep_steps(self, num: int) -> None:
        pass

    def save_state(self, write: Callable[[Path], None]) -> None:
        pass
