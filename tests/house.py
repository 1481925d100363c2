"""Counts how easy it is to find your way around the code, and writes two parts of docs/architecture.md.

    python -m tests.house                # print the table
    python -m tests.house --write        # write the table and the list of files into docs/architecture.md
    python -m tests.house --trace        # print the files that a step passes through, in order
    python -m tests.house --names        # print the public names that no other module uses
    python -m tests.house --divisions    # print the places that divide by a total weight

Each row of the table is a number that should fall, or stay low:

- the files of `bigbatch/` that a step with three micro-batches calls into, and how often a call is in another file
  than the call before it (the second step is traced, when everything is warm);
- the inheritance depth of `Accumulator`;
- the lines of `bigbatch/` that are not blank, and how many of them are docstrings;
- the places that divide by a total weight (see `tests/core/test_heart.py`);
- the files that mention an option by name;
- the public names at the top level of a module that no other module uses.
"""

import argparse
import ast
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "bigbatch"
PAGE = ROOT / "docs" / "architecture.md"
SUFFIXES = {".py", ".jinja"}
TOTALS = {"total", "totals", "total_weight", "weight", "weights", "w", "t", "whole", "count", "counts", "size"}
TOTALS |= {"num_samples", "num_tokens", "nums", "divisor", "reference"}
DIVIDE = {"divide", "divide_no_nan", "div", "div_", "_foreach_div", "_foreach_div_", "true_divide", "truediv"}
OTHER_DIVISIONS = {
    ("torch/distributed/fsdp.py", "total / self.size"): "self.size is the number of ranks",
}


def sources(folder: Path = PACKAGE) -> list[Path]:
    """Every source file of the package."""
    return sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES)


def num_docstring_lines() -> int:
    """The lines of docstrings among them, those of attributes included."""
    num = 0
    for path in sources():
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if path.suffix == ".py" else ():
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                num += sum(1 for line in text.splitlines()[node.lineno - 1 : node.end_lineno] if line.strip())
    return num


def num_lines() -> int:
    """The lines of the package that are not blank."""
    return sum(1 for path in sources() for line in path.read_text().splitlines() if line.strip())


def files_that_mention(word: str) -> list[str]:
    """The files of the package with this word in them."""
    pattern = re.compile(rf"\b{word}\b")
    return [str(path.relative_to(PACKAGE)) for path in sources() if pattern.search(path.read_text())]


def unused_public_names() -> list[str]:
    """The public functions, classes and constants of private modules that no other module of the package mentions."""
    texts = {path: path.read_text() for path in sources()}
    words = {path: set(re.findall(r"\w+", text)) for path, text in texts.items()}
    found = []
    for path, text in texts.items():
        if path.suffix != ".py" or (
            path.parent.name in ("torch", "tensorflow", "jax", "keras") and "tasks" in path.parts
        ):
            continue  # a task's functions are for the user and the command line, which looks them up by name
        for name in top_level_names(ast.parse(text)):
            if not name.startswith("_") and not any(name in words[other] for other in texts if other != path):
                found.append(f"{path.relative_to(PACKAGE)}:{name}")
    return found


def divisions(source: str) -> list[str]:
    """Every expression that divides by a total weight, recognised by the names in it.

    A norm divided by a norm does not count: `distance_norm / total`.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            dividend, divisor = node.left, node.right
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
            dividend, divisor = node.target, node.value
        elif isinstance(node, ast.Call) and node.args and _names(node.func) & DIVIDE:
            dividend, divisor = node.args[0], node.args[-1]  # x.div(total) has one argument
        else:
            continue
        is_norm = any("norm" in name for name in _names(dividend))
        is_guarded = isinstance(node, ast.Call) and "divide_no_nan" in _names(node.func)  # what else would it be for
        if is_guarded or (not is_norm and TOTALS & {name.lstrip("_") for name in _names(divisor)}):
            found.append(ast.unparse(node))
    return found


def places_that_divide() -> list[str]:
    """The divisions by a total weight in the package, with their files; there should be one, in core/weight.py."""
    return [
        f"{name}: {text}"
        for path in sources()
        if path.suffix == ".py"
        for name in [path.relative_to(PACKAGE).as_posix()]
        for text in divisions(path.read_text())
        if (name, text) not in OTHER_DIVISIONS
    ]


def _names(tree: ast.AST) -> set[str]:
    """All names in an expression: variables, attributes and functions."""
    nodes = list(ast.walk(tree))
    return {n.id for n in nodes if isinstance(n, ast.Name)} | {n.attr for n in nodes if isinstance(n, ast.Attribute)}


def top_level_names(tree: ast.Module) -> Iterator[str]:
    """The functions, classes and variables that a module defines."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def depth(kind: type) -> int:
    """How many classes of this package a class inherits from, itself included."""
    return sum(base.__module__.startswith("bigbatch") for base in kind.__mro__)


def calls_of(work: Callable[[], Any]) -> list[str]:
    """The file of every call of a function of the package, in order."""
    found: list[str] = []
    package = str(PACKAGE)

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            found.append(str(Path(frame.f_code.co_filename).relative_to(package)))

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


def walk(calls: list[str]) -> tuple[int, int]:
    """The number of files, and the number of changes of file."""
    return len(set(calls)), sum(a != b for a, b in itertools.pairwise(calls))


def torch_walks() -> dict[str, list[str]]:
    """The calls of a step of three micro-batches, and of the `micro_batch()` block that ends such a window."""
    import torch

    from bigbatch.torch import Accumulator

    def made(**options: Any) -> tuple[Any, Any]:
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, Accumulator(model, optimizer, loss, **options)

    def loss(model: Any, batch: Any) -> Any:
        x, y = batch
        return torch.nn.functional.cross_entropy(model(x), y)

    batch = torch.randn(6, 4), torch.randint(2, (6,))
    _, whole = made(micro_batch_size=2)
    whole.step(batch)
    model, fed = made(accumulation_steps=3)

    def feed(k: int) -> None:
        with fed.micro_batch(weight=2) as micro:
            micro.backward(loss(model, [part[k : k + 2] for part in batch]))

    for k in (0, 2, 4, 0, 2):
        feed(k)
    return {"step": calls_of(lambda: whole.step(batch)), "micro_batch": calls_of(lambda: feed(4))}


def rows() -> Iterator[tuple[str, str, str]]:
    """The table: what is counted, its value at commit c700251, and its value now."""
    from bigbatch.torch import Accumulator

    walks = torch_walks()
    step, fed = ("{} / {}".format(*walk(walks[name])) for name in ("step", "micro_batch"))
    clip, policy = (len(files_that_mention(word)) for word in ("clip_norm", "on_nonfinite"))
    yield "files that a torch `step` of 3 micro-batches passes through / changes of file", "23 / 171", step
    yield "the same for the `micro_batch()` block that ends such a window", "21 / 263", fed
    yield "inheritance depth of `Accumulator`", "4", str(depth(Accumulator))
    yield "lines of `bigbatch/` that are not blank", "16,976", f"{num_lines():,}"
    yield "of these, docstrings", "2,077", f"{num_docstring_lines():,}"
    yield "places that compute w / W", "25", str(len(places_that_divide()))
    yield "files that mention `clip_norm` / `on_nonfinite`", "15 / 13", f"{clip} / {policy}"
    yield "public top-level names that no other module uses", "263", str(len(unused_public_names()))


def table() -> str:
    lines = ["| | before | now |", "| --- | ---: | ---: |", *(f"| {' | '.join(row)} |" for row in rows())]
    return "\n".join(lines)


def tree(folder: Path = PACKAGE, depth: int = 0) -> str:
    """The files of a folder, each with the first line of its docstring."""
    lines = [_line(folder.name + "/", folder / "__init__.py", depth)]
    for path in sorted(folder.iterdir(), key=lambda path: (path.is_dir(), path.name)):
        if path.is_dir() and (path / "__init__.py").exists():
            lines.append(tree(path, depth + 1))
        elif path.suffix in SUFFIXES and path.name != "__init__.py":
            lines.append(_line(path.name, path, depth + 1))
    return "\n".join(lines)


def _line(name: str, path: Path, depth: int) -> str:
    doc = (ast.get_docstring(ast.parse(path.read_text())) or "") if path.suffix == ".py" else ""
    return f"{'  ' * depth + name:28} {doc.partition(chr(10))[0]}".rstrip()


def write() -> None:
    """Replaces the text between `<!-- name -->` and `<!-- /name -->`."""
    text = PAGE.read_text(encoding="utf-8")
    for name, part in (("house", table()), ("files", f"```\n{tree()}\n```")):
        before, begin, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- /{name} -->")
        text = f"{before}{begin}{part}\n{end}{after}"
    PAGE.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write docs/architecture.md")
    parser.add_argument("--trace", action="store_true", help="print the files that a step passes through")
    parser.add_argument("--names", action="store_true", help="print the public names that no other module uses")
    parser.add_argument("--divisions", action="store_true", help="print the places that divide by a total weight")
    options = parser.parse_args()
    if options.trace:
        for name, calls in torch_walks().items():
            print(f"{name}:", *calls, sep="\n  ")
    if options.divisions:
        print(*places_that_divide(), sep="\n")
    if options.names:
        print(*unused_public_names(), sep="\n")
    print(table())
    if options.write:
        write()


if __name__ == "__main__":
    main()
