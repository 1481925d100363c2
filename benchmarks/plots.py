"""Plots for RESULTS.md: a quantity over the number of micro-batches, one line per contestant."""

import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

FOLDER = Path(__file__).parent / "plots"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555")
"""The palette of Okabe and Ito, which colour-blind readers can tell apart."""
MARKERS = "os^DvPX"
STYLE = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 10,
    "grid.alpha": 0.3,
    "svg.fonttype": "none",
    "svg.hashsalt": "bigbatch",
}


@dataclass(frozen=True)
class Panel:
    title: str
    ylabel: str
    lines: dict[str, dict[int, float]]
    """By name: a value for each number of micro-batches."""
    limits: dict[str, float] = field(default_factory=dict)
    """Values that do not depend on the number of micro-batches, drawn as dashed lines."""
    spreads: dict[str, dict[int, tuple[float, float]]] = field(default_factory=dict)
    """The quartiles of a line, drawn as a band."""
    is_log: bool = False
    """Whether the y axis is logarithmic; the x axis always is."""


def draw(path: str | os.PathLike[str], panels: Sequence[Panel], about: str) -> None:
    """Writes an SVG with the panels side by side and a note on the measurement below them."""
    path = Path(path)
    path.parent.mkdir(exist_ok=True)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.4 * len(panels), 5.2), layout="constrained")
        names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            _draw(axes, panel, names)
        figure.supxlabel(textwrap.fill(about.replace("`", ""), 100 * len(panels)), fontsize=7.5, color="#555555")
        figure.savefig(path, metadata={"Date": None})


def _draw(axes: Axes, panel: Panel, names: list[str]) -> None:
    """Draws one panel. A name has the same colour and marker in all panels."""
    for name, points in panel.lines.items():
        number = names.index(name)
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        nums, label = sorted(points), name.replace("`", "")
        sizes = {"markersize": max(9 - 2 * number, 4), "linewidth": max(3.5 - number, 1.5)}  # lines may overlap
        axes.plot(nums, [points[num] for num in nums], color=colour, marker=marker, label=label, **sizes)
        if spread := panel.spreads.get(name):
            axes.fill_between(nums, *zip(*(spread[num] for num in nums), strict=True), color=colour, alpha=0.15, lw=0)
    for number, (name, value) in enumerate(panel.limits.items()):
        axes.axhline(value, color="black", linestyle=("--", ":")[number % 2], linewidth=1.2, label=name)
    nums = sorted({num for points in panel.lines.values() for num in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(nums, [str(num) for num in nums])
    axes.xaxis.set_minor_locator(NullLocator())
    if panel.is_log:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    else:
        axes.set_ylim(bottom=0)
    axes.set(title=panel.title, xlabel="micro-batches", ylabel=panel.ylabel)
    axes.legend(fontsize=8, frameon=False)
