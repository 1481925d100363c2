"""Measures time and memory of one batch in more and more micro-batches: `python -m benchmarks.scaling`."""

import sys

import torch

from . import memory
from .comparison import Comparison, Found
from .contestants import Make, bigbatch_batch, by_accelerate, by_hand, full_batch
from .guests import GUESTS
from .overhead import BATCH_SIZE, digits_work
from .plots import FOLDER, Panel, draw
from .tables import RESULTS, about, markdown_table, write_table
from .timing import compare

ROUNDS, WARMUP = 60, 5
NUMS_MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
FULL, BY_HAND = "full batch", "hand-written loop"
WAYS: dict[str, Make] = {
    FULL: full_batch,
    BY_HAND: by_hand,
    "bigbatch": bigbatch_batch,
    "accelerate": by_accelerate,
}
Ratio = tuple[float, float, float]
"""Median, lower quartile, upper quartile."""
COMMAND = "python -m benchmarks.scaling"


def main(rounds: int = ROUNDS) -> None:
    torch.set_num_threads(1)
    ratios = {num: against_full(timed(num, rounds)) for num in NUMS_MICRO_BATCHES}
    names = [name for name in ratios[1] if name != FULL]
    times = {name: {num: ratios[num][name] for num in NUMS_MICRO_BATCHES} for name in names}
    header = ("micro-batches", *map(str, NUMS_MICRO_BATCHES))
    rows = [(name, *(f"{middle:.2f}" for middle, _, _ in times[name].values())) for name in names]
    spread = max((high - low) / middle for each in times.values() for middle, low, high in each.values())
    table = markdown_table(header, rows)
    on = f"{about(cores=torch.get_num_threads(), command=COMMAND)}."
    draw(FOLDER / "cpu_time.svg", [time_panel(times)], on)
    draw(FOLDER / "cpu_memory.svg", [memory_panel()], on)
    note = f"Median of {rounds} rounds; quartiles are at most {spread:.0%} of it apart. {on}"
    plots = "![Time](plots/cpu_time.svg)\n\n![Memory](plots/cpu_memory.svg)"
    write_table(RESULTS, "scaling", f"{table}\n\n{note}\n\n{plots}")
    print(table, note, sep="\n\n")


def timed(num_micro_batches: int, rounds: int) -> Found:
    work = digits_work(BATCH_SIZE // num_micro_batches)
    entries = {name: (make, work) for name, make in WAYS.items()}
    guests = {name.partition(",")[0]: fit for name, fit in GUESTS.items()}
    found = Comparison(entries, BY_HAND, rounds, WARMUP, guests, has_peaks=False).run()
    if found.failed or found.missing:
        sys.exit(f"not measured: {found.failed | found.missing}")
    return found


def against_full(found: Found) -> dict[str, Ratio]:
    """The time per step, full batch = 1. A guest was timed with the hand-written loop, so its ratio is derived."""
    full = compare(found.times, FULL)
    by_hand = full[BY_HAND].ratio
    own = {name: (one.ratio, one.low, one.high) for name, one in full.items()}
    guests = {name: one for name, one in found.against(BY_HAND).items() if name not in own}
    return own | {name: (one.ratio * by_hand, one.low * by_hand, one.high * by_hand) for name, one in guests.items()}


def time_panel(times: dict[str, dict[int, Ratio]]) -> Panel:
    title = f"One step on a batch of {BATCH_SIZE}, MLP, CPU"
    medians = {name: {num: middle for num, (middle, _, _) in each.items()} for name, each in times.items()}
    spreads = {name: {num: (low, high) for num, (_, low, high) in each.items()} for name, each in times.items()}
    return Panel(title, "time, full batch = 1", medians, {FULL: 1.0}, spreads, is_log=True)


def memory_panel() -> Panel:
    peaks = memory.cut_peaks()
    full = peaks.pop(memory.FULL)[1] / 2**20
    lines = {name: {num: peak / 2**20 for num, peak in each.items()} for name, each in peaks.items()}
    title = f"One step on a batch of {memory.BATCH_SIZE}, {memory.NUM_LAYERS} layers of {memory.WIDTH}, CPU"
    return Panel(title, "MiB at the peak", lines, {memory.FULL: full})


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
