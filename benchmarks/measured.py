"""Options and files of the benchmarks on a GPU; no framework in here."""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .tables import FOLDER, about, commit

PARTS = ("gpt2", "tiny", "images", "linear", "jax")


def parsed() -> argparse.Namespace:
    """The options, with the commit as git tells it where none is given."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="What a step costs on a GPU.")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="the parts to measure")
    parser.add_argument("--out", type=Path, default=FOLDER / "measured", help="the folder for the JSON files")
    parser.add_argument("--commit", help="where git cannot tell")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes that mean nothing: a rehearsal")
    options = parser.parse_args()
    try:
        options.commit = options.commit or commit()
    except (OSError, subprocess.CalledProcessError):
        sys.exit("git cannot tell which commit this is: pass --commit.")
    return options


def write(part: str, found: dict[str, Any], packages: Sequence[str], device: str | None, options: Any) -> None:
    """Writes what a part found, and what it was measured with."""
    is_rehearsal = options.tiny or options.device == "cpu"
    command = f"python -m benchmarks.gpu --only {part}"
    if is_rehearsal:
        command += f" --device {options.device}" + " --tiny" * options.tiny
    found["about"] = about(packages, device=device, at=options.commit, command=command)
    found["is_rehearsal"] = is_rehearsal
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"gpu_{part}.json").write_text(json.dumps(found, indent=1, ensure_ascii=False), encoding="utf-8")


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """What the parts found that were measured."""
    files = {part: folder / f"gpu_{part}.json" for part in PARTS}
    return {part: json.loads(file.read_text(encoding="utf-8")) for part, file in files.items() if file.exists()}
