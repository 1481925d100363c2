"""Measures the cost of accumulation, compared with the hand-written loop: `python -m benchmarks.overhead`."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from .comparison import Comparison
from .contestants import (
    Make,
    bigbatch_batch,
    bigbatch_micro_batch,
    bigbatch_window,
    by_accelerate,
    by_hand,
    full_batch,
)
from .guests import GUESTS
from .models import mlp
from .tables import README, RESULTS, about, markdown_table, write_table
from .work import Batch, Work

ROUNDS, WARMUP = 400, 20
BATCH_SIZE, MICRO_BATCH_SIZE = 256, 32
FULL, BY_HAND = "full batch (the limit)", "hand-written loop"
CONTESTANTS: dict[str, Make] = {
    FULL: full_batch,
    BY_HAND: by_hand,
    "bigbatch, `step(batch)`": bigbatch_batch,
    "bigbatch, `step(Window)`": bigbatch_window,
    "bigbatch, `micro_batch`": bigbatch_micro_batch,
    "accelerate, `accumulate`": by_accelerate,
}


def main(rounds: int = ROUNDS) -> None:
    torch.set_num_threads(1)  # with two threads, another process on the second core makes some rounds five times slower
    work = digits_work(MICRO_BATCH_SIZE)
    entries = {name: (make, work) for name, make in CONTESTANTS.items()}
    found = Comparison(entries, BY_HAND, rounds, WARMUP, GUESTS, has_peaks=False).run()
    if found.failed or found.missing:
        sys.exit(f"not measured: {found.failed | found.missing}")
    summaries = found.against(BY_HAND)
    rows = [(name, f"{one.ratio:.2f}", f"{one.low:.2f}–{one.high:.2f}") for name, one in summaries.items()]
    table = markdown_table(("", f"time per step, {BY_HAND} = 1", "quartiles"), rows)
    on = about(cores=torch.get_num_threads(), command="python -m benchmarks.overhead")
    note = f"Median of {rounds} rounds; the {BY_HAND} took {1000 * summaries[BY_HAND].seconds:.1f} ms. {on}."
    write_table(RESULTS, "overhead", f"{table}\n\n{note}")
    write_table(README, "overhead", table)
    print(table, note, sep="\n\n")


def digits_work(micro_batch_size: int) -> Work:
    return Work(mlp, mean_loss, digits(BATCH_SIZE), micro_batch_size, sgd)


def digits(size: int) -> Batch:
    """Handwritten digits: 64 pixels each, 10 classes."""
    data = load_digits()
    return torch.tensor(data.data[:size] / 16, dtype=torch.float32), torch.tensor(data.target[:size])


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return cross_entropy(model(x), y)


def sgd(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.1)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
