"""Writes the tables and plots of what `python -m benchmarks.gpu` measured: `python -m benchmarks.gpu_tables`."""

import argparse
import sys
from pathlib import Path
from typing import Any

from . import measured
from .comparison import Found
from .goals import goals
from .gpu_parts import BATCH_SIZE, BY_HAND, FULL, FULL_COMPILED, MICRO_BATCH_SIZE
from .growth import Growth
from .plots import Panel, draw
from .sizes import GPT2, TINY
from .tables import FOLDER, RESULTS, markdown_table, write_table
from .timing import compare

GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_tables", description=__doc__)
    parser.add_argument("--measured", type=Path, default=FOLDER / "measured", help="the folder with the JSON files")
    parser.add_argument("--page", type=Path, default=RESULTS, help="the page to fill; its plots are written next to it")
    options = parser.parse_args()
    parts = measured.read(options.measured)
    if not parts:
        sys.exit(f"{options.measured} has no measurements: run `python -m benchmarks.gpu` first.")
    rehearsed = [part for part, found in parts.items() if found["is_rehearsal"]]
    if rehearsed and options.page == RESULTS:
        sys.exit(f"{', '.join(rehearsed)}: tiny sizes only, not measured; pass another --page to see the result.")
    for name, table in tables(parts).items():
        write_table(options.page, name, table)
    if "linear" in parts:
        draw_growth(parts, options.page.parent / "plots")


def tables(parts: dict[str, dict[str, Any]]) -> dict[str, str]:
    """The tables of the parts that were measured, by name."""
    made = {}
    makers = {"gpt2": comparison_table, "tiny": comparison_table, "images": images_table, "linear": linear_table}
    for part, make in (makers | {"jax": jax_table}).items():
        if part in parts:
            made[f"gpu {part}"] = noted(make(parts[part]), parts[part])
    if rows := [goal.row for goal in goals(parts)]:
        abouts = {found["about"].partition(", `")[0] for part, found in parts.items() if part != "jax"}
        notes = [f"{about}, `python -m benchmarks.gpu`." for about in sorted(abouts)]
        made["gpu goals"] = "\n\n".join([markdown_table(("", "wanted", "reached", ""), rows), *notes])
    return made


def noted(table: str, part: dict[str, Any]) -> str:
    lines = [f"Not installed: {', '.join(part['missing'])}."] if part.get("missing") else []
    lines += [f"Failed: {name} ({reason})." for name, reason in part.get("failed", {}).items()]
    return "\n\n".join([table, *lines, f"{part['about']}."])


def comparison_table(part: dict[str, Any]) -> str:
    """A guest was timed with the hand-written loop: its ratio to the full batch is the product of both ratios."""
    found = Found.of(part)
    full = compare(found.times, FULL) if FULL in found.times else {}
    rows = []
    for name, one in found.against(BY_HAND).items():
        against_full = "–"
        if full:
            against_full = f"{full[name].ratio if name in full else one.ratio * full[BY_HAND].ratio:.2f}"
        times = f"{1000 * one.seconds:.1f}", against_full, f"{one.ratio:.2f}", f"{one.low:.2f}–{one.high:.2f}"
        rows.append((name, *times, *peaks(part, name), f"{found.errors[name]:.0e}"))
    header = ("", "ms per step", f"{FULL} = 1", f"{BY_HAND} = 1", "quartiles", "GiB reserved", "GiB allocated")
    return markdown_table((*header, "first update off by"), rows)


def images_table(part: dict[str, Any]) -> str:
    """Compares each place of the batch with the same contestant and the batch on the device."""
    found = Found.of(part)
    rows = []
    for name in found.times:
        one = compare(found.times, part["references"][name])[name]
        times = f"{1000 * one.seconds:.1f}", f"{one.ratio:.3f}", f"{one.low:.3f}–{one.high:.3f}"
        rows.append((name, *times, *peaks(part, name)))
    header = ("", "ms per step", "batch on the device = 1", "quartiles", "GiB reserved", "GiB allocated")
    return f"{markdown_table(header, rows)}\n\nThe batch has {part['batch_bytes'] / GIB:.2f} GiB."


def linear_table(part: dict[str, Any]) -> str:
    rows = []
    for growth in Growth.all_of(part):
        for num, seconds in growth.seconds.items():
            further = f"{1000 * growth.further[num]:.3f}" if num in growth.further else "–"
            times = f"{1000 * seconds:.2f}", f"{1000 * growth.each[num]:.3f}", further
            rows.append((f"{growth.model}: {growth.way}", num, *times, f"{growth.peaks[num] / GIB:.3f}"))
    header = ("", "micro-batches", "ms per step", "ms per micro-batch", "ms per further micro-batch", "GiB at the peak")
    plots = "![Time per micro-batch](plots/gpu_time.svg)\n\n![Memory at the peak](plots/gpu_memory.svg)"
    return f"{plots}\n\n{markdown_table(header, rows)}"


def jax_table(part: dict[str, Any]) -> str:
    rows = []
    for model in (GPT2, TINY):
        found = part[model]
        for name, one in compare(found["times"], "full batch").items():
            times = f"{1000 * one.seconds:.1f}", f"{one.ratio:.2f}", f"{one.low:.2f}–{one.high:.2f}"
            off = f"{found['errors'][name]:.0e}"
            rows.append((f"{model}: {name}", *times, peaks(found, name)[1], off))
    header = ("", "ms per step", "full batch = 1", "quartiles", "GiB by the compiler", "first update off by")
    return markdown_table(header, rows)


def peaks(part: dict[str, Any], name: str) -> tuple[str, str]:
    """Reserved and allocated peak memory, in GiB."""
    peak = part["peaks"].get(name, {})
    reserved, allocated = (f"{peak[kind] / GIB:.2f}" if kind in peak else "–" for kind in ("reserved", "allocated"))
    return reserved, allocated


def draw_growth(parts: dict[str, dict[str, Any]], folder: Path) -> None:
    """Two plots with one panel per model; the full batch is a dashed line where it was measured."""
    times, memory = [], []
    num_micro_batches = BATCH_SIZE // MICRO_BATCH_SIZE
    for model, part in ((GPT2, "gpt2"), (TINY, "tiny")):
        growths = [growth for growth in Growth.all_of(parts["linear"]) if growth.model == model]
        full = Found.of(parts[part]) if part in parts else Found()
        limits = {
            f"{name}, {BATCH_SIZE} samples": 1000 * one.seconds / num_micro_batches
            for name in (FULL, FULL_COMPILED)
            if (one := compare(full.times, BY_HAND).get(name) if full.times else None)
        }
        each = {growth.way: {num: 1000 * value for num, value in growth.each.items()} for growth in growths}
        times.append(Panel(model, f"ms per {MICRO_BATCH_SIZE} samples", each, limits))
        peak = {growth.way: {num: value / GIB for num, value in growth.peaks.items()} for growth in growths}
        limits = {
            f"{name}, {BATCH_SIZE} samples": max(full.peaks[name].values()) / GIB
            for name in (FULL, FULL_COMPILED)
            if name in full.peaks
        }
        memory.append(Panel(model, "GiB at the peak", peak, limits, is_log=True))
    draw(folder / "gpu_time.svg", times, parts["linear"]["about"])
    draw(folder / "gpu_memory.svg", memory, parts["linear"]["about"])


if __name__ == "__main__":
    main()
