"""The checkpoints of a run: the loop of `core/checkpoint`, with what only the command line knows."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...core.checkpoint.loop import HISTORY, Resumable
from ..config import Config
from ..engines.engine import Engine
from . import randomness
from .folder import CHECKPOINTS, RunFolder


class RunCheckpoints(Resumable):
    """Saves the engine, the counts of a run and its history, with the random numbers of every framework in use.

    Args:
        folder: The run folder.
        engine: What trains.
        config: How often to save.
        counts: The counts of the run by name; changed in place when a checkpoint is loaded.
        is_read_only: Whether to leave the saving to another rank.
    """

    def __init__(
        self, folder: RunFolder, engine: Engine, config: Config, counts: dict[str, Any], *, is_read_only: bool
    ) -> None:
        path: Path = folder.path / CHECKPOINTS
        super().__init__(path, every=config.checkpoint_every, to_array=engine.to_array, from_array=engine.from_array)
        self._folder, self._engine, self._counts = folder, engine, counts
        self._store.is_read_only = is_read_only
        self.saved_history = b""
        """The history as it was when the run was saved."""

    def restore(self) -> bool:
        """Loads the newest intact checkpoint; False if there is none."""
        has_found = self._restore()
        if self._now is not None:
            self._set_random(self._now, None)
        return has_found

    def claim(self) -> None:
        """Keeps other processes from training in this folder until `close`; raises OrderError if one does."""
        self._store.claim()

    def save(self, *, wait: bool = False) -> None:
        if not self._store.is_read_only:
            super().save(wait=wait)

    def save_last(self, *, is_in_step: bool) -> None:
        """Saves what the newest checkpoint does not have yet."""
        self.wait()
        if is_in_step or self._store.newest_step != self._counts["num_steps"]:
            self.save(wait=True)

    @property
    def has_any(self) -> bool:
        """Whether there is a checkpoint to resume from."""
        return self._store.newest_step is not None

    # --- what the loop asks for ------------------------------------------------------------------------------

    def _state(self) -> tuple[Any, Mapping[str, bytes]]:
        return {"engine": self._engine.state(), "run": dict(self._counts)}, {HISTORY: self._folder.history()}

    def _load(self, state: Any, files: Mapping[str, bytes]) -> None:
        counts, history = {name: state["run"][name] for name in self._counts}, files[HISTORY]
        self._engine.load(state["engine"])
        self._counts.update(counts)
        self.saved_history = history

    def _progress(self) -> Any:
        return self._counts["num_steps"]

    def _random(self, data: Any) -> dict[str, Any]:
        return {**randomness.state(), "batches": data.stream.state}

    def _set_random(self, found: dict[str, Any], data: Any) -> None:
        randomness.restore(found)
        if data is not None:
            data.stream.state = found["batches"]
