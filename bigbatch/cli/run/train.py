"""`bigbatch train`: the steps, the files they leave, and the comparison with the full batch."""

import sys
import tempfile
import time
from pathlib import Path

from ... import __version__
from ...core.errors import BatchError, Interrupted, NonFiniteError, StateError
from ...core.history import History
from ...core.window import rank_slices
from ..config import Config
from ..engines.engine import Engine, make_engine
from ..errors import STOPPED
from ..report.page import write_report
from ..summary import Record, Summary
from ..task import Task
from . import randomness
from .batches import Batches
from .checkpoints import RunCheckpoints
from .compare import with_full_batch
from .display import Screen
from .folder import CONFIG, HISTORY, MODEL, REPORT, SUMMARY, ReadOnlyFolder, RunFolder
from .ranks import Launch
from .signals import Interruption


class _Training:
    """A run, from its first step or from its newest checkpoint."""

    def __init__(self, task: Task, config: Config, folder: RunFolder, screen: Screen, ranks: Launch) -> None:
        self.task, self.config, self.folder, self.screen, self.ranks = task, config, folder, screen, ranks
        self.engine: Engine = make_engine(task, config, ranks)
        self.num_wanted = self._num_wanted()
        self.batches = Batches(task, config)
        self.peak_bytes: int | None = None
        self._not_saved: OSError | None = None
        self._config_before: str | None = None
        """The config file of a resumed run, as it was before."""
        self.checkpoints = RunCheckpoints(folder, self.engine, config, is_read_only=not ranks.is_first)

    def _num_wanted(self) -> int | None:
        """How many steps the run will have; None if that is not known."""
        if self.config.steps is not None:
            return self.config.steps
        with randomness.preserved():
            each = self.task.num_batches(self.config.batch_size, self.config.seed)
        if each is None and self.config.schedule != "constant":
            raise BatchError(
                f"--schedule {self.config.schedule} needs to know the number of steps, but batches() of "
                f"{self.task.name} has no length: pass --steps"
            )
        return None if each is None else each * (self.config.epochs or 1)

    def begin(self, *, is_resumed: bool) -> None:
        """Locks the folder before anything is written to it; loads the newest checkpoint of a resumed run."""
        self.checkpoints.claim()
        if is_resumed:
            self._config_before = self.folder.config()
            self._resume()
        else:
            self.folder.check_new()  # once more: another process may have been faster
        self.folder.write_config(self.config)

    def _resume(self) -> None:
        """Loads the newest checkpoint. A run that was killed before its first checkpoint starts again."""
        if not self.checkpoints.restore():
            if (self.folder.path / SUMMARY).exists():
                raise StateError(
                    f"{self.folder.path} has a run that ended, but no checkpoint to continue from: "
                    "start again without --resume"
                )
            self.screen.note(f"{self.folder.path} has no checkpoint yet: starting with the first step")
        self.ranks.check_position(self.checkpoints.num_batches)

    # --- the steps -------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Trains to the end. Returns 0, or the exit code of a run that ended early."""
        self.screen.start(self.task.name, self.num_wanted, self.checkpoints.num_batches)
        is_in_step, num_before = False, self.checkpoints.num_batches
        try:
            self.folder.begin_with(self.checkpoints.saved_lines, has_events=self.config.tensorboard)
            with Interruption(self.engine.interrupt, self.screen.leave) as interruption:
                try:
                    self._train(interruption)
                except Interrupted:
                    interruption.is_agreed = is_in_step = True
                self._save_last(is_in_step=is_in_step)
                interruption.is_agreed |= self.ranks.agree(interruption.is_asked)
        except Exception:
            if self.checkpoints.num_batches == num_before:
                if self._config_before is not None:  # or the next --resume would fail for this one's options
                    self.folder.write(CONFIG, self._config_before)
                elif not self.checkpoints.has_any:
                    self.folder.clear()  # there is nothing to resume, and the same --out may be passed again
            raise
        finally:
            self.screen.end()
            self.folder.close()
            self.checkpoints.wait()
        if interruption.is_agreed:
            return interruption.code
        if self.engine.is_stopped:
            return STOPPED
        self._check_applied()
        return 0

    def _check_applied(self) -> None:
        """Raises NonFiniteError if no step of the run changed the weights."""
        if not self.checkpoints.progress.num_applied:
            raise NonFiniteError(
                f"none of the {self.checkpoints.num_batches} steps was applied, since the gradient was not finite or "
                "the batch had no weight: look at the data, or lower the learning rate"
            )

    def check_saved(self) -> None:
        """Raises OSError, once all else is written, if the last checkpoint could not be."""
        if (error := self._not_saved) is not None:
            raise OSError(
                error.errno,
                f"{error.strerror or error}: the last checkpoint is missing, but {self.folder.path / MODEL} and the "
                "rest of the run are written",
                error.filename,
            )

    def _save_last(self, *, is_in_step: bool) -> None:
        """Saves the last checkpoint. If that fails, the run still ends with its weights, summary and report."""
        try:
            self.checkpoints.save_last(is_in_step=is_in_step)
        except OSError as error:
            self._not_saved = error

    def _train(self, interruption: Interruption) -> None:
        steps, epochs = self.config.steps, self.config.epochs or 1
        if self.checkpoints.progress.num_epochs >= epochs if steps is None else self.checkpoints.num_batches >= steps:
            return
        began = time.perf_counter() - self.checkpoints.progress.seconds
        for batch, is_last in self.checkpoints.batches(self.batches, epochs if steps is None else sys.maxsize):
            self._step(batch, is_last, began)
            interruption.is_agreed |= self.ranks.agree(interruption.is_asked, batch, is_last)
            if interruption.is_agreed or self.engine.is_stopped or self.checkpoints.num_batches == steps:
                break

    def _step(self, batch: object, is_last: bool, began: float) -> None:
        done = self.checkpoints.progress
        lr = self.config.lr_at(done.num_applied, self.num_wanted)
        self.engine.set_lr(lr)
        num_samples = self.engine.num_samples(batch)
        step = self.engine.step(batch).as_dict()
        seconds = time.perf_counter() - began
        record = Record(
            step=self.checkpoints.num_batches, epoch=done.num_epochs, ends_epoch=is_last, **step,
            lr=lr, num_samples=num_samples, seconds=round(seconds, 4),
        )  # fmt: skip
        done.num_applied += record.is_applied
        done.num_samples += num_samples
        done.num_epochs += is_last
        done.seconds = seconds
        self.peak_bytes = self.engine.peak_bytes()
        self.checkpoints.add_line(self.folder.add_step(record))
        self.checkpoints.count()  # from here on the batch counts as done
        self.screen.step(record, done.num_samples, self.peak_bytes)

    # --- what it leaves --------------------------------------------------------------------------------------

    def finish(self, code: int) -> Summary:
        """Writes the weights, the summary and the report, and compares with the full batch. Returns the summary."""
        config, folder = self.config, self.folder
        self._write_weights()  # before the task's own evaluate(), which may fail
        summary = self._summary(code)
        folder.write_summary(summary)
        if config.compare and not code:
            summary = with_full_batch(summary, config, folder, self.screen)
            folder.write_summary(summary)
        write_report([folder.path], folder.path / REPORT)
        return summary

    def _write_weights(self) -> None:
        """Writes the weights into the run folder, or elsewhere if that cannot be written to."""
        weights = self.engine.weights()
        try:
            self.folder.write_weights(weights)
        except OSError as error:
            other = RunFolder(Path(tempfile.mkdtemp(prefix="bigbatch-")))
            other.write_weights(weights)
            where = f"the weights are in {other.path / MODEL} instead"
            raise OSError(error.errno, f"{error.strerror or error}: {where}", error.filename) from error

    def _summary(self, code: int) -> Summary:
        history = History.load(self.folder.path / HISTORY)
        losses = history.losses
        done, size = self.checkpoints.progress, self.config.micro_batch_size
        parts = rank_slices(self.config.batch_size, self.ranks.num)
        return Summary(
            version=__version__,
            task=self.task.name,
            framework=self.task.framework,
            device=self.engine.device,
            status="finished" if code == 0 else "stopped" if code == STOPPED else "interrupted",
            batch_size=self.config.batch_size,
            micro_batch_size=size,
            num_micro_batches=sum(-(-(part.stop - part.start) // size) for part in parts),
            num_ranks=self.ranks.num,
            num_steps=self.checkpoints.num_batches,
            num_epochs=done.num_epochs,
            num_samples=done.num_samples,
            loss=losses[-1] if losses else None,
            metrics={name: values[-1] for name, values in history.metrics.items()},
            scores=self.engine.scores(),
            seconds=round(done.seconds, 4),
            samples_per_second=round(done.num_samples / done.seconds, 2) if done.seconds else 0.0,
            peak_bytes=self.peak_bytes,
            full_batch=None,
            comparison=None,
            verification=None,
        )


def train(
    task: Task, config: Config, out: Path, screen: Screen, ranks: Launch, *, is_resumed: bool = False
) -> tuple[Summary | None, int]:
    """Trains, compares and reports. Returns the summary, which only rank 0 has, and the exit code."""
    folder = RunFolder(out) if ranks.is_first else ReadOnlyFolder(out)
    if not is_resumed:
        folder.check_new()
    training = _Training(task, config, folder, screen, ranks)
    with training.checkpoints:  # no other process may train in the folder while this one writes and compares
        training.begin(is_resumed=is_resumed)
        code = training.run()
        ranks.end()
        summary = training.finish(code) if ranks.is_first else None
        training.check_saved()
        return summary, code
