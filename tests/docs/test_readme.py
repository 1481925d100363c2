"""Runs the code blocks of README and docs, and checks their links and tables."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.peers import comparison
from tests.house import tree

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ELSEWHERE = ("tensorflow.md", "keras.md", "jax.md", "distributed.md")


def blocks() -> Iterator[Any]:
    for page in PAGES:
        if page.name in ELSEWHERE:
            continue  # frameworks conflict in one process: the tests of each framework run these
        for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)):
            if not any(f"bigbatch.{other}" in code for other in ("keras", "jax", "tensorflow")):
                yield pytest.param(code, id=f"{page.name}-{number}")


def what_the_reader_has(folder: Path) -> dict[str, Any]:
    """A model, an optimizer, a loader: what the pages take for granted."""
    from bigbatch.torch import Accumulator, verify

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = [{"x": torch.randn(n, 6), "y": torch.randint(0, 4, (n,))} for n in (20, 20, 20, 20, 20, 7)]

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return cross_entropy(model(batch["x"]), batch["y"])

    return {
        "torch": torch,
        "cross_entropy": cross_entropy,
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
        "loader": loader,
        "batch": loader[0],
        "loss": loss,
        "path": folder / "state.pt",
        "accumulator": Accumulator(model, optimizer, loss, micro_batch_size=8),
        "Accumulator": Accumulator,
        "verify": verify,
    }


@pytest.mark.parametrize("code", list(blocks()))
def test_code_of_the_pages_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = what_the_reader_has(tmp_path)
    before = [p.detach().clone() for p in names["model"].parameters()]
    exec(compile(code, "page", "exec"), names)
    if "accumulator.step" in code or "train_with" in code or "micro.backward" in code:
        moved = [not torch.equal(a, b) for a, b in zip(names["model"].parameters(), before, strict=True)]
        assert all(moved)


def test_the_first_screen() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    code = next(k for k, line in enumerate(lines) if line == "```python")
    assert code < 8
    assert lines[code + 1 :].index("```") <= 8
    assert any(line.startswith("make demo") for line in lines[:24])
    assert any(line.startswith("make test") for line in lines[:24])


def anchors(page: Path) -> set[str]:
    """What GitHub lets a link point to: the headings, in lower case, with dashes."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "benchmarks" / "RESULTS.md"]:
        for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text(encoding="utf-8")):
            to = page.parent / target if target else page
            assert to.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(to), f"{page.name}: {target}#{anchor}"


def test_the_list_of_files_is_complete() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert tree() in page, "docs/architecture.md lists other files: run python -m tests.house --write"


def test_the_comparison_is_that_of_the_tables() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert comparison() in readme, "README.md compares other figures: run python -m benchmarks.peers"


def test_tables_are_filled() -> None:
    pages = [*PAGES, ROOT / "benchmarks" / "RESULTS.md"]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for name in re.findall(r"<!-- ([^/].*?) -->", text):
            table = text.partition(f"<!-- {name} -->")[2].partition(f"<!-- /{name} -->")[0]
            assert table.count("|") > 10 or "```" in table, f"{page.name}: {name}"
            assert "with changes" not in table, f"{page.name}: {name} was measured on code that was not committed"
