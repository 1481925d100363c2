"""The tables of a report: figures, verification, configuration."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .run import Run
from .text import Number, count, difference, duration, exact, number, rate, size, times

NUM_ERRORS_SHOWN = 20


@dataclass(frozen=True)
class Cell:
    """A figure in words; where it is a number, also its name in summary.json and its exact value."""

    text: str
    key: str = ""
    value: str = ""
    run: str = ""
    note: str = ""


@dataclass(frozen=True)
class Row:
    """One figure of all columns; without cells it is the heading of the rows below it."""

    label: str
    cells: tuple[Cell, ...] = ()


@dataclass(frozen=True)
class Table:
    """Columns and rows; the first column holds the labels."""

    columns: tuple[str, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Verdict:
    """The verification of one run: a sentence, the errors from the largest on, and the causes."""

    run: str
    sentence: str
    errors: tuple[Cell, ...]
    more: tuple[Cell, ...]
    causes: tuple[str, ...]
    is_exact: bool


# Name in summary.json, label, how it is written.
RESULTS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("seconds", "Time", duration),
    ("samples_per_second", "Samples a second", rate),
    ("peak_bytes", "Peak memory", size),
)
FACTS = (
    ("batch_size", "Batch"),
    ("micro_batch_size", "Micro-batch"),
    ("num_micro_batches", "Micro-batches a step"),
    ("num_steps", "Steps"),
    ("num_epochs", "Epochs"),
    ("num_samples", "Samples seen"),
)


def figures(names: Sequence[str], runs: Sequence[Run]) -> Table:
    """One run: accumulated beside the full batch. Several: one column for each."""
    return _of_one(names[0], runs[0]) if len(runs) == 1 else _of_several(names, runs)


def _of_one(name: str, run: Run) -> Table:
    summary, full_batch = run.summary, run.summary["full_batch"]
    has_full_batch = run.full_batch is not None
    rows = []
    for key, label, write in _compared([summary]):
        ours, theirs = _at(summary, key), _at(full_batch, key)
        cells = [_cell(name, key, ours, write)]
        if has_full_batch:
            cells += [_cell(name, f"full_batch.{key}", theirs, write), _difference(name, key, ours, theirs)]
        rows.append(Row(label, tuple(cells)))
    columns = ("Accumulated", "Full batch", "Difference") if has_full_batch else ("Accumulated",)
    return Table(columns, tuple(rows))


def distances(names: Sequence[str], runs: Sequence[Run]) -> Table:
    """How far one run ended from its full batch; of several runs the figures have it."""
    found = _comparison(names[0], runs[0]) if len(runs) == 1 else []
    return Table(("Accumulated against full batch",), tuple(Row(label, (cell,)) for label, cell in found))


def _of_several(names: Sequence[str], runs: Sequence[Run]) -> Table:
    summaries = [run.summary for run in runs]
    rows = [Row("What was trained")]
    for key, label in (("task", "Task"), ("framework", "Framework"), ("device", "Device"), ("status", "Status")):
        rows.append(Row(label, tuple(Cell(summary[key]) for summary in summaries)))
    for key, label in FACTS:
        rows.append(Row(label, tuple(_cell(n, key, s[key], number) for n, s in zip(names, summaries, strict=True))))
    compared = _compared(summaries)
    rows.append(Row("Accumulated"))
    for key, label, write in compared:
        cells = tuple(_cell(n, key, _at(s, key), write) for n, s in zip(names, summaries, strict=True))
        rows.append(Row(label, cells))
    if any(run.full_batch for run in runs):
        rows.append(Row("Full batch"))
        for key, label, write in compared:
            cells = tuple(
                _cell(name, f"full_batch.{key}", _at(run.summary["full_batch"], key), write)
                if run.full_batch
                else Cell("not trained" if run.summary["full_batch"] is None else "did not finish")
                for name, run in zip(names, runs, strict=True)
            )
            rows.append(Row(label, cells))
        rows.append(Row("Difference"))
        columns = [dict(_comparison(name, run)) for name, run in zip(names, runs, strict=True)]
        for label in ("Largest difference of a weight", "Largest difference of a step's loss"):
            rows.append(Row(label, tuple(column.get(label, Cell("not compared")) for column in columns)))
    return Table(tuple(names), tuple(rows))


def _compared(summaries: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, Callable[[Any], str]]]:
    """What accumulated and full batch both have: loss, held-out scores, time, speed, memory."""
    scores = dict.fromkeys(score for summary in summaries for score in summary["scores"])
    held_out = [(f"scores.{score}", f"Held-out {score}", number) for score in scores]
    return [("loss", "Loss of the last epoch", number), *held_out, *RESULTS]


def _comparison(name: str, run: Run) -> list[tuple[str, Cell]]:
    comparison = run.summary["comparison"]
    if comparison is None:
        return []
    weight = _cell(name, "comparison.max_weight_difference", comparison["max_weight_difference"], difference)
    if comparison["worst_weight"]:
        weight = Cell(weight.text, weight.key, weight.value, name, f"relative, in {comparison['worst_weight']}")
    loss = _cell(name, "comparison.max_loss_difference", comparison["max_loss_difference"], difference)
    return [("Largest difference of a weight", weight), ("Largest difference of a step's loss", loss)]


def _at(summary: Mapping[str, Any] | None, key: str) -> Any:
    """The value at 'scores.accuracy'; None where there is none. A score's own name may hold dots."""
    if summary is None:
        return None
    first, _, rest = key.partition(".")
    return (summary[first] or {}).get(rest) if rest else summary[first]


def _cell(run: str, key: str, value: Number | None, write: Callable[[Any], str]) -> Cell:
    return Cell("not known" if value is None else write(value), key, "null" if value is None else exact(value), run)


def _difference(run: str, key: str, ours: Number | None, theirs: Number | None) -> Cell:
    """Losses and scores are subtracted; times, speeds and sizes divided."""
    if ours is None or theirs is None or not (math.isfinite(ours) and math.isfinite(theirs)):
        return Cell("not comparable")
    if key == "loss" or key.startswith("scores."):
        distance = ours - theirs
        text = "none" if distance == 0 else f"{distance:+.1e}"
        return Cell(text, f"difference.{key}", exact(distance), run)
    if theirs <= 0:
        return Cell("not comparable")
    return Cell(times(ours / theirs), f"ratio.{key}", exact(ours / theirs), run)


def verifications(names: Sequence[str], runs: Sequence[Run]) -> list[Verdict]:
    """The verification of each run that has one."""
    pairs = [(name, run.summary["verification"]) for name, run in zip(names, runs, strict=True)]
    return [_verdict(name, found) for name, found in pairs if found is not None]


def _verdict(name: str, found: Mapping[str, Any]) -> Verdict:
    sentence = (
        f"among {count(len(found['errors']), 'parameter')} the largest error of the gradient is "
        f"{difference(found['max_error'])}, that of the whole gradient {difference(found['total_error'])}, "
        f"and {difference(found['tolerance'])} is allowed."
    )
    ordered = sorted(found["errors"].items(), key=lambda item: -math.inf if math.isnan(item[1]) else -item[1])
    cells = tuple(Cell(difference(error), parameter, exact(error), name) for parameter, error in ordered)
    shown, more = cells[:NUM_ERRORS_SHOWN], cells[NUM_ERRORS_SHOWN:]
    return Verdict(name, sentence, shown, more, tuple(found["causes"]), found["is_exact"])


def configuration(names: Sequence[str], runs: Sequence[Run]) -> Table:
    """Every option of every run as config.toml has it."""
    options = dict.fromkeys(option for run in runs for option in run.config)
    rows = [
        Row(option, tuple(Cell(_option(run.config[option]) if option in run.config else "not given") for run in runs))
        for option in options
    ]
    return Table(tuple(names) if len(runs) > 1 else ("Value",), tuple(rows))


def _option(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
