"""Measures a step on a GPU: `python -m benchmarks.gpu`. Then `python -m benchmarks.gpu_tables` writes the tables.

Each part runs in its own process and writes a JSON file. `--device cpu --tiny` tries it out without a GPU.
"""

import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import torch

from . import measured
from .gpu_parts import PARTS, Setting
from .tables import PACKAGES


def main() -> None:
    options = measured.parsed()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("There is no GPU here: `python -m benchmarks.gpu --device cpu --tiny` tries it out without one.")
    if options.only[1:] or options.only == ["jax"]:
        failed = [part for part in options.only if not runs(part, options)]
    else:
        failed = measure(options.only[0], options)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def runs(part: str, options: Any) -> bool:
    """Measures a part in its own process; returns whether that worked."""
    print(f"--- {part}", flush=True)
    missing = [name for name in ("jax", "optax") if part == "jax" and find_spec(name) is None]
    if missing:
        print(f"JAX is left out: {' and '.join(missing)} not installed, which bigbatch.jax needs.")
        return True
    module = "benchmarks.jax_gpu" if part == "jax" else "benchmarks.gpu"  # two frameworks in one process would conflict
    command = [sys.executable, "-m", module, "--only", part, "--out", str(options.out), "--commit", options.commit]
    command += ["--device", options.device, *["--tiny"] * options.tiny]
    return subprocess.run(command).returncode == 0


def measure(part: str, options: Any) -> list[str]:
    """Measures a part and writes its file; returns the names of the contestants that failed."""
    found = PARTS[part](Setting(options.device, options.tiny))
    device = torch.cuda.get_device_name() if options.device == "cuda" else None
    measured.write(part, found, PACKAGES, device, options)
    return list(found.get("failed", {}))


if __name__ == "__main__":
    main()
