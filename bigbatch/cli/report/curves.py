"""Which plots a report has: their captions and legends, and what is said where there is nothing to draw."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from . import plots
from .plots import Curve, Drawing, Look
from .run import Run
from .text import count, listed, unit_of

NUM_STRETCHES = 60


@dataclass(frozen=True)
class Key:
    """An entry of a legend."""

    look: Look
    label: str
    is_point: bool = False


@dataclass(frozen=True)
class Plot:
    """A figure of the page; without a drawing its caption says why there is none."""

    name: str
    title: str
    caption: str
    drawing: Drawing | None = None
    legend: tuple[Key, ...] = ()


@dataclass(frozen=True)
class Series:
    """One training: that of a run, or that of its full batch."""

    label: str
    run: Run
    line: Look
    point: Look


def series_of(names: Sequence[str], runs: Sequence[Run]) -> list[Series]:
    """Every training of every run, the full batch first, so that it lies underneath."""
    if len(runs) == 1:
        ours = Series("accumulated", runs[0], Look(0), Look(0))
        full = Look(1, dash=4, is_wide=True), Look(1, marker=1, is_hollow=True)
        return [*([Series("full batch", runs[0].full_batch, *full)] if runs[0].full_batch else []), ours]
    found = []
    for number, (name, run) in enumerate(zip(names, runs, strict=True)):
        colour, dash, marker = number % plots.NUM_COLOURS, number % len(plots.DASHES), number % len(plots.MARKERS)
        if run.full_batch is not None:
            line, point = Look(colour, is_wide=True, is_pale=True), Look(colour, marker=marker, is_hollow=True)
            found.append(Series(f"{name}, full batch", run.full_batch, line, point))
        found.append(Series(name, run, Look(colour, dash=dash), Look(colour, marker=marker)))
    return found


def make_plots(names: Sequence[str], runs: Sequence[Run]) -> Iterator[Plot]:
    """All plots of a report, in the order of the page."""
    series = series_of(names, runs)
    pairs = [(name, run) for name, run in zip(names, runs, strict=True) if run.full_batch is not None]
    both = " of accumulated and full-batch training" if pairs else ""
    yield _over("loss", "Loss over steps", f"The loss of each step{both}, by step.", "step", "loss", series)
    yield _over("loss-time", "Loss over time", f"The loss of each step{both}, by the time since training began.",
                "seconds", "loss", series)  # fmt: skip
    yield _loss_difference(names, pairs, series)
    yield _over("grad-norm", "Gradient norm", "The norm of the whole gradient of each step, before clipping.",
                "step", "grad_norm", series)  # fmt: skip
    yield _memory(series)
    yield _throughput(runs, series)
    ours = [one for one in series if not one.line.is_wide]
    if any(len({record["lr"] for record in one.run.records}) > 1 for one in ours):
        yield _over("lr", "Learning rate", "The learning rate of each step.", "step", "lr", ours)


LABELS = {"loss": "loss", "grad_norm": "gradient norm", "lr": "learning rate", "step": "step",
          "seconds": "seconds since training began"}  # fmt: skip


def _over(name: str, title: str, caption: str, x: str, y: str, series: Sequence[Series]) -> Plot:
    """A value of every step over its number or its time."""
    kept, curves, num_left_out = [], [], 0
    for one in series:
        records = [record for record in one.run.records if record[x] is not None and record[y] is not None]
        curve = Curve(one.line, [record[x] for record in records], [record[y] for record in records])
        num_drawn = len(curve.points()[0])
        num_left_out += len(records) - num_drawn
        if num_drawn:
            kept.append(one)
            curves.append(curve)
    if not curves:
        return Plot(name, title, _why_empty(series, LABELS[y], num_left_out))
    if num_left_out:
        caption += f" {count(num_left_out, 'step')} with a {LABELS[y]} that is not finite left out."
    drawing = plots.lines(name, curves, x=LABELS[x], y=LABELS[y])
    return Plot(name, title, caption + _thinned(curves) + _absent(series, kept), drawing, _legend(kept))


def _why_empty(series: Sequence[Series], label: str, num_left_out: int) -> str:
    if num_left_out:
        return f"The {label} is not finite in any step."
    if any(one.run.records for one in series):
        return f"No {label} was recorded."
    return "No step was finished."


def _absent(series: Sequence[Series], kept: Sequence[Series]) -> str:
    absent = [one.label for one in series if one not in kept]
    return f" Nothing was recorded for {listed(absent)}." if absent else ""


def _thinned(curves: Sequence[Curve]) -> str:
    is_thinned = any(len(curve.xs) > plots.MAX_POINTS for curve in curves)
    return f" Of long runs {plots.MAX_POINTS} steps are drawn, with every spike." if is_thinned else ""


def _legend(series: Sequence[Series], is_point: bool = False) -> tuple[Key, ...]:
    """Of several runs each has one entry, and one more says how their full batches look."""
    keys = [Key(one.point if is_point else one.line, one.label, is_point) for one in series]
    ours = [key for key, one in zip(keys, series, strict=True) if not one.line.is_wide]
    full = [key for key, one in zip(keys, series, strict=True) if one.line.is_wide]
    if any(key.look.is_pale or key.look.is_hollow for key in full) and len(ours) > 1:
        full = [Key(full[0].look, "full batch, in the colour of its run", is_point)]
    return (*ours, *full)


def _loss_difference(names: Sequence[str], pairs: Sequence[tuple[str, Run]], series: Sequence[Series]) -> Plot:
    name, title = "difference", "Difference of the losses"
    if not pairs:
        return Plot(name, title, "There is no full-batch training that finished, so there is no difference to draw.")
    looks = {id(one.run): one.line for one in series}
    kept, curves, equal, num_zeros = [], [], [], 0
    for run_name, run in pairs:
        steps, distances = _distances(run)
        if any(distances):
            kept.append(Key(looks[id(run)], run_name if len(names) > 1 else "|accumulated − full batch|"))
            curves.append(Curve(looks[id(run)], steps, distances))
            num_zeros += distances.count(0)
        elif distances:
            equal.append(run_name)
    if not curves and not equal:
        return Plot(name, title, "No step of both trainings has a finite loss, so there is no difference to draw.")
    if not curves:
        return Plot(
            name, title, "The losses of accumulated and full-batch training are equal to the last bit in every step."
        )
    caption = "How far the loss of a step is from that of full-batch training, on a log scale."
    if num_zeros:
        caption += f" {count(num_zeros, 'step')} with no difference at all: triangles at the bottom edge."
    if equal:
        caption += f" In {listed(equal)} the losses are equal to the last bit."
    drawing = plots.lines(name, curves, x="step", y="|difference of the loss|", is_log=True)
    return Plot(name, title, caption + _thinned(curves), drawing, tuple(kept))


def _distances(run: Run) -> tuple[list[float], list[float]]:
    """Where both losses are finite: the steps, and how far apart the losses are."""
    theirs = {record["step"]: record["loss"] for record in run.full_batch.records} if run.full_batch else {}
    pairs = [
        (record["step"], abs(record["loss"] - theirs[record["step"]]))
        for record in run.records
        if record["step"] in theirs
    ]
    found = [(step, distance) for step, distance in pairs if distance < plots.LARGEST]  # false for NaN, too
    return [step for step, _ in found], [distance for _, distance in found]


def _memory(series: Sequence[Series]) -> Plot:
    title = "Memory against micro-batch size"
    largest = max((abs(one.run.summary["peak_bytes"] or 0) for one in series), default=0)
    unit, num_bytes = unit_of(largest if math.isfinite(largest) else 0)
    caption = "What training added to the memory in use, at its peak."
    return _over_sizes(
        "memory", title, caption, f"peak memory, {unit}", series, "peak memory",
        lambda summary: None if summary["peak_bytes"] is None else summary["peak_bytes"] / num_bytes,
    )  # fmt: skip


def _throughput(runs: Sequence[Run], series: Sequence[Series]) -> Plot:
    caption = "Samples trained in a second, over the whole run."
    if len(runs) > 1 and len({run.summary["micro_batch_size"] for run in runs}) > 1:
        title = "Throughput against micro-batch size"
        return _over_sizes("throughput", title, caption, "samples / s", series, "throughput",
                           lambda summary: summary["samples_per_second"])  # fmt: skip
    name, title, caption = "throughput", "Throughput over steps", "Samples trained in a second, step by step."
    found = [(one, Curve(one.line, *_rates(one.run.records))) for one in series]
    kept = [(one, curve) for one, curve in found if len(curve.xs)]
    if not kept:
        return Plot(name, title, "Too few steps were finished to measure a throughput.")
    if any(len(one.run.records) - 1 > NUM_STRETCHES for one, _ in kept):
        caption = f"Samples trained in a second, each point the mean of a {NUM_STRETCHES}th of the run."
    caption += " The first step, which also prepares the rest, is left out."
    drawing = plots.lines(name, [curve for _, curve in kept], x="step", y="samples / s", from_zero=True)
    return Plot(name, title, caption, drawing, _legend([one for one, _ in kept]))


def _rates(records: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
    """Samples a second, over stretches of steps; one in which no time passed, or nobody knows, is left out."""
    length = max(1, math.ceil((len(records) - 1) / NUM_STRETCHES))
    steps, rates = [], []
    for start, end in pairwise([*range(0, len(records), length)]):
        first, last = records[start]["seconds"], records[end]["seconds"]
        seconds = 0 if first is None or last is None else last - first
        if seconds > 0:
            steps.append(float(records[end]["step"]))
            rates.append(sum(record["num_samples"] for record in records[start + 1 : end + 1]) / seconds)
    return steps, rates


def _over_sizes(
    name: str,
    title: str,
    caption: str,
    y: str,
    series: Sequence[Series],
    noun: str,
    value: Callable[[Mapping[str, Any]], float | None],
) -> Plot:
    """One point per training; the full batch is a micro-batch as large as the batch."""
    measured = [(one, value(one.run.summary)) for one in series if one.run.summary["micro_batch_size"] > 0]
    known = [
        (one, one.run.summary["micro_batch_size"], y) for one, y in measured if y is not None and abs(y) < plots.LARGEST
    ]
    sizes = sorted({size for _, size, _ in known})
    if not known:
        return Plot(name, title, f"The {noun} of the training is not known.")
    if len(sizes) < 2:
        known_for = f"The {noun} is known for one micro-batch size only, {sizes[0]:,}"
        return Plot(name, title, f"{known_for}: a report of several runs draws it against the size.")
    curves = [Curve(one.point, [size], [found]) for one, size, found in known]
    groups: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    for one, size, found in known:
        group = tuple(one.run.summary[part] for part in ("task", "framework", "device"))
        groups.setdefault(group, []).append((size, found))
    trends = [Curve(Look(0), [x for x, _ in group], [y for _, y in group]) for group in groups.values()]
    caption += (
        " The full batch is a micro-batch as large as the batch." if any(o.point.is_hollow for o, _, _ in known) else ""
    )
    absent = _absent(series, [one for one, _, _ in known])
    drawing = plots.points(name, curves, trends, x="micro-batch size", y=y)
    return Plot(name, title, caption + absent, drawing, _legend([one for one, _, _ in known], is_point=True))
