"""Measures windows on several ranks: `torchrun --standalone --nproc-per-node 2 -m benchmarks.ranks`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from bigbatch.torch import Accumulator

from .tables import RESULTS, about, markdown_table, write_table
from .timing import compare, interleaved

WIDTH, NUM_LAYERS = 1290, 12
"""20 million parameters."""
MICRO_BATCH_SIZE, NUM_MICRO_BATCHES = 1, 8
ROUNDS, WARMUP = 15, 2
EVERY = "DDP, reduced in every micro-batch"
Step = Callable[[], Any]


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(NUM_LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*layers)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def every_micro_batch(model: nn.Module, batch: Tensor) -> Step:
    optimizer = sgd(model)

    def step() -> None:
        for micro_batch in batch.split(MICRO_BATCH_SIZE):
            (loss(model, micro_batch) / NUM_MICRO_BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def by_hand(model: Any, batch: Tensor) -> Step:
    """All but the last micro-batch inside `no_sync`, as in torch's documentation."""
    optimizer = sgd(model)

    def step() -> None:
        *others, last = batch.split(MICRO_BATCH_SIZE)
        with model.no_sync():
            for micro_batch in others:
                (loss(model, micro_batch) / NUM_MICRO_BATCHES).backward()
        (loss(model, last) / NUM_MICRO_BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def by_accelerate(model: nn.Module, batch: Tensor) -> Step:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=NUM_MICRO_BATCHES)
    model, optimizer = accelerator.prepare(model, sgd(model))

    def step() -> None:
        for micro_batch in batch.split(MICRO_BATCH_SIZE):
            with accelerator.accumulate(model):
                accelerator.backward(loss(model, micro_batch))
                optimizer.step()
                optimizer.zero_grad()

    return step


def ours(model: nn.Module, batch: Tensor, **options: Any) -> Step:
    accumulator = Accumulator(model, sgd(model), loss, MICRO_BATCH_SIZE, **options)
    return partial(accumulator.step, batch)


def one_at_a_time(model: nn.Module, batch: Tensor) -> Step:
    accumulator = Accumulator(model, sgd(model), accumulation_steps=NUM_MICRO_BATCHES)

    def step() -> None:
        for micro_batch in batch.split(MICRO_BATCH_SIZE):
            with accumulator.micro_batch(weight=len(micro_batch)) as micro:
                micro.backward(loss(model, micro_batch))

    return step


def sharded() -> nn.Module:
    model: Any = network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(model)


def steps(batch: Tensor) -> dict[str, Step]:
    return {
        EVERY: every_micro_batch(DistributedDataParallel(network()), batch),
        "DDP, `no_sync` by hand": by_hand(DistributedDataParallel(network()), batch),
        "DDP, accelerate": by_accelerate(network(), batch),
        "DDP, bigbatch, `step(batch)`": ours(DistributedDataParallel(network()), batch),
        "DDP, bigbatch, `micro_batch`": one_at_a_time(DistributedDataParallel(network()), batch),
        'fully_shard, bigbatch, `reduce="window"`': ours(sharded(), batch),
        'fully_shard, bigbatch, `reduce="micro_batch"`': ours(sharded(), batch, reduce="micro_batch"),
    }


def together(step: Step) -> Step:
    """Starts all ranks at the same time, so that no rank's time includes waiting for another."""

    def run() -> None:
        dist.barrier()
        step()

    return run


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(dist.get_rank() + 1)
    batch = torch.randn(MICRO_BATCH_SIZE * NUM_MICRO_BATCHES, WIDTH)
    functions = {name: together(step) for name, step in steps(batch).items()}
    found = compare(interleaved(functions, ROUNDS, WARMUP), EVERY)
    if dist.get_rank() == 0:
        rows = []
        for name in functions:
            one = found[name]
            times = f"{one.ratio:.2f}", f"{one.low:.2f}–{one.high:.2f}", f"{1000 * one.seconds:.0f}"
            rows.append((name, *times))
        header = ("", "time per window, reduced every time = 1", "quartiles", "ms")
        table = markdown_table(header, rows)
        num = sum(p.numel() for p in network().parameters())
        on = about(("torch", "accelerate"), command="torchrun --standalone --nproc-per-node 2 -m benchmarks.ranks")
        note = f"Median of {ROUNDS} rounds, {num / 1e6:.1f} million parameters, {dist.get_world_size()} ranks. {on}."
        write_table(RESULTS, "ranks", f"{table}\n\n{note}")
        print(table, note, sep="\n\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
