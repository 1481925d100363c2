"""Trains with the full batch in a separate process, so that its memory and its failures do not touch the run."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from ...core.verify.result import Verification
from ..config import VERIFY_FLAGS, Config, option
from ..errors import NOT_EXACT
from ..report.run import Run, read_run
from ..summary import Comparison, FullBatch, Summary, parse
from .display import Screen
from .folder import FULL_BATCH, RunFolder
from .ranks import environment_of_one

_BIGBATCH = [sys.executable, "-m", "bigbatch"]


def with_full_batch(summary: Summary, config: Config, folder: RunFolder, screen: Screen) -> Summary:
    """Trains with the full batch; returns the summary with its results, the comparison and the verification."""
    full_folder = RunFolder(folder.path / FULL_BATCH)
    reason = _train_full_batch(config, summary.num_steps, full_folder, screen)
    if reason is not None:
        return replace(summary, full_batch=FullBatch(status="failed", reason=reason, scores={}))
    full = read_run(full_folder.path)
    results = ("loss", "scores", "seconds", "samples_per_second", "peak_bytes")
    return replace(
        summary,
        full_batch=FullBatch(status="finished", **{name: getattr(full.summary, name) for name in results}),
        comparison=compare(read_run(folder.path), full),
        verification=_verify(config, screen),
    )


def _verify(config: Config, screen: Screen) -> Verification | None:
    """Returns the result of `bigbatch verify`, in a separate process because it needs the memory of the full batch."""
    given = {name: getattr(config, name) for name in VERIFY_FLAGS if name != "framework"}
    flags = [text for name, value in given.items() if value is not None for text in (option(name), str(value))]
    done = subprocess.run(
        [*_BIGBATCH, "verify", *_task_of(config), *flags, "--json"],
        capture_output=True, text=True, stdin=subprocess.DEVNULL, env=environment_of_one(),
    )  # fmt: skip
    if done.returncode not in (0, NOT_EXACT):
        lines = done.stderr.strip().splitlines()
        screen.note(f"not verified: {lines[-1] if lines else f'the process ended with exit code {done.returncode}'}")
        return None
    return parse(Verification, json.loads(done.stdout.splitlines()[-1]))


def _task_of(config: Config) -> list[str]:
    """The task, with --framework for a built-in one: a file trains with the framework that it imports."""
    is_file = Path(config.task).suffix == ".py"
    return [config.task] if is_file else [config.task, "--framework", config.framework]


def _train_full_batch(config: Config, num_steps: int, folder: RunFolder, screen: Screen) -> str | None:
    """Trains with the full batch as one micro-batch. Returns the reason if it fails."""
    full = replace(config, micro_batch_size=config.batch_size, compare=False, tensorboard=False)
    folder.path.mkdir(exist_ok=True)
    folder.clear()
    wanted = folder.path / "wanted.toml"
    wanted.write_text(full.as_toml(), encoding="utf-8")
    log = folder.path / "log.txt"
    screen.start("full batch", num_steps)
    with log.open("w") as file:
        child = subprocess.Popen(
            [*_BIGBATCH, "train", *_task_of(config), "--config", str(wanted), "--out", str(folder.path), "--quiet"],
            stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True, env=environment_of_one(),
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
    return f"it ended with exit code {child.returncode}: {lines[-1] if lines else 'without a message'}"


def compare(ours: Run, full: Run) -> Comparison:
    """Compares the weights and the losses of two finished trainings."""
    theirs = RunFolder(full.folder).weights()
    differences = {}
    for name, array in RunFolder(ours.folder).weights().items():
        if np.issubdtype(array.dtype, np.floating) and array.size:
            scale = float(np.abs(theirs[name]).max())
            differences[name] = float(np.abs(array - theirs[name]).max()) / (scale or 1.0)
    worst = max(differences, key=lambda name: differences[name], default="")
    losses = [[record.loss for record in run.records] for run in (ours, full)]
    return Comparison(
        max_weight_difference=differences.get(worst, 0.0),
        worst_weight=worst,
        max_loss_difference=max((abs(a - b) for a, b in zip(*losses, strict=False)), default=0.0),
    )
