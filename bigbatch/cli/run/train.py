"""`bigbatch train`: the steps, what they leave, and the comparison with the full batch."""

import dataclasses
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from ... import __version__
from ...core.checkpoint.schedule import Every
from ...core.checkpoint.store import Checkpoint
from ...core.errors import BatchError, BigBatchError, Interrupted, StateError
from ...core.history import History
from ...core.window import rank_slices
from ..config import Config
from ..engines.engine import Engine, make_engine
from ..errors import STOPPED
from ..report import page as report
from ..task import Task
from . import compare, randomness
from .batches import Batches
from .compatible import REMEDY
from .display import Screen
from .folder import HISTORY, REPORT, OthersFolder, RunFolder
from .ranks import Ranks
from .signals import Interruption
from .tensorboard import EventFile

PLACE = ("num_steps", "num_samples", "num_applied", "seconds")
"""How far a run has come, beside its place in the data."""


class Training:
    """A run, from its first step or from where it was saved."""

    def __init__(self, task: Task, config: Config, folder: RunFolder, screen: Screen, ranks: Ranks) -> None:
        self.task, self.config, self.folder, self.screen, self.ranks = task, config, folder, screen, ranks
        self.num_steps = self.num_samples = self.num_applied = 0
        self.seconds = 0.0
        self.engine: Engine = make_engine(task, config, ranks)
        self.total = self._total()
        self.batches = Batches(task, config)
        self.peak_bytes: int | None = None
        self.store = folder.store(self.engine.to_array, self.engine.from_array)
        self._every = Every(config.checkpoint_every)
        self._history = b""

    def _total(self) -> int | None:
        """How many steps the run will have, if that can be told."""
        if self.config.steps is not None:
            return self.config.steps
        with randomness.kept():
            each = self.task.num_batches(self.config.batch_size, self.config.seed)
        if each is None and self.config.schedule != "constant":
            raise BatchError(
                f"--schedule {self.config.schedule} needs to know the number of steps, but batches() of "
                f"{self.task.name} has no length: pass --steps"
            )
        return None if each is None else each * (self.config.epochs or 1)

    # --- saving ----------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Takes up the newest checkpoint; a run that was killed before it had one begins anew."""
        found = self.store.load()
        if found is None:
            self.folder.refuse_without_checkpoint()
            self.screen.note(f"{self.folder.path} has no checkpoint yet: starting with the first step")
        else:
            try:
                self._load(found)
            except BigBatchError:
                raise
            except Exception as error:  # whatever may be in a checkpoint of something else
                raise StateError(
                    f"{found.path} is no checkpoint of such a run ({type(error).__name__}: {error}): {REMEDY}"
                ) from error
        self.ranks.check_place(self.num_steps)

    def _load(self, found: Checkpoint) -> None:
        self.engine.load(found.state["engine"])
        for name in PLACE:
            setattr(self, name, found.state["run"][name])
        self.batches.load(found.state["batches"])
        randomness.restore(found.state["random"])
        self._history = found.files[HISTORY]
        self._every.saved(self.num_steps)

    def save(self, *, wait: bool = False) -> None:
        """All that `resume` needs; written while training goes on, or waited for."""
        state = {
            "engine": self.engine.state(),
            "run": {name: getattr(self, name) for name in PLACE},
            "batches": self.batches.state(),
            "random": randomness.state(),
        }
        self.store.save(self.num_steps, state, {HISTORY: self.folder.history()}, wait=wait)
        self._every.saved(self.num_steps)

    def _save_if_due(self) -> None:
        if self.ranks.is_first and self._every.is_due(self.num_steps) and not self.store.is_writing:
            self.save()

    def _save_last(self, *, is_in_step: bool) -> None:
        if not self.ranks.is_first:
            return
        self.store.wait()
        if is_in_step or self.store.newest_step != self.num_steps:
            self.save(wait=True)

    # --- the steps -------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Trains to the end; returns the exit code of a run that ended before, else 0."""
        self.store.claim()
        self.folder.begin_with(self._history)
        events = EventFile(self.folder.path) if self.config.tensorboard else None
        self.screen.start(self.task.name, self.total, self.num_steps)
        began = time.perf_counter() - self.seconds
        is_in_step = False
        try:
            with Interruption(self.engine.interrupt, self.screen.leave) as interruption:
                try:
                    while not self._is_done() and not interruption.is_agreed and not self.engine.is_stopped:
                        self._run_epoch(began, interruption, events)
                except Interrupted:
                    interruption.is_agreed = is_in_step = True
                self._save_last(is_in_step=is_in_step)
                interruption.is_agreed |= self.ranks.agree(interruption.is_asked)
        except Exception:
            if self.ranks.is_first and not self.num_steps and self.store.newest_step is None:
                self.folder.clear()  # there is nothing to go on with, and the same --out may be passed again
            raise
        finally:
            self.screen.end()
            self.folder.close()
            self.store.wait()
            if events is not None:
                events.close()
        if interruption.is_agreed:
            return interruption.code
        return STOPPED if self.engine.is_stopped else 0

    def _is_done(self) -> bool:
        if self.config.steps is not None:
            return self.num_steps >= self.config.steps
        return self.batches.epoch >= (self.config.epochs or 1)

    def _run_epoch(self, began: float, interruption: Interruption, events: EventFile | None) -> None:
        before = self.num_steps
        for batch, is_last in self.batches.rest_of_epoch():
            self._step(batch, is_last, began, events)
            self.batches.done(is_last)
            self._save_if_due()
            interruption.is_agreed |= self.ranks.agree(interruption.is_asked, batch, is_last)
            if interruption.is_agreed or self._is_done() or self.engine.is_stopped:
                break
        if self.num_steps == before:
            raise BatchError(f"batches() of {self.task.name} gave 0 batches in epoch {self.batches.epoch + 1}")

    def _step(self, batch: Any, is_last: bool, began: float, events: EventFile | None) -> None:
        lr = self.config.lr_at(self.num_applied, self.total)
        self.engine.set_lr(lr)
        num = self.engine.num_samples(batch)
        step = self.engine.step(batch)
        self.num_applied += step.is_applied
        self.num_samples += num
        self.seconds = time.perf_counter() - began
        self.peak_bytes = self.engine.peak_bytes()
        record = {
            "step": self.num_steps, "epoch": self.batches.epoch, "ends_epoch": is_last, **step.as_dict(),
            "lr": lr, "num_samples": num,
        }  # fmt: skip
        seconds = round(self.seconds, 4)
        self.folder.add_step(record, seconds)
        self.num_steps += 1
        if events is not None:
            events.add(self.num_steps, {name: record[name] for name in ("loss", "grad_norm", "lr")})
        shown = {**record, "seconds": seconds, "samples_so_far": self.num_samples}
        self.screen.step(self.num_steps, shown, self.peak_bytes)

    def _num_micro_batches(self) -> int:
        """Of a step, of all ranks."""
        parts = rank_slices(self.config.batch_size, self.ranks.num)
        return sum(-(-(part.stop - part.start) // self.config.micro_batch_size) for part in parts)

    def summary(self, code: int) -> dict[str, Any]:
        losses = History.load(self.folder.path / HISTORY).losses
        return {
            "version": __version__,
            "task": self.task.name,
            "framework": self.task.framework,
            "device": self.engine.device,
            "status": {0: "finished", STOPPED: "stopped"}.get(code, "interrupted"),
            "batch_size": self.config.batch_size,
            "micro_batch_size": self.config.micro_batch_size,
            "num_micro_batches": self._num_micro_batches(),
            "num_ranks": self.ranks.num,
            "num_steps": self.num_steps,
            "num_epochs": self.batches.epoch,
            "num_samples": self.num_samples,
            "loss": losses[-1] if losses else None,
            "scores": self.engine.scores(),
            "seconds": round(self.seconds, 4),
            "samples_per_second": round(self.num_samples / self.seconds, 2) if self.seconds else 0.0,
            "peak_bytes": self.peak_bytes,
            "full_batch": None,
            "comparison": None,
            "verification": None,
        }


def train(
    task: Task, config: Config, out: Path, screen: Screen, ranks: Ranks, *, is_resumed: bool = False
) -> tuple[dict[str, Any] | None, int]:
    """The whole job; returns the summary, None on a rank that only helps with the steps, and the exit code."""
    if not ranks.is_first:
        others = dataclasses.replace(config, tensorboard=False)
        return None, run_training(task, others, OthersFolder(out), screen, ranks, is_resumed)[1]
    folder = RunFolder.create(out, is_continued=is_resumed)
    training, code = run_training(task, config, folder, screen, ranks, is_resumed)
    with closing(training.store):  # nobody else may go on with the run while this one writes and compares
        return written(training, code), code


def written(training: Training, code: int) -> dict[str, Any]:
    """What the steps leave, and the comparison; returns the summary."""
    config, folder = training.config, training.folder
    folder.write_weights(training.engine.weights())  # before the task's own evaluate, which may fail
    summary = training.summary(code)
    folder.write_summary(summary)
    if config.compare and not code:
        summary |= compare.with_full_batch(config, training.num_steps, folder, training.screen)
        folder.write_summary(summary)
    report.write_report([folder.path], folder.path / REPORT)
    return summary


def run_training(
    task: Task, config: Config, folder: RunFolder, screen: Screen, ranks: Ranks, is_resumed: bool
) -> tuple[Training, int]:
    """The steps, which all ranks make; and the exit code of a run that ended before it was done."""
    if not is_resumed:
        folder.write_config(config)
    training = Training(task, config, folder, screen, ranks)
    if is_resumed:
        training.resume()
        folder.write_config(config)
    code = training.run()
    ranks.end()
    return training, code
