"""Options and files of the GPU benchmarks; imports no framework."""

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
    """The options; the commit is that of git unless given."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="What a step costs on a GPU.")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="the parts to measure")
    parser.add_argument("--out", type=Path, default=FOLDER / "measured", help="the folder for the JSON files")
    parser.add_argument("--commit", help="where git cannot tell")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to test the code without measuring")
    options = parser.parse_args()
    try:
        options.commit = options.commit or commit()
    except (OSError, subprocess.CalledProcessError):
        sys.exit("git does not know the commit: pass --commit.")
    return options


def write(part: str, found: dict[str, Any], packages: Sequence[str], device: str | None, options: Any) -> None:
    """Writes the results of a part, and the versions they were measured with."""
    is_rehearsal = options.tiny or options.device == "cpu"
    command = f"python -m benchmarks.gpu --only {part}"
    if is_rehearsal:
        command += f" --device {options.device}" + " --tiny" * options.tiny
    found["about"] = about(packages, device=device, at=options.commit, command=command)
    found["is_rehearsal"] = is_rehearsal
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"gpu_{part}.json").write_text(json.dumps(found, indent=1, ensure_ascii=False), encoding="utf-8")


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """The results of the parts that were measured."""
    files = {part: folder / f"gpu_{part}.json" for part in PARTS}
    return {part: json.loads(file.read_text(encoding="utf-8")) for part, file in files.items() if file.exists()}
