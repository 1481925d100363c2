"""`bigbatch train`: the steps, what they leave, and the comparison with the full batch."""

import dataclasses
import json
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from .. import __version__
from ..core.errors import BatchError, StateError
from ..core.step import History
from ..core.window import shares
from . import compare, report
from .config import Config
from .engine import Engine, make_engine
from .folder import HISTORY, REPORT, STATE, OthersFolder, RunFolder
from .ranks import Ranks
from .screen import Screen
from .task import Task
from .tensorboard import EventFile

Item = TypeVar("Item")
PLACE = ("num_steps", "epoch", "place", "num_samples", "num_applied", "seconds")
"""How far a run has come."""


class Interruption:
    """Ctrl-C ends the run after the step that is under way, the same on all ranks; a second one ends it at once."""

    def __init__(self) -> None:
        self.is_asked = self.is_agreed = False

    def __enter__(self) -> "Interruption":
        self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.is_asked:
            raise KeyboardInterrupt
        self.is_asked = True

    def __exit__(self, *_: Any) -> None:
        if self.is_asked or not self.is_agreed:  # else only another rank was asked so far, and this one will be
            signal.signal(signal.SIGINT, self._before)


class Training:
    """A run, from its first step or from where it was saved."""

    def __init__(self, task: Task, config: Config, folder: RunFolder, screen: Screen, ranks: Ranks) -> None:
        self.task, self.config, self.folder, self.screen, self.ranks = task, config, folder, screen, ranks
        self.num_steps = self.epoch = self.place = self.num_samples = self.num_applied = 0
        self.seconds = 0.0
        self.engine: Engine = make_engine(task, config, ranks)
        self.total = self._total()
        self.peak_bytes: int | None = None

    def _total(self) -> int | None:
        """How many steps the run will have, if that can be told."""
        if self.config.steps is not None:
            return self.config.steps
        each = self.task.num_batches(self.config.batch_size, self.config.seed)
        if each is None and self.config.schedule != "constant":
            raise BatchError(
                f"--schedule {self.config.schedule} needs to know the number of steps, but batches() of "
                f"{self.task.name} has no length: pass --steps"
            )
        return None if each is None else each * (self.config.epochs or 1)

    def resume(self) -> None:
        """Takes up what was saved last."""
        state = self.folder.path / STATE
        try:
            place = json.loads((state / "place.json").read_text(encoding="utf-8"))
            for name in PLACE:
                setattr(self, name, place[name])
            self.engine.load(state)
        except StateError:
            raise  # says more than we could
        except (OSError, ValueError, KeyError) as error:
            raise StateError(
                f"{self.folder.path} has no state to go on from: start it anew without --resume"
            ) from error
        self.folder.keep_steps(self.num_steps)

    def run(self) -> bool:
        """Trains to the end; False if Ctrl-C ended it before."""
        events = EventFile(self.folder.path) if self.config.tensorboard else None
        self.screen.start(self.task.name, self.total, self.num_steps)
        began = time.perf_counter() - self.seconds
        try:
            with Interruption() as interruption:
                while not self._is_done():
                    self._run_epoch(began, interruption, events)
                    if self._is_interrupted(interruption):
                        return False
        finally:
            self.screen.end()
            self.folder.close()
            if events is not None:
                events.close()
        return True

    def _is_interrupted(self, interruption: Interruption, *of_all: Any) -> bool:
        interruption.is_agreed |= self.ranks.agree(interruption.is_asked, *of_all)
        return interruption.is_agreed

    def _is_done(self) -> bool:
        if self.config.steps is not None:
            return self.num_steps >= self.config.steps
        return self.epoch >= (self.config.epochs or 1)

    def _run_epoch(self, began: float, interruption: Interruption, events: EventFile | None) -> None:
        options = {"batch_size": self.config.batch_size, "epoch": self.epoch, "seed": self.config.seed}
        before = self.num_steps
        for place, (batch, is_last) in enumerate(marked(self.task.epoch(**options))):
            if place < self.place:
                continue
            self._step(batch, is_last, began, events)
            self.epoch, self.place = (self.epoch + 1, 0) if is_last else (self.epoch, place + 1)
            if self._is_interrupted(interruption, batch, is_last) or self._is_done():
                break
        if self.num_steps == before:
            raise BatchError(f"batches() of {self.task.name} gave 0 batches in epoch {self.epoch + 1}")
        self.save()

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
            "step": self.num_steps, "epoch": self.epoch, "ends_epoch": is_last, **step.as_dict(),
            "lr": lr, "num_samples": num, "seconds": round(self.seconds, 4),
        }  # fmt: skip
        self.folder.add_step(record)
        self.num_steps += 1
        if events is not None:
            events.add(self.num_steps, {name: record[name] for name in ("loss", "grad_norm", "lr")})
        self.screen.step(self.num_steps, {**record, "samples_so_far": self.num_samples}, self.peak_bytes)

    def save(self) -> None:
        """All that `resume` needs."""

        def write(folder: Path) -> None:
            self.engine.save(folder)
            (folder / "place.json").write_text(json.dumps({name: getattr(self, name) for name in PLACE}))

        self.folder.save_state(write)

    def _num_micro_batches(self) -> int:
        """Of a step, of all ranks."""
        parts = shares(self.config.batch_size, self.ranks.num)
        return sum(-(-(part.stop - part.start) // self.config.micro_batch_size) for part in parts)

    def summary(self, *, is_finished: bool) -> dict[str, Any]:
        return {
            "version": __version__,
            "task": self.task.name,
            "framework": self.task.framework,
            "device": self.engine.device,
            "status": "finished" if is_finished else "interrupted",
            "batch_size": self.config.batch_size,
            "micro_batch_size": self.config.micro_batch_size,
            "num_micro_batches": self._num_micro_batches(),
            "num_ranks": self.ranks.num,
            "num_steps": self.num_steps,
            "num_epochs": self.epoch,
            "num_samples": self.num_samples,
            "loss": History.load(self.folder.path / HISTORY).losses[-1],
            "scores": self.engine.scores(),
            "seconds": round(self.seconds, 4),
            "samples_per_second": round(self.num_samples / self.seconds, 2) if self.seconds else 0.0,
            "peak_bytes": self.peak_bytes,
            "full_batch": None,
            "comparison": None,
            "verification": None,
        }


def marked(items: Iterable[Item]) -> Iterator[tuple[Item, bool]]:
    """Every item, and whether it is the last."""
    iterator = iter(items)
    for item in iterator:
        for following in iterator:
            yield item, False
            item = following
        yield item, True


def train(
    task: Task, config: Config, out: Path, screen: Screen, ranks: Ranks, *, is_resumed: bool = False
) -> dict[str, Any] | None:
    """The whole job; returns the summary, and None on a rank that only helps with the steps."""
    if not ranks.is_first:
        run_training(task, dataclasses.replace(config, tensorboard=False), OthersFolder(out), screen, ranks, is_resumed)
        return None
    folder = RunFolder.create(out, is_continued=is_resumed)
    folder.write_config(config)
    training, is_finished = run_training(task, config, folder, screen, ranks, is_resumed)
    folder.write_weights(training.engine.weights())  # before the task's own evaluate, which may fail
    summary = training.summary(is_finished=is_finished)
    folder.write_summary(summary)
    if config.compare and is_finished:
        summary |= compare.with_full_batch(config, training.num_steps, folder, screen)
        folder.write_summary(summary)
    report.write_report([folder.path], folder.path / REPORT)
    return summary


def run_training(
    task: Task, config: Config, folder: RunFolder, screen: Screen, ranks: Ranks, is_resumed: bool
) -> tuple[Training, bool]:
    """The steps, which all ranks make; and whether they were made to the end."""
    training = Training(task, config, folder, screen, ranks)
    if is_resumed:
        training.resume()
    is_finished = training.run()
    ranks.end()
    return training, is_finished
