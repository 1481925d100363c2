"""Compares the update with that of the plain full batch and writes docs/exactness.md: `make exactness`."""

import torch

from tests.problems import problems
from tests.torch.test_gradients import accumulation_errors
from tests.torch.training import WAYS, Run, adamw, update_error, warm_up

from .tables import README, about, markdown_table, write_table

IN_README = (
    "equal micro-batches",
    "sizes 16, 16, 16, 5",
    "windows of 4 and 2",
    "tokens 3 / 60 / 17 / 40",
    "two terms, each by its own count",
)
LIMITS = {"sgd": 1e-12, "adamw": 1e-9}


def torch_rows() -> list[list[str]]:
    """One row per problem: the largest error of the three ways to feed it, and the error of the naive loop."""
    rows = []
    for problem in problems():
        full = Run(problem).full()
        sgd = max(update_error(Run(problem).accumulated(way), full) for way in WAYS)
        options = {"epochs": 3, "clip_norm": 0.5, "make_scheduler": warm_up}
        full_adamw = Run(problem, adamw, **options).full()
        long = max(update_error(Run(problem, adamw, **options).accumulated(way), full_adamw) for way in WAYS)
        naive = update_error(Run(problem).naive(), full)
        assert sgd <= LIMITS["sgd"]
        assert long <= LIMITS["adamw"]
        rows.append([problem.name, f"{sgd:.0e}", f"{long:.0e}", f"{naive:.2f}" if naive > 1e-3 else f"{naive:.0e}"])
    return rows


def low_precision_rows() -> list[list[str]]:
    rows = []
    for dtype in (torch.bfloat16, torch.float16):
        errors = accumulation_errors(dtype)
        assert 20 * errors["ours"] <= errors["plain"]
        rows.append([str(dtype).removeprefix("torch."), f"{errors['ours']:.0e}", f"{errors['plain']:.0e}"])
    return rows


def main() -> None:
    torch.set_num_threads(1)
    rows = torch_rows()
    header = ["case", "bigbatch, one SGD step", "bigbatch, 3 epochs of AdamW", "divided by the number of micro-batches"]
    exactness = markdown_table(header, rows)
    short = [[name, ours, naive] for name, ours, _, naive in rows if name in IN_README]
    write_table(
        README,
        "exactness",
        markdown_table(["", "bigbatch", "divided by the number of micro-batches"], short),
    )
    low = markdown_table(["parameters in", "bigbatch", "plain `.grad`"], low_precision_rows())
    page = README.parent / "docs" / "exactness.md"
    write_table(page, "torch", f"{exactness}\n\n{about()}")
    write_table(page, "torch low precision", low)
    print(exactness, low, sep="\n\n")


if __name__ == "__main__":
    main()
