"""Writes tables into Markdown pages, and the line that says how they were measured."""

import os
import platform
import re
import subprocess
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "RESULTS.md"
README = FOLDER.parent / "README.md"
PACKAGES = ("torch", "accelerate", "pytorch-lightning", "transformers")


def write_table(path: str | os.PathLike[str], name: str, markdown: str) -> None:
    """Replaces the text between `<!-- name -->` and `<!-- /name -->`."""
    path = Path(path)
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    text = path.read_text(encoding="utf-8")
    before, has_begin, rest = text.partition(begin)
    _, has_end, after = rest.partition(end)
    if not (has_begin and has_end):
        raise ValueError(f"{path.name} has no place for the table: add the lines {begin} and {end}")
    path.write_text(f"{before}{begin}\n{markdown.strip()}\n{end}{after}", encoding="utf-8")


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table with the first column aligned left and all others right."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def about(
    packages: Sequence[str] = PACKAGES,
    cores: int | None = None,
    *,
    device: str | None = None,
    at: str | None = None,
    command: str | None = None,
) -> str:
    """Says how a table was measured: device, CPU, versions of installed packages, commit, command."""
    cores = cores or len(os.sched_getaffinity(0))
    parts = [
        *([device] if device else []),
        f"{_cpu()}, {cores} core{'s' * (cores != 1)}",
        f"Python {platform.python_version()}",
        *(f"{package} {found}" for package in packages if (found := _version(package))),
        f"commit {at or commit()}",
        *([f"`{command}`"] if command else []),
    ]
    return ", ".join(parts)


def _cpu() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit() -> str:
    """The commit of the library and the benchmark; notes changes that are not committed."""
    found = _git("rev-parse", "--short", "HEAD")
    return f"{found} with changes" if _git("status", "--porcelain", "--", "../bigbatch", "*.py") else found


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=FOLDER, check=True, capture_output=True, text=True).stdout.strip()
