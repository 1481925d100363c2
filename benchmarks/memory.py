"""How much memory a step takes at its peak: `python -m benchmarks.memory`."""

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

from .tables import RESULTS, about, markdown_table, write_table

BATCH_SIZE = 1024
MICRO_BATCH_SIZE = 256
WIDTH = 256
NUM_LAYERS = 6
NUMS_MICRO_BATCHES = (2, 8, 64)


def peak_bytes(function: Callable[[], Any]) -> int:
    """The most bytes that the function held at one time in torch's CPU allocator, beside what was there before.

    Call the function once before, so that what is made on the first call only is there before.
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
    """Activations dominate: a layer keeps two of them per sample."""
    torch.manual_seed(0)
    layers = [layer for _ in range(NUM_LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*layers)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def full_peak(batch: Tensor) -> int:
    """Without accumulation: one forward pass, one backward pass, one update."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return peak_bytes(step)


def accumulated_peak(batch: Any, micro_batch_size: int | None = None) -> int:
    model = network()
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.01), loss, micro_batch_size)
    accumulator.step(batch)
    return peak_bytes(lambda: accumulator.step(batch))


def cut_peak(num_micro_batches: int) -> int:
    """One batch, cut into that many micro-batches."""
    return accumulated_peak(torch.randn(BATCH_SIZE, WIDTH), BATCH_SIZE // num_micro_batches)


def repeated_peak(num_micro_batches: int) -> int:
    """That many micro-batches of one size: the same tensor again and again, so that the inputs do not grow."""
    return accumulated_peak(Window([torch.randn(MICRO_BATCH_SIZE, WIDTH)] * num_micro_batches))


def main() -> None:
    full = full_peak(torch.randn(BATCH_SIZE, WIDTH))
    cut = {num: cut_peak(num) for num in NUMS_MICRO_BATCHES}
    repeated = {num: repeated_peak(num) for num in NUMS_MICRO_BATCHES}
    least = repeated[NUMS_MICRO_BATCHES[0]]
    rows = [("full batch", mebibytes(full), "100%", "–", "–")]
    for num in NUMS_MICRO_BATCHES:
        one, growing = cut[num], repeated[num]
        cells = mebibytes(one), f"{one / full:.0%}", mebibytes(growing), f"{growing / least:.1%}"
        rows.append((f"{num} micro-batches", *cells))
    header = (
        "",
        f"a batch of {BATCH_SIZE}, MiB",
        "of the full batch",
        f"micro-batches of {MICRO_BATCH_SIZE}, MiB",
        f"of {NUMS_MICRO_BATCHES[0]} micro-batches",
    )
    table = markdown_table(header, rows)
    note = f"{about(('torch',), cores=torch.get_num_threads())}."
    write_table(RESULTS, "memory", f"{table}\n\n{note}")
    print(table, note, sep="\n\n")


def mebibytes(count: int) -> str:
    return f"{count / 2**20:.2f}"


if __name__ == "__main__":
    main()
