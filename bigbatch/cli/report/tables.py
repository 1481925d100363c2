"""The tables of a report: figures, verification, configuration."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...core.verify.result import Verification
from ..summary import FullBatch, Summary
from .run import Run
from .text import count, difference, duration, exact, number, rate, size


@dataclass(frozen=True)
class _Cell:
    """A figure in words. If it is a number, the cell also has its place in summary.json and its exact value."""

    text: str
    key: str = ""
    value: str = ""
    run: str = ""
    note: str = ""
    kind: str = "key"  # or "error", where the key is the name of a parameter


@dataclass(frozen=True)
class _Row:
    """One figure for every column; without cells it is the heading of the rows below it."""

    label: str
    cells: tuple[_Cell, ...] = ()


@dataclass(frozen=True)
class Table:
    """Columns and rows. The first column has the labels and no name."""

    columns: tuple[str, ...]
    rows: tuple[_Row, ...]


@dataclass(frozen=True)
class _Verdict:
    """The verification of one run: a sentence, and the errors from the largest on."""

    run: str
    found: Verification
    sentence: str
    errors: list[_Row]


@dataclass(frozen=True)
class _Measure:
    """A figure of a training: where summary.json has it, what it is called, and how it is written."""

    key: str
    """Its place in summary.json: the name of a field, or "scores." or "metrics." and the name of one of these."""
    label: str
    write: Callable[[Any], str]

    def value(self, result: Summary | FullBatch) -> Any:
        field, _, name = self.key.partition(".")  # the name of a score may have dots
        found = getattr(result, field)
        return found.get(name) if name else found

    def text(self, result: Summary | FullBatch) -> str:
        return self.write(self.value(result))

    def cell(self, run: str, result: Summary | FullBatch) -> _Cell:
        prefix = "full_batch." if isinstance(result, FullBatch) else ""
        return _Cell(self.text(result), prefix + self.key, exact(self.value(result)), run)


FACTS = (
    _Measure("batch_size", "Batch", number),
    _Measure("micro_batch_size", "Micro-batch", number),
    _Measure("num_micro_batches", "Micro-batches per step", number),
    _Measure("num_steps", "Steps", number),
    _Measure("num_epochs", "Epochs", number),
    _Measure("num_samples", "Samples seen", number),
)
_DISTANCES = (
    ("max_weight_difference", "Largest difference of a weight"),
    ("max_loss_difference", "Largest difference of a step's loss"),
)


def measures(summaries: Sequence[Summary]) -> list[_Measure]:
    """Loss, metrics, held-out scores, time, speed and memory."""
    metrics = dict.fromkeys(metric for summary in summaries for metric in summary.metrics)
    scores = dict.fromkeys(score for summary in summaries for score in summary.scores)
    return [
        _Measure("loss", "Loss of the last epoch", number),
        *(_Measure(f"metrics.{metric}", f"{metric} of the last epoch", number) for metric in metrics),
        *(_Measure(f"scores.{score}", f"Held-out {score}", number) for score in scores),
        _Measure("seconds", "Time", duration),
        _Measure("samples_per_second", "Samples per second", rate),
        _Measure("peak_bytes", "Peak memory", size),
    ]


def figures(names: Sequence[str], runs: Sequence[Run]) -> Table:
    """One run: accumulated beside the full batch. Several: one column for each."""
    if len(runs) > 1:
        return _figures_of_several(names, runs)
    name, run = names[0], runs[0]
    summary, full = run.summary, run.summary.full_batch
    if full is None or not full.is_finished:
        return Table(
            ("Accumulated",), tuple(_Row(each.label, (each.cell(name, summary),)) for each in measures([summary]))
        )
    rows = [
        _Row(each.label, (each.cell(name, summary), each.cell(name, full), _difference(name, each, summary, full)))
        for each in measures([summary])
    ]
    rows += [_Row(label, (_Cell(""), _Cell(""), _distance(name, summary, key))) for key, label in _DISTANCES]
    return Table(("Accumulated", "Full batch", "Difference"), tuple(rows))


def _figures_of_several(names: Sequence[str], runs: Sequence[Run]) -> Table:
    summaries = [run.summary for run in runs]
    pairs = list(zip(names, summaries, strict=True))
    rows = [_Row("What was trained")]
    for key in ("task", "framework", "device", "status"):
        rows.append(_Row(key.capitalize(), tuple(_Cell(getattr(summary, key)) for summary in summaries)))
    rows += [_Row(each.label, tuple(each.cell(*pair) for pair in pairs)) for each in FACTS]
    rows.append(_Row("Accumulated"))
    rows += [_Row(each.label, tuple(each.cell(*pair) for pair in pairs)) for each in measures(summaries)]
    if any(run.full_batch for run in runs):
        rows.append(_Row("Full batch"))
        rows += [
            _Row(each.label, tuple(_full_batch_cell(*pair, each) for pair in pairs)) for each in measures(summaries)
        ]
        rows.append(_Row("Difference"))
        rows += [_Row(label, tuple(_distance(*pair, key) for pair in pairs)) for key, label in _DISTANCES]
    return Table(tuple(names), tuple(rows))


def _full_batch_cell(run: str, summary: Summary, measure: _Measure) -> _Cell:
    if summary.full_batch is None:
        return _Cell("not trained")
    return measure.cell(run, summary.full_batch) if summary.full_batch.is_finished else _Cell("did not finish")


def _distance(run: str, summary: Summary, key: str) -> _Cell:
    comparison = summary.comparison
    if comparison is None:
        return _Cell("not compared")
    value, is_of_weight = getattr(comparison, key), key == "max_weight_difference"
    note = f"relative, in {comparison.worst_weight}" if is_of_weight and comparison.worst_weight else ""
    return _Cell(difference(value), f"comparison.{key}", exact(value), run, note)


def _difference(run: str, measure: _Measure, summary: Summary, full: FullBatch) -> _Cell:
    """Losses and scores are subtracted; times, speeds and sizes divided."""
    ours, theirs = measure.value(summary), measure.value(full)
    if ours is None or theirs is None or not (math.isfinite(ours) and math.isfinite(theirs)):
        return _Cell("not comparable")
    if measure.key == "loss" or measure.key.startswith(("scores.", "metrics.")):
        distance = ours - theirs
        text = "none" if distance == 0 else f"{distance:+.1e}"
        return _Cell(text, f"difference.{measure.key}", exact(distance), run)
    if theirs <= 0:
        return _Cell("not comparable")
    return _Cell(f"{ours / theirs:.3g} times", f"ratio.{measure.key}", exact(ours / theirs), run)


def verifications(names: Sequence[str], runs: Sequence[Run]) -> list[_Verdict]:
    """The verification of each run that has one."""
    verdicts = []
    for name, run in zip(names, runs, strict=True):
        if (found := run.summary.verification) is not None:
            sentence = (
                f"among {count(len(found.errors), 'parameter')} the largest error of the gradient is "
                f"{difference(found.max_error)}, that of the whole gradient {difference(found.total_error)}, "
                f"and {difference(found.tolerance)} is allowed."
            )
            errors = sorted(found.errors.items(), key=lambda item: -math.inf if math.isnan(item[1]) else -item[1])
            rows = [
                _Row(parameter, (_Cell(difference(error), parameter, exact(error), name, kind="error"),))
                for parameter, error in errors
            ]
            verdicts.append(_Verdict(name, found, sentence, rows))
    return verdicts


def configuration(names: Sequence[str], runs: Sequence[Run]) -> Table:
    """Every option of every run as config.toml has it."""
    options = dict.fromkeys(option for run in runs for option in run.config)
    rows = [_Row(each, tuple(_Cell(_option(run.config.get(each, "not given"))) for run in runs)) for each in options]
    return Table(tuple(names) if len(runs) > 1 else ("Value",), tuple(rows))


def _option(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
