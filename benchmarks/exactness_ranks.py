"""Measures every case with several ranks: `torchrun --standalone --nproc-per-node 2 -m benchmarks.exactness_ranks`."""

import warnings

import torch
import torch.distributed as dist
from torch import nn

from tests.ranks.shared import Work, error_of, train_together, train_whole
from tests.ranks.test_exactness import by_rank
from tests.ranks.test_peers import LONG, SHORT, with_accelerate
from tests.torch.training import flat, make_loss, make_model, sgd

from .tables import README, about, markdown_table, write_table

WAYS = {
    "DDP": ("ddp", "batch"),
    "DDP, `micro_batch`": ("ddp", "micro_batch"),
    "`fully_shard`": ("fsdp, window", "batch"),
}


def works(size: int) -> dict[str, Work]:
    return {
        "even": Work("samples", [by_rank(size, 16)]),
        "16 samples against 5": Work("samples", [by_rank(size, 16, 5)]),
        "20 times as many tokens": Work("tokens", [by_rank(size, LONG, SHORT)]),
        "1 micro-batch against 4": Work("samples", [by_rank(size, 4, 13)]),
        "a rank with none": Work("samples", [by_rank(size, 16, 0)]),
    }


def by_ddp_alone(work: Work) -> torch.Tensor:
    """DDP without bigbatch: the mean over ranks of each rank's mean."""
    plain = make_model(work.problem)
    if work.problem.kind == "tokens":
        plain.length.requires_grad_(False)
    before = flat(plain)
    model = nn.parallel.DistributedDataParallel(plain)
    optimizer = sgd(model)
    make_loss(work.problem)(model, work.own(dist.get_rank())[0]).backward()
    optimizer.step()
    return flat(plain) - before


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = []
    for name, work in works(dist.get_world_size()).items():
        expected, _ = train_whole(work)
        own = [f"{error_of(train_together(work, *way)[0], expected):.0e}" for way in WAYS.values()]
        has_all = all(size >= 4 for size in work.sizes[0])  # otherwise a rank has no data for some of the micro-batches
        theirs = [by_ddp_alone(work), with_accelerate(work, dist.get_rank(), 4)] if has_all else []
        rows.append((name, *own, *([f"{error_of(update, expected):.2g}" for update in theirs] or ["–", "–"])))
    if dist.get_rank() == 0:
        header = ("", *WAYS, "DDP alone", "accelerate")
        note = f"{dist.get_world_size()} ranks over gloo. {about(('torch', 'accelerate'))}."
        table = markdown_table(header, rows)
        write_table(README.parent / "docs" / "exactness.md", "ranks", f"{table}\n\n{note}")
        print(table, note, sep="\n\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
