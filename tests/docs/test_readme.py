"""Runs the code blocks of README and docs, and checks their links, tables, and what they say about files."""

import ast
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
ELSEWHERE = ("tensorflow.md", "keras.md", "jax.md", "distributed.md", "normalisation.md")


def blocks() -> Iterator[Any]:
    for page in PAGES:
        if page.name in ELSEWHERE:
            continue  # frameworks conflict in one process: the tests of each framework run these
        for number, code in enumerate(python_blocks(page)):
            is_of_torch = not any(f"bigbatch.{other}" in code for other in ("keras", "jax", "tensorflow"))
            if is_of_torch and (page.name, number) != ("README.md", 0):
                yield pytest.param(code, id=f"{page.name}-{number}")


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def readers_names(folder: Path) -> dict[str, Any]:
    """The names that the pages assume a reader has: a model, an optimizer, a loader."""
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
def test_code_blocks_run(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = readers_names(tmp_path)
    before = [p.detach().clone() for p in names["model"].parameters()]
    exec(compile(code, "page", "exec"), names)
    if "accumulator.step" in code or "train_with" in code or "micro.backward" in code:
        moved = [not torch.equal(a, b) for a, b in zip(names["model"].parameters(), before, strict=True)]
        assert all(moved)


def test_first_block_runs_as_pasted() -> None:
    names: dict[str, Any] = {}
    exec(compile(python_blocks(ROOT / "README.md")[0], "README.md", "exec"), names)
    assert names["step"].is_applied
    assert names["accumulator"].num_steps == len(names["loader"]) == 5
    assert names["step"].num_micro_batches == 7  # 53 = 6 x 8 + 5


def test_first_screen_shows_code_and_make() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    code = next(k for k, line in enumerate(lines) if line == "```python")
    assert code < 8
    assert lines[code + 1 :].index("```") <= 14
    assert any(line.startswith("make demo") for line in lines[:24])
    assert any(line.startswith("make test") for line in lines[:24])


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of the headings: lower case, with dashes."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_have_targets() -> None:
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "benchmarks" / "RESULTS.md"]:
        for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text(encoding="utf-8")):
            to = page.parent / target if target else page
            assert to.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(to), f"{page.name}: {target}#{anchor}"


ARCHITECTURE = ROOT / "docs" / "architecture.md"
PACKAGE = ROOT / "bigbatch"


def test_list_of_files_is_complete() -> None:
    page = ARCHITECTURE.read_text(encoding="utf-8")
    assert tree() in page, "docs/architecture.md lists other files: run python -m tests.house --write"


def test_picture_shows_the_imports_between_folders() -> None:
    page = ARCHITECTURE.read_text(encoding="utf-8")
    drawn = set(re.findall(r"^    (\w+) --> (\w+)$", page, re.MULTILINE))
    needed = imports_between_folders() | {("cli", "tasks")}  # the command line finds tasks by name
    assert drawn == needed, f"docs/architecture.md: add the arrows {needed - drawn}, remove {drawn - needed}"


def imports_between_folders() -> set[tuple[str, str]]:
    """The pairs of folders of which one imports from the other."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        own = path.relative_to(PACKAGE).parts
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level:
                parts = [*own[: len(own) - node.level], *(node.module or "").split(".")]
                targets = {parts[0] or alias.name for alias in node.names}
                found |= {(own[0], target) for target in targets if (PACKAGE / target).is_dir()}
    return {(folder, target) for folder, target in found if folder != target and (PACKAGE / folder).is_dir()}


def test_files_that_the_architecture_names_exist() -> None:
    text = ARCHITECTURE.read_text(encoding="utf-8").partition("<!-- files -->")[0]
    names = set(re.findall(r"`([\w/]+(?:\.py|/))`", text))
    assert len(names) > 20
    missing = [name for name in names if not (ROOT / name).exists() and not any(PACKAGE.rglob(name.strip("/")))]
    assert missing == []


def test_files_of_each_job_exist() -> None:
    """The table of the jobs: one column per framework."""
    rows = re.findall(r"^\| (.*) \|$", ARCHITECTURE.read_text(encoding="utf-8"), re.MULTILINE)
    table = [row.split(" | ") for row in rows]
    head = table.index(["job", "torch", "tensorflow", "jax"])
    jobs = [row for row in table[head + 2 :] if len(row) == 4][:13]
    assert jobs[-1][0] == "private APIs of the framework"
    for job, *cells in jobs:
        for framework, cell in zip(("torch", "tensorflow", "jax"), cells, strict=True):
            for name in re.findall(r"`([\w/.]+)`", cell):
                assert (PACKAGE / framework / name).exists(), f"{job}: {framework}/{name}"


def test_readme_compares_the_measured_figures() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert comparison() in readme, "README.md compares other figures: run python -m benchmarks.peers"


def test_tables_have_figures() -> None:
    pages = [*PAGES, ROOT / "benchmarks" / "RESULTS.md"]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for name in re.findall(r"<!-- ([^/].*?) -->", text):
            table = text.partition(f"<!-- {name} -->")[2].partition(f"<!-- /{name} -->")[0]
            assert table.count("|") > 10 or "```" in table, f"{page.name}: {name}"
            assert "with changes" not in table, f"{page.name}: {name} was measured on code that was not committed"
