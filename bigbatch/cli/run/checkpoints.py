"""The checkpoints of a run: those of `core/checkpoint`, with the state of the engine and the progress of the run."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.checkpoint.loop import Resumable
from ...core.errors import StateError
from ..config import Config
from ..engines.engine import Engine
from . import randomness
from .folder import CHECKPOINTS, RunFolder


@dataclass
class Progress:
    """How far a run has come, besides the position in its data."""

    num_epochs: int = 0
    num_samples: int = 0
    num_applied: int = 0
    seconds: float = 0.0


class RunCheckpoints(Resumable):
    """Saves the engine, the progress and the history of a run, with the random numbers of every framework in use.

    `is_read_only` is for ranks that leave the saving to rank 0.
    """

    def __init__(self, folder: RunFolder, engine: Engine, config: Config, *, is_read_only: bool) -> None:
        path, every = folder.path / CHECKPOINTS, config.checkpoint_every
        super().__init__(path, every=every, to_array=engine.to_array, from_array=engine.from_array)
        self._engine, self.progress = engine, Progress()
        self._store.is_read_only = is_read_only
        self._task = f"{Path(config.task).stem} for {config.framework}"
        self._lines: list[str] = []
        self._first_line = 0

    def restore(self) -> bool:
        """Loads the newest intact checkpoint; False if there is none."""
        has_any = self._restore()
        self._first_line = self._store.num_lines
        if self._now is not None:
            self._set_random(self._now, None)
        return has_any

    def claim(self) -> None:
        """Keeps other processes from training in this folder until `close`; raises OrderError if one does."""
        self._store.claim()

    def save(self, *, wait: bool = False) -> None:
        if not self._store.is_read_only:
            super().save(wait=wait)

    def save_last(self, *, is_in_step: bool) -> None:
        """Saves unless the newest checkpoint is of this step."""
        self.wait()
        if is_in_step or self._store.newest_step != self.num_batches:
            self.save(wait=True)

    def add_line(self, line: str) -> None:
        """Adds a line of the history to the checkpoints from now on."""
        if not self._store.is_read_only:
            self._lines.append(line)

    def count(self) -> None:
        """Counts the batch in hand as done."""
        self._count()

    @property
    def has_any(self) -> bool:
        """Whether there is a checkpoint to resume from."""
        return self._store.newest_step is not None

    # --- what Resumable asks for -----------------------------------------------------------------------------

    def _state(self) -> tuple[Any, Mapping[str, bytes]]:
        return {"task": self._task, "engine": self._engine.state(), "run": dict(vars(self.progress))}, {}

    def _load(self, state: Any, files: Mapping[str, bytes]) -> None:
        if state["task"] != self._task:
            raise StateError(
                f"the run is of the task {state['task']}, and not of {self._task}: continue it with the task that it "
                "began with"
            )
        progress = {name: state["run"][name] for name in vars(self.progress)}
        self._engine.load(state["engine"])
        vars(self.progress).update(progress)

    def _lines_from(self, first: int) -> tuple[list[str], str]:
        del self._lines[: first - self._first_line]  # they are saved
        self._first_line = first
        return self._lines, ""

    def _progress(self) -> Any:
        return self.num_batches

    def _random(self, data: Any) -> dict[str, Any]:
        return {**randomness.state(), "batches": None if data is None else data.stream.state}

    def _set_random(self, saved: dict[str, Any], data: Any) -> None:
        randomness.restore(saved)
        if data is not None:
            data.stream.state = saved["batches"]
