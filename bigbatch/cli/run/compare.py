"""Trains with the full batch in a separate process, so that its memory and its failures do not touch the run."""

import json
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import numpy as np

from ...core.checkpoint.files import check_own, remove, unfinished, write_through
from ...core.verify.result import Verification
from ..child import started
from ..config import VERIFY_FLAGS, Config, option
from ..errors import NOT_EXACT
from ..report.run import Run, read_run
from ..summary import Comparison, FullBatch, Summary, parse
from .display import Screen
from .folder import FULL_BATCH, FULL_BATCH_CONFIG, RunFolder


def with_full_batch(summary: Summary, config: Config, folder: RunFolder, screen: Screen) -> Summary:
    """Trains with the full batch; returns the summary with its results, the comparison and the verification."""
    full_folder = RunFolder(folder.path / FULL_BATCH)
    reason = _train_full_batch(config, summary.num_steps, full_folder, screen)
    if reason is not None:
        return replace(summary, full_batch=FullBatch(status="failed", reason=reason, scores={}))
    full = read_run(full_folder.path)
    results = ("loss", "metrics", "scores", "seconds", "samples_per_second", "peak_bytes")
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
    with TemporaryFile() as output, TemporaryFile() as errors:
        with started("verify", *_task_of(config), *flags, "--json", output=output, errors=errors) as child:
            code = child.wait()
        lines, reasons = _lines(output), _lines(errors)
    if code not in (0, NOT_EXACT):
        screen.note(f"not verified: {reasons[-1] if reasons else f'the process ended with exit code {code}'}")
        return None
    return parse(Verification, json.loads(lines[-1]))


def _lines(file: IO[bytes]) -> list[str]:
    file.seek(0)
    return file.read().decode(errors="replace").strip().splitlines()


def _task_of(config: Config) -> list[str]:
    """The task, with --framework for a built-in one: a file trains with the framework that it imports."""
    is_file = Path(config.task).suffix == ".py"
    return [config.task] if is_file else [config.task, "--framework", config.framework]


def _train_full_batch(config: Config, num_steps: int, folder: RunFolder, screen: Screen) -> str | None:
    """Trains with the full batch as one micro-batch. Returns the reason if it fails."""
    full = replace(config, micro_batch_size=config.batch_size, compare=False, tensorboard=False)
    check_own(folder.path, is_folder=True)
    remove(folder.path)  # what an earlier comparison of this run has left
    wanted = unfinished(folder.path.with_name(FULL_BATCH_CONFIG))
    write_through(wanted, full.as_toml().encode())
    flags = ("--config", str(wanted), "--out", str(folder.path), "--quiet")
    screen.start("full batch", num_steps)
    try:
        with TemporaryFile() as log:
            with started("train", *_task_of(config), *flags, output=log, errors=log) as child:
                while (code := child.poll()) is None:
                    screen.steps_done(folder.num_steps())
                    time.sleep(0.1)
            lines = _lines(log)
    except KeyboardInterrupt:
        return "it was stopped"
    finally:
        screen.end()
        remove(wanted)
    if code == 0:
        return None
    if code < 0:
        return f"its process was killed (signal {-code}), as happens when memory runs out"
    return f"it ended with exit code {code}: {lines[-1] if lines else 'without a message'}"


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
