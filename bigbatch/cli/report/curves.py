"""Which plots a report has, with their captions and legends. A plot without data says why in words."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..summary import Record, Summary
from . import plots
from .plots import Curve, Drawing, Look
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
    found = []
    for number, (name, run) in enumerate(zip(names, runs, strict=True)):
        colour, dash, marker = number % plots.NUM_COLOURS, number % len(plots.DASHES), number % len(plots.MARKERS)
        if run.full_batch is not None:
            line, point = Look(colour, is_wide=True, is_pale=True), Look(colour, marker=marker, is_hollow=True)
            found.append(_Series(f"{name}, full batch", run.full_batch, line, point))
        found.append(_Series(name, run, Look(colour, dash=dash), Look(colour, marker=marker)))
    return found


def make_plots(names: Sequence[str], runs: Sequence[Run]) -> Iterator[_Plot]:
    """All plots of a report, in the order of the page."""
    series = _series_of(names, runs)
    ours = [one for one in series if not one.line.is_wide]
    both = " of accumulated and full-batch training" if len(ours) < len(series) else ""
    by_time = f"The loss of each step{both}, by the time since training began."
    yield _over("loss", "Loss over steps", f"The loss of each step{both}, by step.", "step", "loss", series)
    yield _over("loss-time", "Loss over time", by_time, "seconds", "loss", series)
    yield _loss_difference(ours)
    norm = "The norm of the whole gradient of each step, before clipping."
    yield _over("grad-norm", "Gradient norm", norm, "step", "grad_norm", series)
    yield _memory(series)
    yield _throughput(ours, series)
    if any(len({record.lr for record in one.run.records}) > 1 for one in ours):
        yield _over("lr", "Learning rate", "The learning rate of each step.", "step", "lr", ours)


_LABELS = {
    "loss": "loss",
    "grad_norm": "gradient norm",
    "lr": "learning rate",
    "step": "step",
    "seconds": "seconds since training began",
}


def _over(name: str, title: str, caption: str, x: str, y: str, series: Sequence[_Series]) -> _Plot:
    """A value of every step over its number or its time."""
    kept, curves, num_left_out = [], [], 0
    for one in series:
        values = [(getattr(record, x), getattr(record, y)) for record in one.run.records]
        known = [pair for pair in values if None not in pair]
        curve = Curve(one.line, [pair[0] for pair in known], [pair[1] for pair in known])
        num_drawn = len(curve.points()[0])
        num_left_out += len(known) - num_drawn
        if num_drawn:
            kept.append(one)
            curves.append(curve)
    label = _LABELS[y]
    if not curves:
        has_steps = any(one.run.records for one in series)
        unknown = f"No {label} was recorded." if has_steps else "No step was finished."
        return _Plot(name, title, f"The {label} is not finite in any step." if num_left_out else unknown)
    if num_left_out:
        verb, whose = ("is", "its") if num_left_out == 1 else ("are", "their")
        caption += f" {count(num_left_out, 'step')} {verb} left out because {whose} {label} is not finite."
    drawing = plots.lines(name, curves, x=_LABELS[x], y=label)
    return _Plot(name, title, caption + _thinned(curves) + _absent(series, kept), drawing, _legend(kept))


def _absent(series: Sequence[_Series], kept: Sequence[_Series]) -> str:
    absent = [one.label for one in series if one not in kept]
    return f" Nothing was recorded for {listed(absent)}." if absent else ""


def _thinned(curves: Sequence[Curve]) -> str:
    is_thinned = any(len(curve.xs) > plots.MAX_POINTS for curve in curves)
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
        found = [(record.step, abs(record.loss - theirs[record.step])) for record in both]
        found = [(step, distance) for step, distance in found if distance < plots.LARGEST]  # false for NaN, too
        curve = Curve(one.line, [step for step, _ in found], [distance for _, distance in found])
        if any(curve.ys):
            keys.append(_Key(one.line, one.label if len(ours) > 1 else "|accumulated − full batch|"))
            curves.append(curve)
            num_zeros += curve.ys.count(0)
        elif found:
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
    title = "Memory against micro-batch size"
    return _over_sizes("memory", title, caption, f"peak memory, {unit}", "peak memory", series, peak)


def _throughput(ours: Sequence[_Series], series: Sequence[_Series]) -> _Plot:
    name = "throughput"
    if len({one.run.summary.micro_batch_size for one in ours}) > 1:
        title, caption = "Throughput against micro-batch size", "Samples trained per second, over the whole run."
        return _over_sizes(name, title, caption, "samples / s", name, series, lambda found: found.samples_per_second)
    title, caption = "Throughput over steps", "Samples trained per second, step by step."
    found = [(one, Curve(one.line, *_rates(one.run.records))) for one in series]
    kept = [(one, curve) for one, curve in found if len(curve.xs)]
    if not kept:
        return _Plot(name, title, "Too few steps were finished to measure a throughput.")
    if any(len(one.run.records) - 1 > _NUM_STRETCHES for one, _ in kept):
        caption = f"Samples trained per second, each point the mean of a {_NUM_STRETCHES}th of the run."
    caption += " The first step, which also prepares the rest, is left out."
    drawing = plots.lines(name, [curve for _, curve in kept], x="step", y="samples / s", from_zero=True)
    return _Plot(name, title, caption, drawing, _legend([one for one, _ in kept]))


def _rates(records: Sequence[Record]) -> tuple[list[float], list[float]]:
    """Samples per second over stretches of steps. Stretches without a known time are left out."""
    length = max(1, math.ceil((len(records) - 1) / _NUM_STRETCHES))
    steps, rates = [], []
    for start, end in pairwise([*range(0, len(records), length)]):
        first, last = records[start].seconds, records[end].seconds
        seconds = 0 if first is None or last is None else last - first
        if seconds > 0:
            steps.append(float(records[end].step))
            rates.append(sum(record.num_samples for record in records[start + 1 : end + 1]) / seconds)
    return steps, rates


def _over_sizes(
    name: str,
    title: str,
    caption: str,
    y: str,
    noun: str,
    series: Sequence[_Series],
    value: Callable[[Summary], float | None],
) -> _Plot:
    """One point per training; the full batch is a micro-batch as large as the batch."""
    known: list[tuple[_Series, Curve]] = []
    groups: dict[tuple[str, ...], list[tuple[int, float]]] = {}
    for one in series:
        summary, found = one.run.summary, value(one.run.summary)
        size = summary.micro_batch_size
        if size > 0 and found is not None and abs(found) < plots.LARGEST:
            known.append((one, Curve(one.point, [size], [found])))
            groups.setdefault((summary.task, summary.framework, summary.device), []).append((size, found))
    sizes = {curve.xs[0] for _, curve in known}
    if not known:
        return _Plot(name, title, f"The {noun} of the training is not known.")
    if len(sizes) < 2:
        known_for = f"The {noun} is known for one micro-batch size only, {max(sizes):,}"
        return _Plot(name, title, f"{known_for}: a report of several runs draws it against the size.")
    trends = [Curve(Look(0), [x for x, _ in group], [y for _, y in group]) for group in groups.values()]
    kept = [one for one, _ in known]
    if any(one.point.is_hollow for one in kept):
        caption += " The full batch is a micro-batch as large as the batch."
    drawing = plots.points(name, [curve for _, curve in known], trends, x="micro-batch size", y=y)
    return _Plot(name, title, caption + _absent(series, kept), drawing, _legend(kept, is_point=True))
