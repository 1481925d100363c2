"""The same run with the full batch, in a process of its own, so that its memory and its failures are its own."""

import dataclasses
import itertools
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from ...core.text import from_json
from ..config import Config, option
from ..errors import NOT_EXACT
from .display import Screen
from .folder import FULL_BATCH, HISTORY, RunFolder
from .ranks import environment_of_one

BIGBATCH = [sys.executable, "-m", "bigbatch"]
KEPT = ("loss", "scores", "seconds", "samples_per_second", "peak_bytes")


def with_full_batch(config: Config, num_steps: int, folder: RunFolder, screen: Screen) -> dict[str, Any]:
    """What the summary says of the full batch, and of the difference to it."""
    other = RunFolder(folder.path / FULL_BATCH)
    reason = run_full_batch(config, num_steps, other, screen)
    if reason is not None:
        failed: dict[str, Any] = {"status": "failed", "reason": reason, **dict.fromkeys(KEPT), "scores": {}}
        return {"full_batch": failed}
    found = other.summary()
    full = {"status": "finished", "reason": None, **{name: found[name] for name in KEPT}}
    return {"full_batch": full, "comparison": difference(folder, other), "verification": verified(config, screen)}


def verified(config: Config, screen: Screen) -> dict[str, Any] | None:
    """What `bigbatch verify` finds; it needs the memory of the full batch too, so in a process of its own."""
    options = ["batch_size", "micro_batch_size", "seed", "device"]
    flags = [[option(name), str(getattr(config, name))] for name in options if getattr(config, name) is not None]
    done = subprocess.run(
        [*BIGBATCH, "verify", config.task, *framework_of(config), *itertools.chain(*flags), "--json"],
        capture_output=True, text=True, stdin=subprocess.DEVNULL, env=environment_of_one(),
    )  # fmt: skip
    if done.returncode not in (0, NOT_EXACT):
        lines = done.stderr.strip().splitlines()
        screen.note(f"not verified: {lines[-1] if lines else f'the process ended with {done.returncode}'}")
        return None
    found: dict[str, Any] = from_json(json.loads(done.stdout.splitlines()[-1]))
    return found


def framework_of(config: Config) -> list[str]:
    """The flag, for a built-in task: a file is of the framework that it imports."""
    return [] if Path(config.task).suffix == ".py" else ["--framework", config.framework]


def run_full_batch(config: Config, num_steps: int, folder: RunFolder, screen: Screen) -> str | None:
    """Trains with the full batch as one micro-batch; returns why not, if it could not."""
    told = dataclasses.replace(config, micro_batch_size=config.batch_size, compare=False, tensorboard=False)
    folder.path.mkdir(exist_ok=True)
    folder.clear()
    wanted = folder.path / "wanted.toml"
    wanted.write_text(told.as_toml(), encoding="utf-8")
    log = folder.path / "log.txt"
    screen.start("full batch", num_steps)
    with log.open("w") as file:
        child = subprocess.Popen(
            [*BIGBATCH, "train", config.task, *framework_of(config), "--config", str(wanted),
             "--out", str(folder.path), "--quiet"],
            stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True,
            env=environment_of_one(),
        )  # fmt: skip
    try:
        while child.poll() is None:
            screen.steps_done(folder.num_steps())
            time.sleep(0.1)
    except KeyboardInterrupt:
        return "it was stopped"
    finally:
        child.kill()
        child.wait()
        screen.end()
        wanted.unlink()
    if child.returncode == 0:
        log.unlink()
        return None
    if child.returncode < 0:
        return f"its process was killed (signal {-child.returncode}), as happens when memory runs out"
    lines = log.read_text(errors="replace").strip().splitlines()
    return f"it ended with exit code {child.returncode}: {lines[-1] if lines else 'it said nothing'}"


def difference(ours: RunFolder, full: RunFolder) -> dict[str, Any]:
    """How far apart two runs are: weights relative to the largest of each tensor, losses as they are."""
    theirs = full.weights()
    distances = {}
    for name, array in ours.weights().items():
        if not np.issubdtype(array.dtype, np.floating) or not array.size:
            continue
        scale = np.abs(theirs[name]).max()
        distance = np.abs(array - theirs[name]).max()
        distances[name] = float(distance / scale) if scale else float(distance)
    worst = max(distances, key=lambda name: distances[name], default="")
    losses = [
        [float(json.loads(line)["loss"]) for line in (run.path / HISTORY).read_text(encoding="utf-8").splitlines()]
        for run in (ours, full)
    ]
    return {
        "max_weight_difference": distances.get(worst, 0.0),
        "worst_weight": worst,
        "max_loss_difference": max((abs(a - b) for a, b in zip(*losses, strict=False)), default=0.0),
    }
