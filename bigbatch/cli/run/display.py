"""What a run shows: a bar in a terminal, lines elsewhere, or nothing."""

import math
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

LINE_EVERY = 5.0
"""Seconds between lines where there is no terminal."""


class Screen:
    """Shows the steps of a run. Everything goes to stderr but what `--json` asks for."""

    def __init__(self, *, is_quiet: bool = False) -> None:
        self.console = Console(stderr=True, quiet=is_quiet, highlight=False)
        self._progress: Progress | None = None
        self._last_line = -math.inf
        self._total: int | None = None
        self._name = ""

    def start(self, name: str, total: int | None, completed: int = 0) -> None:
        self._name, self._total = name, total
        self._last_line = -math.inf
        if not self.console.is_terminal or self.console.quiet:
            return
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(), console=self.console,
        )  # fmt: skip
        self._progress.start()
        self._bar = self._progress.add_task(name, total=total, completed=completed, figures="")

    def step(self, number: int, record: Mapping[str, Any], peak_bytes: int | None) -> None:
        """`number` steps are done; the last is `record`."""
        figures = figures_of(record, peak_bytes)
        if self._progress is not None:
            self._progress.update(self._bar, completed=number, figures=figures)
            return
        is_last = number == self._total
        if time.monotonic() - self._last_line >= LINE_EVERY or is_last:
            self._last_line = time.monotonic()
            of = "" if self._total is None else f"/{self._total}"
            self.console.print(f"{self._name}: step {number}{of}  {figures}", soft_wrap=True)

    def steps_done(self, number: int) -> None:
        """For a run that is watched from outside."""
        if self._progress is not None:
            self._progress.update(self._bar, completed=number)

    def end(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def leave(self) -> None:
        """For a process that ends at once: gives back the cursor, which the bar hides, and waits for nobody."""
        if self._progress is not None:
            os.write(sys.stderr.fileno(), b"\x1b[?25h\n")

    def note(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, markup=False)

    def table(self, summary: Mapping[str, Any], folder: str) -> None:
        """The closing table."""
        ranks = f", {summary['num_ranks']} ranks" if summary["num_ranks"] > 1 else ""
        table = Table(title=f"{summary['task']} on {summary['framework']}{ranks}", title_justify="left")
        full = summary["full_batch"]
        has_full = full is not None and full["status"] == "finished"
        table.add_column("")
        table.add_column(f"{summary['num_micro_batches']} × {summary['micro_batch_size']}", justify="right")
        if has_full:
            table.add_column("full batch", justify="right")
        for name, ours, theirs in closing_rows(summary):
            table.add_row(name, ours, *([theirs] if has_full else []))
        self.console.print(table)
        comparison = summary["comparison"]
        if comparison is not None:
            self.note(
                f"largest difference of a weight, relative: {comparison['max_weight_difference']:.1e} "
                f"({comparison['worst_weight']})"
            )
        elif full is not None:
            self.note(f"no comparison with the full batch: {full['reason']}")
        if found := summary["verification"]:
            verdict = "exact" if found["is_exact"] else "NOT exact"
            self.note(f"gradient of the first batch: {verdict}, the largest error is {found['max_error']:.1e}")
            for cause in found["causes"]:
                self.note(f"- {cause}")
        self.note(f"everything is in {folder}")


def closing_rows(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Name, accumulated, full batch."""
    full = summary["full_batch"] or {}
    rows = [("loss of the last epoch", number(summary["loss"]), number(full.get("loss")))]
    for name, value in summary["scores"].items():
        rows.append((f"{name} on held-out data", number(value), number((full.get("scores") or {}).get(name))))
    rows += [
        ("peak memory of training", size(summary["peak_bytes"]), size(full.get("peak_bytes"))),
        ("time", f"{summary['seconds']:.1f} s", f"{full['seconds']:.1f} s" if full.get("seconds") else "–"),
        ("samples per second", rate(summary["samples_per_second"]), rate(full.get("samples_per_second"))),
    ]
    return rows


def figures_of(record: Mapping[str, Any], peak_bytes: int | None) -> str:
    parts = [f"loss {record['loss']:.4f}"]
    if record["grad_norm"] is not None:
        parts.append(f"norm {record['grad_norm']:.3g}")
    if record["seconds"] > 0:
        parts.append(f"{record['samples_so_far'] / record['seconds']:.0f} samples/s")
    parts.append(f"{record['num_micro_batches']} × {record['micro_batch_size']}")
    if peak_bytes is not None:
        parts.append(size(peak_bytes))
    if not record["is_applied"]:
        parts.append("not applied")
    return "  ".join(parts)


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def rate(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def size(num_bytes: int | None) -> str:
    return "–" if num_bytes is None else f"{num_bytes / 2**20:.0f} MiB"
