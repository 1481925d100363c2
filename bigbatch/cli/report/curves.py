"""Which plots a report has, with their captions and legends. A plot without data says why in words."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..summary import Record, Summary
from . import plots
from .plots import Curve, Drawing, Look, Point
from .run import Run
from .text import count, listed, unit_of

_NUM_STRETCHES = 60


@dataclass(frozen=True)
class _Key:
    """An entry of a legend."""

    look: Look
    label: str
    is_point: bool = False


@dataclass(frozen=True)
class _Plot:
    """A figure of the page. Without a drawing, its caption says why there is none."""

    name: str
    title: str
    caption: str
    drawing: Drawing | None = None
    legend: tuple[_Key, ...] = ()


@dataclass(frozen=True)
class _Series:
    """One training: that of a run, or that of its full batch, which is drawn wide."""

    label: str
    run: Run
    line: Look
    point: Look


def _series_of(names: Sequence[str], runs: Sequence[Run]) -> list[_Series]:
    """Every training of every run; a full batch comes before its run, so that it lies underneath."""
    if len(runs) == 1:
        ours = _Series("accumulated", runs[0], Look(0), Look(0))
        full = Look(1, dash=4, is_wide=True), Look(1, marker=1, is_hollow=True)
        return [*([_Series("full batch", runs[0].full_batch, *full)] if runs[0].full_batch else []), ours]
    series = []
    for number, (name, run) in enumerate(zip(names, runs, strict=True)):
        colour, dash, marker = number % plots.NUM_COLOURS, number % len(plots.DASHES), number % len(plots.MARKERS)
        if run.full_batch is not None:
            line, point = Look(colour, is_wide=True, is_pale=True), Look(colour, marker=marker, is_hollow=True)
            series.append(_Series(f"{name}, full batch", run.full_batch, line, point))
        series.append(_Series(name, run, Look(colour, dash=dash), Look(colour, marker=marker)))
    return series


def make_plots(names: Sequence[str], runs: Sequence[Run]) -> Iterator[_Plot]:
    """All plots of a report, in the order of the page."""
    series = _series_of(names, runs)
    ours = [one for one in series if not one.line.is_wide]
    both = " of accumulated and full-batch training" if len(ours) < len(series) else ""
    by_time = f"The loss of each step{both}, by the time since training began."
    yield _over_steps("loss", "Loss over steps", f"The loss of each step{both}, by step.", "step", "loss", series)
    yield _over_steps("loss-time", "Loss over time", by_time, "seconds", "loss", series)
    yield _loss_difference(ours)
    metrics = dict.fromkeys(metric for one in series for record in one.run.records for metric in record.metrics)
    for number, metric in enumerate(metrics):
        caption = f"What the loss returned as {metric} beside its value, for the batch of each step."
        yield _over_steps(
            f"metric-{number}", f"{metric} over steps", caption, "step", metric, series, _metrics_of(metric), metric
        )
    norm = "The norm of the whole gradient of each step, before clipping."
    yield _over_steps("grad-norm", "Gradient norm", norm, "step", "grad_norm", series)
    yield _memory(series)
    yield _throughput(ours, series)
    if any(len({record.lr for record in one.run.records}) > 1 for one in ours):
        yield _over_steps("lr", "Learning rate", "The learning rate of each step.", "step", "lr", ours)


_LABELS = {
    "loss": "loss",
    "grad_norm": "gradient norm",
    "lr": "learning rate",
    "rate": "throughput, samples / s",
    "step": "step",
    "seconds": "seconds since training began",
}


def _over_steps(
    name: str,
    title: str,
    caption: str,
    x: str,
    y: str,
    series: Sequence[_Series],
    points_of: Callable[[Sequence[Record]], list[Point]] | None = None,
    label: str | None = None,
) -> _Plot:
    """A value of every step over its number or its time, or the points that `points_of` makes of the steps."""
    kept, curves, num_left_out = [], [], 0
    for one in series:
        records = one.run.records
        found = points_of(records) if points_of else [(getattr(each, x), getattr(each, y)) for each in records]
        curve = Curve(one.line, [point for point in found if None not in point])
        num_drawn = len(curve.arrays()[0])
        num_left_out += len(curve.points) - num_drawn
        if num_drawn:
            kept.append(one)
            curves.append(curve)
    label = _LABELS[y] if label is None else label
    noun = label.partition(",")[0]
    if not curves:
        has_steps = any(one.run.records for one in series)
        unknown = f"No {noun} was recorded." if has_steps else "No step was finished."
        return _Plot(name, title, f"The {noun} is not finite in any step." if num_left_out else unknown)
    if num_left_out:
        verb, whose = ("is", "its") if num_left_out == 1 else ("are", "their")
        caption += f" {count(num_left_out, 'step')} {verb} left out because {whose} {noun} is not finite."
    drawing = plots.lines(name, curves, x=_LABELS[x], y=label, from_zero=points_of is _rates)
    return _Plot(name, title, caption + _thinned(curves) + _absent(series, kept), drawing, _legend(kept))


def _absent(series: Sequence[_Series], kept: Sequence[_Series]) -> str:
    absent = [one.label for one in series if one not in kept]
    return f" Nothing was recorded for {listed(absent)}." if absent else ""


def _thinned(curves: Sequence[Curve]) -> str:
    is_thinned = any(len(curve.points) > plots.MAX_POINTS for curve in curves)
    return f" Of long runs, {plots.MAX_POINTS} steps are drawn, including every spike." if is_thinned else ""


def _legend(series: Sequence[_Series], is_point: bool = False) -> tuple[_Key, ...]:
    """One entry per run; of several runs the full batches have one entry together."""
    keys = [_Key(one.point if is_point else one.line, one.label, is_point) for one in series]
    ours = [key for key, one in zip(keys, series, strict=True) if not one.line.is_wide]
    full = [key for key, one in zip(keys, series, strict=True) if one.line.is_wide]
    if any(key.look.is_pale or key.look.is_hollow for key in full) and len(ours) > 1:
        full = [_Key(full[0].look, "full batch, in the colour of its run", is_point)]
    return (*ours, *full)


def _loss_difference(ours: Sequence[_Series]) -> _Plot:
    name, title = "difference", "Difference of the losses"
    pairs = [(one, one.run.full_batch) for one in ours if one.run.full_batch is not None]
    if not pairs:
        return _Plot(name, title, "There is no full-batch training that finished, so there is no difference to draw.")
    keys, curves, equal, num_zeros = [], [], [], 0
    for one, full in pairs:
        theirs = {record.step: record.loss for record in full.records}
        both = [record for record in one.run.records if record.step in theirs]
        curve = Curve(one.line, [(record.step, abs(record.loss - theirs[record.step])) for record in both])
        _, distances = curve.arrays()
        if distances.any():
            keys.append(_Key(one.line, one.label if len(ours) > 1 else "|accumulated − full batch|"))
            curves.append(curve)
            num_zeros += int((distances == 0).sum())
        elif len(distances):
            equal.append(one.label)
    if not curves and not equal:
        return _Plot(name, title, "No step of both trainings has a finite loss, so there is no difference to draw.")
    if not curves:
        text = "The losses of accumulated and full-batch training are equal to the last bit in every step."
        return _Plot(name, title, text)
    caption = "How far the loss of a step is from that of full-batch training, on a log scale."
    if num_zeros:
        caption += f" Triangles at the bottom mark {count(num_zeros, 'step')} without any difference."
    if equal:
        caption += f" In {listed(equal)} the losses are equal to the last bit."
    drawing = plots.lines(name, curves, x="step", y="|difference of the loss|", is_log=True)
    return _Plot(name, title, caption + _thinned(curves), drawing, tuple(keys))


def _memory(series: Sequence[_Series]) -> _Plot:
    largest = max((abs(one.run.summary.peak_bytes or 0) for one in series), default=0)
    unit, num_bytes = unit_of(largest)

    def peak(summary: Summary) -> float | None:
        return None if summary.peak_bytes is None else summary.peak_bytes / num_bytes

    caption = "What training added to the memory in use, at its peak."
    return _over_sizes("memory", "Memory against micro-batch size", caption, f"peak memory, {unit}", series, peak)


def _throughput(ours: Sequence[_Series], series: Sequence[_Series]) -> _Plot:
    name = "throughput"
    if len({one.run.summary.micro_batch_size for one in ours}) > 1:
        title, caption = "Throughput against micro-batch size", "Samples trained per second, over the whole run."
        return _over_sizes(name, title, caption, _LABELS["rate"], series, lambda found: found.samples_per_second)
    caption = "Samples trained per second, step by step."
    if any(len(one.run.records) - 1 > _NUM_STRETCHES for one in series):
        caption = f"Samples trained per second, each point the mean of a {_NUM_STRETCHES}th of the run."
    caption += " The first step, which also prepares the rest, is left out."
    return _over_steps(name, "Throughput over steps", caption, "step", "rate", series, _rates)


def _rates(records: Sequence[Record]) -> list[Point]:
    """Samples per second over stretches of steps. Stretches without a known time are left out."""
    length = max(1, math.ceil((len(records) - 1) / _NUM_STRETCHES))
    rates = []
    for start, end in pairwise([*range(0, len(records), length)]):
        first, last = records[start].seconds, records[end].seconds
        seconds = 0 if first is None or last is None else last - first
        if seconds > 0:
            num_samples = sum(record.num_samples for record in records[start + 1 : end + 1])
            rates.append((records[end].step, num_samples / seconds))
    return rates


def _metrics_of(name: str) -> Callable[[Sequence[Record]], list[Point]]:
    return lambda records: [(each.step, each.metrics[name]) for each in records if name in each.metrics]


def _over_sizes(
    name: str,
    title: str,
    caption: str,
    y: str,
    series: Sequence[_Series],
    value: Callable[[Summary], float | None],
) -> _Plot:
    """One point per training; the full batch is a micro-batch as large as the batch."""
    kept: list[_Series] = []
    curves: list[Curve] = []
    trends: dict[tuple[str, ...], list[Point]] = {}
    for one in series:
        summary, found = one.run.summary, value(one.run.summary)
        size = summary.micro_batch_size
        if size > 0 and found is not None and abs(found) < plots.LARGEST:
            kept.append(one)
            curves.append(Curve(one.point, [(size, found)]))
            trends.setdefault((summary.task, summary.framework, summary.device), []).append((size, found))
    noun = y.partition(",")[0]
    if not kept:
        return _Plot(name, title, f"The {noun} of the training is not known.")
    if len({one.run.summary.micro_batch_size for one in kept}) < 2:
        known_for = f"The {noun} is known for one micro-batch size only, {kept[0].run.summary.micro_batch_size:,}"
        return _Plot(name, title, f"{known_for}: a report of several runs draws it against the size.")
    if any(one.point.is_hollow for one in kept):
        caption += " The full batch is a micro-batch as large as the batch."
    drawing = plots.points(name, curves, list(trends.values()), x="micro-batch size", y=y)
    return _Plot(name, title, caption + _absent(series, kept), drawing, _legend(kept, is_point=True))
