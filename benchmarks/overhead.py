"""What accumulation costs beside the hand-written loop: `python -m benchmarks.overhead`."""

import logging

import torch
from sklearn.datasets import load_digits
from torch import nn

from .contestants import (
    MICRO_BATCH_SIZE,
    NUM_MICRO_BATCHES,
    Batch,
    Stream,
    bigbatch_batch,
    bigbatch_micro_batch,
    bigbatch_window,
    by_accelerate,
    by_hand,
    full_batch,
    lightning_fit,
    micro_batches,
)
from .tables import README, RESULTS, about, markdown_table, write_table
from .timing import Turns, compare

ROUNDS = 400
WARMUP = 20
BY_HAND = "hand-written loop"
LIGHTNING = "Lightning, `accumulate_grad_batches`"
CONTESTANTS = {
    "full batch (the limit)": full_batch,
    BY_HAND: by_hand,
    "bigbatch, `step(batch)`": bigbatch_batch,
    "bigbatch, `step(Window)`": bigbatch_window,
    "bigbatch, `micro_batch`": bigbatch_micro_batch,
    "accelerate, `accumulate`": by_accelerate,
}


def main(rounds: int = ROUNDS) -> None:
    torch.set_num_threads(1)  # with two, a neighbour on the second core slows some rounds five times
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    batch = digits(MICRO_BATCH_SIZE * NUM_MICRO_BATCHES)
    assert_same_update(batch)
    functions = {name: make(mlp(), batch) for name, make in CONTESTANTS.items()}
    turns = Turns(functions, rounds, WARMUP, guest=(LIGHTNING, lambda: micro_batches(batch)))
    length = (WARMUP + rounds) * NUM_MICRO_BATCHES
    lightning_fit(mlp(), Stream(turns, length + 1))  # one more: the last window ends when the next is asked for

    found = compare(turns.times, BY_HAND)
    rows = []
    for name in [*CONTESTANTS, LIGHTNING]:
        one = found[name]
        rows.append((name, f"{one.ratio:.2f}", f"{one.low:.2f}–{one.high:.2f}"))
    table = markdown_table(("", f"time per step, {BY_HAND} = 1", "quartiles"), rows)
    on = about(cores=torch.get_num_threads())
    note = f"Median of {rounds} rounds; the hand-written loop took {1000 * found[BY_HAND].seconds:.1f} ms. {on}."
    write_table(RESULTS, "overhead", f"{table}\n\n{note}")
    write_table(README, "overhead", table)
    print(table, note, sep="\n\n")


def digits(size: int) -> Batch:
    """Handwritten digits: 64 pixels each, 10 classes."""
    data = load_digits()
    return torch.tensor(data.data[:size] / 16, dtype=torch.float32), torch.tensor(data.target[:size])


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def assert_same_update(batch: Batch) -> None:
    """One step of each from the same start must lead to the same parameters, and away from the start."""
    start = flat(mlp())
    ends = {}
    for name, make in CONTESTANTS.items():
        model = mlp()
        make(model, batch)()
        ends[name] = flat(model)
    model = mlp()
    lightning_fit(model, Stream(list(micro_batches(batch)), NUM_MICRO_BATCHES))
    ends[LIGHTNING] = flat(model)
    for name, end in ends.items():
        assert not torch.equal(end, start), f"{name} made no step"
        error = float((end - ends[BY_HAND]).abs().max())
        assert error <= 1e-6, f"{name} is {error:.1e} away from the {BY_HAND} after one step"


def flat(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


if __name__ == "__main__":
    main()
