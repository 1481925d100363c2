"""`bigbatch train`: the steps, what they leave, and the comparison with the full batch."""

import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

from ... import __version__
from ...core.errors import BatchError, Interrupted
from ...core.history import History
from ...core.window import rank_slices
from ..config import Config
from ..engines.engine import Engine, make_engine
from ..errors import STOPPED
from ..report import page as report
from ..task import Task
from . import compare, randomness
from .batches import Batches
from .checkpoints import RunCheckpoints
from .display import Screen
from .folder import HISTORY, REPORT, OthersFolder, RunFolder
from .ranks import Ranks
from .signals import Interruption
from .tensorboard import EventFile

_COUNTS = ("num_steps", "num_epochs", "num_samples", "num_applied")


class Training:
    """A run, from its first step or from where it was saved.

    Args:
        task: What to train.
        config: How to train it.
        folder: Where to write.
        screen: Where to show it.
        ranks: The processes that train together.
    """

    def __init__(self, task: Task, config: Config, folder: RunFolder, screen: Screen, ranks: Ranks) -> None:
        self.task, self.config, self.folder, self.screen, self.ranks = task, config, folder, screen, ranks
        self.counts: dict[str, Any] = {**dict.fromkeys(_COUNTS, 0), "seconds": 0.0}
        """How far the run has come."""
        self.engine: Engine = make_engine(task, config, ranks)
        self.total = self._total()
        self.batches = Batches(task, config)
        self.peak_bytes: int | None = None
        self.checkpoints = RunCheckpoints(folder, self.engine, config, self.counts, is_read_only=not ranks.is_first)

    @property
    def num_steps(self) -> int:
        return int(self.counts["num_steps"])

    def _total(self) -> int | None:
        """How many steps the run will have; None if that is not known."""
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

    def resume(self) -> None:
        """Loads the newest checkpoint. A run that was killed before it had one starts again."""
        if not self.checkpoints.restore():
            self.folder.refuse_without_checkpoint()
            self.screen.note(f"{self.folder.path} has no checkpoint yet: starting with the first step")
        self.ranks.check_place(self.num_steps)

    # --- the steps -------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Trains to the end. Returns 0, or the exit code of a run that ended before."""
        self.checkpoints.claim()
        self.folder.begin_with(self.checkpoints.saved_history)
        events = EventFile(self.folder.path) if self.config.tensorboard else None
        self.screen.start(self.task.name, self.total, self.num_steps)
        is_in_step = False
        try:
            with Interruption(self.engine.interrupt, self.screen.leave) as interruption:
                try:
                    self._train(interruption, events)
                except Interrupted:
                    interruption.is_agreed = is_in_step = True
                self.checkpoints.save_last(is_in_step=is_in_step)
                interruption.is_agreed |= self.ranks.agree(interruption.is_asked)
        except Exception:
            if self.ranks.is_first and not self.num_steps and not self.checkpoints.has_any:
                self.folder.clear()  # there is nothing to resume, and the same --out may be passed again
            raise
        finally:
            self.screen.end()
            self.folder.close()
            self.checkpoints.wait()
            if events is not None:
                events.close()
        if interruption.is_agreed:
            return interruption.code
        return STOPPED if self.engine.is_stopped else 0

    def _train(self, interruption: Interruption, events: EventFile | None) -> None:
        steps, epochs = self.config.steps, self.config.epochs or 1
        if self.counts["num_epochs"] >= epochs if steps is None else self.num_steps >= steps:
            return
        began = time.perf_counter() - self.counts["seconds"]
        for batch, is_last in self.checkpoints.batches(self.batches, epochs if steps is None else sys.maxsize):
            self._step(batch, is_last, began, events)
            interruption.is_agreed |= self.ranks.agree(interruption.is_asked, batch, is_last)
            if interruption.is_agreed or self.engine.is_stopped or self.num_steps == steps:
                break

    def _step(self, batch: Any, is_last: bool, began: float, events: EventFile | None) -> None:
        counts = self.counts
        lr = self.config.lr_at(counts["num_applied"], self.total)
        self.engine.set_lr(lr)
        num = self.engine.num_samples(batch)
        step = self.engine.step(batch)
        record = {
            "step": self.num_steps, "epoch": counts["num_epochs"], "ends_epoch": is_last, **step.as_dict(),
            "lr": lr, "num_samples": num,
        }  # fmt: skip
        counts["num_applied"] += step.is_applied
        counts["num_samples"] += num
        counts["num_epochs"] += is_last
        counts["seconds"] = time.perf_counter() - began
        self.peak_bytes = self.engine.peak_bytes()
        seconds = round(counts["seconds"], 4)
        self.folder.add_step(record, seconds)
        counts["num_steps"] += 1  # from here on the batch counts as done
        if events is not None:
            events.add(self.num_steps, {name: record[name] for name in ("loss", "grad_norm", "lr")})
        shown = {**record, "seconds": seconds, "samples_so_far": counts["num_samples"]}
        self.screen.step(self.num_steps, shown, self.peak_bytes)

    def _num_micro_batches(self) -> int:
        """Of a step, of all ranks."""
        parts = rank_slices(self.config.batch_size, self.ranks.num)
        return sum(-(-(part.stop - part.start) // self.config.micro_batch_size) for part in parts)

    def summary(self, code: int) -> dict[str, Any]:
        losses = History.load(self.folder.path / HISTORY).losses
        seconds = self.counts["seconds"]
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
            "num_epochs": self.counts["num_epochs"],
            "num_samples": self.counts["num_samples"],
            "loss": losses[-1] if losses else None,
            "scores": self.engine.scores(),
            "seconds": round(seconds, 4),
            "samples_per_second": round(self.counts["num_samples"] / seconds, 2) if seconds else 0.0,
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
    with training.checkpoints:  # no other process may train in the folder while this one writes and compares
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
