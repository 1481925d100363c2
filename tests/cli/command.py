"""Runs the command line in a process, on tasks written for a test."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from bigbatch.cli.app import app
from bigbatch.cli.report.run import read_run
from bigbatch.cli.run.compare import compare
from bigbatch.cli.summary import Comparison

from .zygote import zygote

BIGBATCH = Path(sys.executable).parent / "bigbatch"
CACHE = Path(__file__).parents[2] / ".pytest_cache" / "jax"
TINY = """
import torch
from torch.nn.functional import cross_entropy

def model():
    nn = torch.nn
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Dropout({dropout}), nn.Linear(12, 3))

class Batches:
    def __init__(self, batch_size, epoch, seed):
        draw = torch.Generator().manual_seed(1000 * seed + epoch)
        x = torch.randn(53, 6, generator=draw)
        self.parts = [(part, part[:, :3].argmax(1)) for part in x.split(batch_size)]

    def __len__(self):
        return len(self.parts)

    def __iter__(self):
        return iter(self.parts)

def batches(batch_size, epoch, seed):
    return Batches(batch_size, epoch, seed)

def loss(model, batch):
    return cross_entropy(model(batch[0]), batch[1])

def evaluate(model):
    x = torch.randn(100, 6, generator=torch.Generator().manual_seed(0))
    return {{"accuracy": (model(x).argmax(1) == x[:, :3].argmax(1)).float().mean()}}

defaults = {{"batch_size": 16, "micro_batch_size": 3, "epochs": 3, "lr": 0.05}}
"""


def run(
    *arguments: Any, cwd: Path | None = None, writes: Path | None = None, has_rights: bool = True
) -> subprocess.CompletedProcess[str]:
    """Runs `bigbatch …` to its end, in a process forked from one that has imported the framework.

    Args:
        *arguments: Of the command.
        cwd: The current folder.
        writes: A file for a list of all that the process writes.
        has_rights: Whether the rights of root, if it has them, go beyond what files permit.
    """
    command = list(map(str, arguments))
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "stdout", Path(folder) / "stderr"
        code = zygote(framework_of_command(command)).run(
            arguments=command, folder=str(cwd or Path.cwd()), environment=environment(), out=str(out), err=str(err),
            writes=str(writes or ""), has_rights=has_rights,
        )  # fmt: skip
        texts = (path.read_text(errors="backslashreplace") for path in (out, err))
        return subprocess.CompletedProcess(command, code, *texts)


def run_here(*arguments: Any) -> subprocess.CompletedProcess[str]:
    """Runs `bigbatch …` in this process: for options that are refused before the task is loaded."""
    command = list(map(str, arguments))
    done = CliRunner().invoke(app, command)
    return subprocess.CompletedProcess(command, done.exit_code, done.stdout, done.stderr)


def run_fresh(*arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs the installed command `bigbatch …` as a user's shell does."""
    command = [str(BIGBATCH), *map(str, arguments)]
    variables = environment()
    if "preexec_fn" in options:  # it limits the size of files, and coverage's own file would exceed that
        variables.pop("COVERAGE_PROCESS_START", None)
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=variables, **options)


def framework_of_command(command: list[str]) -> str:
    """The framework whose zygote runs the command; torch for commands that are refused before they need one."""
    if "--framework" in command:
        found = command[command.index("--framework") + 1]
    else:
        files = [Path(argument) for argument in command if argument.endswith(".py")]
        text = files[0].read_text(encoding="utf-8") if files and files[0].exists() else ""
        found = next((name for name in ("tensorflow", "keras", "jax") if f"import {name}\n" in text), "torch")
    return {"keras": "tensorflow", "caffe": "torch"}.get(found, found)


def environment() -> dict[str, str]:
    known = {"TF_CPP_MIN_LOG_LEVEL": "3", "COLUMNS": "120", "OMP_NUM_THREADS": "1"}
    # on JAX most of the time is spent compiling the same operations in every process
    cache = {"JAX_COMPILATION_CACHE_DIR": str(CACHE), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    return {**os.environ, **known, **cache}


def write_task(folder: Path, code: str = "", name: str = "tiny", dropout: float = 0.0) -> Path:
    path = folder / f"{name}.py"
    path.write_text(TINY.format(dropout=dropout) + code, encoding="utf-8")
    return path


def train(task: Path | str, out: Path, *arguments: Any) -> dict[str, Any]:
    """Runs a training that must succeed; returns its summary."""
    done = run("train", task, "--out", out, *arguments)
    assert done.returncode == 0, done.stderr
    return summary_of(out)


def train_both(task: Path | str, out: Path, *arguments: Any) -> tuple[dict[str, Any], dict[str, Any], Comparison]:
    """Both trainings of a run and their comparison, without starting the processes that `train` starts for it."""
    ours = train(task, out, "--no-compare", *arguments)
    whole = ["--micro-batch-size", ours["batch_size"]]
    full = train(task, out / "full_batch", "--no-compare", *arguments, *whole)
    return ours, full, compare(read_run(out), read_run(out / "full_batch"))


def verify(task: Path | str, *arguments: Any) -> dict[str, Any]:
    """Runs `bigbatch verify` and returns its result."""
    done = run("verify", task, "--json", *arguments)
    assert done.returncode in (0, 1), done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == (not found["is_exact"])
    return found


def summary_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return found


def history_of(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "history.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def assert_ends_as_asked(task: Path, folder: Path) -> None:
    """The first step is good, all later ones are not: an error after 32 in a row; with "raise" and "stop" at once."""
    out = folder / "run"
    train(task, out, "--no-compare", "--steps", 20)
    assert [step["is_applied"] for step in history_of(out)] == [True] + [False] * 19
    done = run("train", task, "--resume", out, "--steps", 40)
    assert done.returncode == 2, done.stderr
    assert "the last 32 steps were skipped, starting at step 2, where the loss was not finite" in done.stderr
    assert len(history_of(out)) == 32
    done = run("train", task, "--out", folder / "raised", "--on-nonfinite", "raise")
    assert done.returncode == 2, done.stderr
    assert "the loss is not finite in step 2, so it was not taken" in done.stderr
    done = run("train", task, "--out", folder / "stopped", "--on-nonfinite", "stop")
    assert done.returncode == 5, done.stderr
    assert [step["is_applied"] for step in history_of(folder / "stopped")] == [True, False]
