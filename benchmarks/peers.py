"""Writes the comparison in README.md from the tables of docs/exactness.md: `python -m benchmarks.peers`.

Nothing is measured here. `make exactness` measures first and then runs this.
"""

import re

from .tables import README, markdown_table, write_table

PAGE = README.parent / "docs" / "exactness.md"
CASES = (
    "sizes 16, 16, 16, 5",
    "tokens 3 / 60 / 17 / 40",
    "a micro-batch without a token",
    "two terms, each by its own count",
)
TOOLS = {
    ("torch", "bigbatch, one SGD step"): "PyTorch: bigbatch",
    ("torch", "divided by the number of micro-batches"): "loop that divides by the number of micro-batches",
    ("tensorflow", "bigbatch"): "TensorFlow: bigbatch",
    ("tensorflow", "Keras `gradient_accumulation_steps`"): "Keras `gradient_accumulation_steps`",
    ("tensorflow", "gradient-accumulator"): "gradient-accumulator",
    ("jax", "`value_and_grad`"): "JAX: bigbatch",
    ("jax", "optax `MultiSteps`"): "optax `MultiSteps`",
    ("jax", "optax `microbatch`"): "optax `microbatch`",
}
RANKS = {"DDP": "bigbatch", "DDP alone": "DDP alone", "accelerate": "accelerate"}
RANKS_CASES = ("16 samples against 5", "20 times as many tokens", "1 micro-batch against 4", "a rank with none")


def cells(name: str) -> dict[str, dict[str, str]]:
    """A table of docs/exactness.md: case -> column -> figure."""
    text = PAGE.read_text(encoding="utf-8").partition(f"<!-- {name} -->")[2].partition(f"<!-- /{name} -->")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in re.findall(r"^\|.*\|$", text, re.MULTILINE)]
    header, _, *body = rows
    return {row[0]: dict(zip(header[1:], row[1:], strict=True)) for row in body}


def comparison() -> str:
    """The two tables of the README: one process, then two ranks with DDP."""
    alone = [[tool, *(cells(name)[case][column] for case in CASES)] for (name, column), tool in TOOLS.items()]
    ranks = [[tool, *(cells("ranks")[case][column] for case in RANKS_CASES)] for column, tool in RANKS.items()]
    return f"{markdown_table(['', *CASES], alone)}\n\n{markdown_table(['two ranks with DDP', *RANKS_CASES], ranks)}"


def main() -> None:
    write_table(README, "peers", comparison())
    print(comparison())


if __name__ == "__main__":
    main()
