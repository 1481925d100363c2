"""Draws lines and points as SVG inside the page. It has the page's colours, and ids that no other plot has.

The page has the legend, so the name of a run is never drawn here and cannot break a plot.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

# matplotlib knows no CSS, so these colours stand for the page's own and are replaced in the SVG.
_INK = "#010203"
NUM_COLOURS = 6
_COLOURS = [f"#0a0b{number:02x}" for number in range(NUM_COLOURS)]

DASHES: tuple[tuple[float, ...], ...] = ((), (5, 2), (1.5, 1.5), (7, 2, 1.5, 2), (9, 5))
MARKERS = ("o", "^", "D", "v", "s")
_GLYPHS = ("●○", "▲△", "◆◇", "▼▽", "■□")
"""The marker in the legend, filled and hollow."""

Point = tuple[float, float]
MAX_POINTS = 800
LARGEST = 1e300
"""Larger values are not drawn: the ends of an axis would overflow."""

_STYLE = {
    "axes.edgecolor": _INK,
    "axes.facecolor": "none",
    "axes.formatter.useoffset": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": _INK,
    "axes.linewidth": 0.6,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "none",
    "font.size": 9.5,
    "grid.alpha": 0.18,
    "grid.color": _INK,
    "grid.linewidth": 0.6,
    "lines.scale_dashes": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "bigbatch",
    "text.color": _INK,
    "text.parse_math": False,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
}


@dataclass(frozen=True)
class Look:
    """How a line or a point looks, in the plot and in the legend."""

    colour: int
    dash: int = 0
    marker: int = 0
    is_wide: bool = False
    is_pale: bool = False
    is_hollow: bool = False

    @property
    def dash_array(self) -> str:
        return " ".join(f"{length:g}" for length in DASHES[self.dash]) or "none"

    @property
    def glyph(self) -> str:
        return _GLYPHS[self.marker][self.is_hollow]


@dataclass(frozen=True)
class Curve:
    """A line to draw; a point that is not finite is left out."""

    look: Look
    points: Sequence[Point]

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """The finite points, as their x and their y."""
        xs, ys = np.array(self.points, dtype=float).reshape(-1, 2).T
        is_drawn = (np.abs(xs) < LARGEST) & (np.abs(ys) < LARGEST)  # false for NaN, too
        return xs[is_drawn], ys[is_drawn]


@dataclass(frozen=True)
class Drawing:
    """The content of an <svg> element, and its view box."""

    view_box: str
    body: Markup


def lines(
    name: str, curves: Sequence[Curve], *, x: str, y: str, is_log: bool = False, from_zero: bool = False
) -> Drawing:
    """Curves, the wide ones underneath. On a log scale a zero is a triangle at the bottom edge."""

    def paint(axes: Any) -> None:
        drawn = [(curve.look, *curve.arrays()) for curve in curves]
        for number, (look, xs, ys) in enumerate(drawn):
            is_zero = (ys == 0) & is_log
            _line(axes, f"line-{number}", look, *_thinned(xs[~is_zero], ys[~is_zero]))
            if is_zero.any():
                _zeros(axes, look, _thinned(xs[is_zero], ys[is_zero])[0])
        if is_log:
            _log_axis(axes, np.concatenate([ys[ys > 0] for _, _, ys in drawn]))
        if from_zero:
            axes.set_ylim(bottom=0)
        if x == "step":
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(xlabel=x, ylabel=y.replace("$", r"\$"))  # else it is mathematics

    return _draw(name, paint)


def points(name: str, curves: Sequence[Curve], trends: Sequence[Sequence[Point]], *, x: str, y: str) -> Drawing:
    """Points over sizes on a log scale, with a thin line for each trend."""

    def paint(axes: Any) -> None:
        sizes = sorted({size for curve in curves for size, _ in curve.points})
        axes.set_xscale("log", base=2)
        for trend in trends:
            axes.plot(*np.array(sorted(trend)).T, color=_INK, alpha=0.35, linewidth=0.8, zorder=1)
        for number, curve in enumerate(curves):
            colour = _COLOURS[curve.look.colour]
            axes.plot(
                *np.array(curve.points).T, linestyle="none", marker=MARKERS[curve.look.marker], markersize=7,
                color=colour, markerfacecolor="none" if curve.look.is_hollow else colour, markeredgewidth=1.6,
                zorder=3, clip_on=False, gid=f"point-{number}",
            )  # fmt: skip
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticks(_spaced(sizes))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:g}"))
        axes.set_xlim(sizes[0] / 1.3, sizes[-1] * 1.3)
        lowest = min(value for curve in curves for _, value in curve.points)
        axes.set_ylim(bottom=axes.get_ylim()[0] if lowest < 0 else 0.0)
        axes.set(xlabel=x, ylabel=y)

    return _draw(name, paint)


def _line(axes: Any, gid: str, look: Look, xs: np.ndarray, ys: np.ndarray) -> None:
    width = 4.0 if look.is_wide else 1.5
    axes.plot(
        xs, ys, color=_COLOURS[look.colour], linestyle=(0, DASHES[look.dash]) if DASHES[look.dash] else "-",
        linewidth=width, alpha=0.4 if look.is_pale else 1.0, zorder=1 if look.is_wide else 2,
        marker="o" if len(xs) <= 12 else "", markersize=width + 2, markeredgewidth=0, gid=gid,
    )  # fmt: skip


def _zeros(axes: Any, look: Look, xs: np.ndarray) -> None:
    axes.plot(
        xs, np.full(len(xs), 0.03), transform=axes.get_xaxis_transform(), linestyle="none", marker="v", markersize=4,
        color=_COLOURS[look.colour], markerfacecolor="none", markeredgewidth=0.8,
    )  # fmt: skip


def _log_axis(axes: Any, ys: np.ndarray) -> None:
    """Shows whole decades, so that a tick has a label, and one more at the bottom for the zeros."""
    lowest, highest = np.log10(ys.min()), np.log10(ys.max())
    axes.set_yscale("log")
    axes.set_ylim(10.0 ** max(math.floor(lowest) - 1, -307), 10.0 ** (math.floor(highest) + 1))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0e}"))


def _spaced(sizes: Sequence[float]) -> list[float]:
    """The sizes, without those whose labels would overlap."""
    apart = max(1.15, (sizes[-1] / sizes[0]) ** (1 / 9))
    kept = [sizes[0]]
    for size in sizes[1:]:
        if size >= kept[-1] * apart:
            kept.append(size)
    return kept


def _thinned(xs: np.ndarray, ys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most MAX_POINTS: the lowest and the highest of each stretch, so that no spike is lost."""
    if len(xs) <= MAX_POINTS:
        return xs, ys
    stretches = np.array_split(np.arange(len(xs)), MAX_POINTS // 2)
    ends = {int(pick) for part in stretches for pick in (part[ys[part].argmin()], part[ys[part].argmax()])}
    kept = sorted(ends)
    return xs[kept], ys[kept]


def _draw(name: str, paint: Callable[[Any], None]) -> Drawing:
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # the user's matplotlibrc must not change the report
        matplotlib.rcParams.update(_STYLE)
        figure = Figure(figsize=(4.6, 3.0), layout="constrained")
        paint(figure.subplots())
        file = StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    return _embed(name, file.getvalue())


def _embed(name: str, svg: str) -> Drawing:
    """The SVG without the parts that belong to a separate file, with the colours of the page."""
    opening = re.search(r'<svg [^>]*viewBox="([^"]*)"[^>]*>', svg)
    if opening is None:
        raise AssertionError("matplotlib wrote an SVG without a viewBox")
    body = svg[opening.end() : svg.rindex("</svg>")]
    body = re.sub(r"<metadata>.*?</metadata>|<style .*?</style>|<!--.*?-->", "", body, flags=re.DOTALL)
    body = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{name}-", body)
    body = re.sub(r"#0a0b(\d\d)", lambda found: f"var(--series-{int(found[1])})", body)
    return Drawing(opening[1], Markup(body.replace(_INK, "currentColor").strip()))
