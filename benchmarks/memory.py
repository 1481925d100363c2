"""Measures the peak memory of a step: `python -m benchmarks.memory`."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from bigbatch import Window
from bigbatch.torch import Accumulator

from .contestants import Make, bigbatch_batch, by_hand, full_batch
from .tables import RESULTS, about, markdown_table, write_table
from .work import Work

BATCH_SIZE = 1024
MICRO_BATCH_SIZE = 256
WIDTH = 256
NUM_LAYERS = 6
NUMS_MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
FULL = "full batch"
WAYS: dict[str, Make] = {"hand-written loop": by_hand, "bigbatch": bigbatch_batch}


def peak_bytes(function: Callable[[], Any]) -> int:
    """The peak of torch's CPU allocator in bytes while the function runs, minus the memory in use before.

    Call the function once before, so that memory allocated only by the first call does not count.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    found = [event for event in events if event.get("name") == "[memory]" and event["args"]["Device Type"] == 0]
    if not found:
        return 0
    found.sort(key=lambda event: event["ts"])
    first = found[0]["args"]
    return max(event["args"]["Total Allocated"] for event in found) - (first["Total Allocated"] - first["Bytes"])


def network() -> nn.Sequential:
    """A network with large activations: a layer keeps two of them per sample."""
    torch.manual_seed(0)
    layers = [layer for _ in range(NUM_LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*layers)


def loss(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    return model(*batch).square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def cut_peak(make: Make, num_micro_batches: int) -> int:
    """The peak for one batch, cut into this many micro-batches."""
    work = Work(network, loss, (torch.randn(BATCH_SIZE, WIDTH),), BATCH_SIZE // num_micro_batches, sgd)
    step = make(work.model(), work)
    step()
    return peak_bytes(step)


def repeated_peak(num_micro_batches: int) -> int:
    """The peak for this many micro-batches of one size. All are the same tensor, so that the inputs do not grow."""
    model = network()
    accumulator = Accumulator(model, sgd(model), loss)
    window = Window([(torch.randn(MICRO_BATCH_SIZE, WIDTH),)] * num_micro_batches)
    accumulator.step(window)
    return peak_bytes(lambda: accumulator.step(window))


def cut_peaks() -> dict[str, dict[int, int]]:
    """Peak bytes for each number of micro-batches; the full batch is one micro-batch."""
    peaks = {name: {num: cut_peak(make, num) for num in NUMS_MICRO_BATCHES} for name, make in WAYS.items()}
    return {FULL: {1: cut_peak(full_batch, 1)}, **peaks}


def main() -> None:
    cut = cut_peaks()
    full = cut[FULL][1]
    repeated = {num: repeated_peak(num) for num in NUMS_MICRO_BATCHES}
    rows = [(FULL, mebibytes(full), mebibytes(full), "100%", "–", "–")]
    for num in NUMS_MICRO_BATCHES:
        own = [cut[name][num] for name in WAYS]
        of_two = f"{repeated[num] / repeated[2]:.1%}"
        cells = *map(mebibytes, own), f"{own[-1] / full:.0%}", mebibytes(repeated[num]), of_two
        rows.append((f"{num} micro-batch{'es' * (num > 1)}", *cells))
    header = ("", *(f"{name}, MiB" for name in WAYS), "of the full batch")
    header += (f"bigbatch, micro-batches of {MICRO_BATCH_SIZE}, MiB", "of 2 micro-batches")
    table = markdown_table(header, rows)
    note = f"{about(('torch',), cores=torch.get_num_threads(), command='python -m benchmarks.memory')}."
    write_table(RESULTS, "memory", f"{table}\n\n{note}")
    print(table, note, sep="\n\n")


def mebibytes(count: int) -> str:
    return f"{count / 2**20:.2f}"


if __name__ == "__main__":
    main()
