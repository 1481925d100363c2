"""What a run shows: a bar in a terminal, lines elsewhere, or nothing."""

import math
import os
import sys
import time
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..names import shown
from ..report.tables import measures
from ..report.text import difference, rate, size
from ..summary import FullBatch, Record, Summary

_LINE_EVERY = 5.0
"""Seconds between lines where there is no terminal."""
_NUM_METRICS = 3
"""How many metrics a line has; the report has all of them."""


class Screen:
    """Shows a run on stderr."""

    def __init__(self, *, is_quiet: bool = False) -> None:
        self.console = Console(stderr=True, quiet=is_quiet, highlight=False)

    def start(self, name: str, total: int | None, completed: int = 0) -> None:
        """Starts the bar of a training, or its lines where there is no terminal."""
        self._name, self._last_line = name, -math.inf
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(), console=self.console, disable=not self.console.is_terminal or self.console.quiet,
        )  # fmt: skip
        self._progress.start()
        self._bar = self._progress.add_task(escape(shown(name)), total=total, completed=completed, figures="")

    def step(self, record: Record, num_samples: int, peak_bytes: int | None) -> None:
        """Shows a step, with the samples and the peak memory of the run so far."""
        num_steps, figures = record.step + 1, _figures(record, num_samples, peak_bytes)
        self.steps_done(num_steps, figures)
        total = self._progress.tasks[0].total
        is_due = time.monotonic() - self._last_line >= _LINE_EVERY or num_steps == total
        if self._progress.disable and is_due:
            self._last_line = time.monotonic()
            of_total = "" if total is None else f"/{total}"
            self.note(f"{self._name}: step {num_steps}{of_total}  {figures}")

    def steps_done(self, num_steps: int, figures: str = "") -> None:
        """Shows how far a run, maybe in another process, has come."""
        self._progress.update(self._bar, completed=num_steps, figures=figures)

    def end(self) -> None:
        self._progress.stop()

    def leave(self) -> None:
        """Shows the cursor again, which the bar hides, before the process ends at once."""
        if not self._progress.disable:
            os.write(sys.stderr.fileno(), b"\x1b[?25h\n")

    def note(self, text: str) -> None:
        self.console.print(shown(text), soft_wrap=True, markup=False)

    def summary(self, summary: Summary, folder: Path) -> None:
        """Shows the closing table, the comparison and the verification."""
        full = summary.full_batch
        columns: dict[str, Summary | FullBatch] = {f"{summary.num_micro_batches} × {summary.micro_batch_size}": summary}
        if full is not None and full.is_finished:
            columns["full batch"] = full
        ranks = f", {summary.num_ranks} ranks" if summary.num_ranks > 1 else ""
        table = Table(title=escape(shown(f"{summary.task} on {summary.framework}{ranks}")), title_justify="left")
        table.add_column("")
        for title in columns:
            table.add_column(title, justify="right")
        for measure in measures([summary]):
            table.add_row(escape(shown(measure.label)), *map(measure.text, columns.values()))
        self.console.print(table)
        if (comparison := summary.comparison) is not None:
            largest = difference(comparison.max_weight_difference)
            self.note(f"largest relative difference of a weight: {largest} ({comparison.worst_weight})")
        elif full is not None:
            self.note(f"no comparison with the full batch: {full.reason}")
        if (found := summary.verification) is not None:
            verdict = "exact" if found.is_exact else "NOT exact"
            self.note(f"gradient of the first batch: {verdict}, the largest error is {difference(found.max_error)}")
            for cause in found.causes:
                self.note(f"- {cause}")
        self.note(f"everything is in {folder}")


def _figures(record: Record, num_samples: int, peak_bytes: int | None) -> str:
    figures = [f"loss {record.loss:.4f}"]
    figures += [f"{shown(name)} {value:.4g}" for name, value in islice(record.metrics.items(), _NUM_METRICS)]
    if record.grad_norm is not None:
        figures.append(f"norm {record.grad_norm:.3g}")
    if record.seconds:
        figures.append(f"{rate(num_samples / record.seconds)} samples/s")
    figures.append(f"{record.num_micro_batches} × {record.micro_batch_size}")
    if peak_bytes is not None:
        figures.append(size(peak_bytes))
    if not record.is_applied:
        figures.append("not applied")
    return "  ".join(figures)
