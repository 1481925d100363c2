"""Measures the memory of a sharded model in a window, as one rank of 8: `python -m benchmarks.ranks_memory`."""

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from bigbatch.torch import Accumulator
from bigbatch.torch.distributed.fsdp import Sharded

from .memory import mebibytes
from .tables import RESULTS, about, markdown_table, write_table

NUM_RANKS, WIDTH, NUM_LAYERS = 8, 2048, 24


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(NUM_LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model: Any = nn.Sequential(*layers).cuda()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(model)


def measured(reduce: Any) -> tuple[int, int]:
    """The bytes in use when the last micro-batch begins, and the peak."""
    kept: list[int] = []

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        torch.cuda.synchronize()
        kept.append(torch.cuda.memory_allocated() - before)
        return model(x).square().mean()

    model = network()
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.0), loss, 4, reduce=reduce)
    batch = torch.randn(32, WIDTH, device="cuda")
    before = torch.cuda.memory_allocated()
    accumulator.step(batch)
    torch.cuda.reset_peak_memory_stats()
    accumulator.step(batch)
    return kept[-1], torch.cuda.max_memory_allocated() - before


def main() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    rows = []
    with patch.object(Sharded, "_hand_out"):  # there are no other ranks to send anything to
        for reduce in ("window", "micro_batch"):
            kept, peak = measured(reduce)
            rows.append((f'`reduce="{reduce}"`', mebibytes(kept), mebibytes(peak)))
    table = markdown_table(("", "kept from one micro-batch to the next, MiB", "peak, MiB"), rows)
    note = f"{about(('torch',), device=torch.cuda.get_device_name(), command='python -m benchmarks.ranks_memory')}."
    write_table(RESULTS, "ranks-memory", f"{table}\n\n{note}")
    print(table, note, sep="\n\n")


if __name__ == "__main__":
    main()
