"""`torchrun -m bigbatch train`: several processes train as one does."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from .command import environment, history_of, run, summary_of, train, write_task

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "bigbatch"]


def run_ranks(*arguments: Any, **variables: str) -> subprocess.CompletedProcess[str]:
    """Two ranks that must end in time, whatever happens to them."""
    command = [*TORCHRUN, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**environment(), **variables})


def assert_same_weights(one: Path, other: Path, tolerance: float = 0.0) -> None:
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        assert np.abs(ours[name] - array).max() <= tolerance * np.abs(array).max(), name


UNEVEN = """
import torch
torch.set_default_dtype(torch.float64)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.unused = torch.nn.Linear(6, 3), torch.nn.Linear(2, 2)
        self.temperature = 2.0

    def forward(self, x):
        return self.inner(x)

def model():
    return Net()

def batches(batch_size):
    x = torch.randn(29, 6, generator=torch.Generator().manual_seed(0))
    return [(part, part.argmax(1) % 3) for part in x[torch.randperm(29)].split(batch_size)]

def loss(model, batch):
    x, y = batch
    return torch.nn.functional.cross_entropy(model(x) * model.temperature, y)

defaults = {"batch_size": 7, "micro_batch_size": 2, "epochs": 2, "lr": 0.05, "compare": False}
"""


def test_ranks_train_as_one_process_does_and_both_go_on_with_what_the_other_left(tmp_path: Path) -> None:
    """Batches of 7 and 1, shuffled by what all ranks draw from, a parameter that nobody uses."""
    task = tmp_path / "uneven.py"
    task.write_text(UNEVEN)
    train(task, tmp_path / "run", "--epochs", 1)
    done = run_ranks("train", task, "--resume", tmp_path / "run", "--epochs", 3)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("everything is in") == 1
    assert done.stderr.count("uneven on torch, 2 ranks") == 1
    assert "Warning" not in done.stderr
    assert summary_of(tmp_path / "run")["num_ranks"] == 2
    alone = run("train", task, "--resume", tmp_path / "run", "--epochs", 4, "--quiet")
    assert (alone.returncode, alone.stderr) == (0, "")
    assert train(task, tmp_path / "one", "--epochs", 4)["num_ranks"] == 1
    assert_same_weights(tmp_path / "run", tmp_path / "one", 1e-12)
    ours, theirs = history_of(tmp_path / "run"), history_of(tmp_path / "one")
    assert [step["num_samples"] for step in ours] == [7, 7, 7, 7, 1] * 4
    for name in ("loss", "weight", "grad_norm", "lr"):
        assert [step[name] for step in ours] == pytest.approx([step[name] for step in theirs], rel=1e-12)


@pytest.mark.slow
def test_the_comparison_with_the_full_batch(tmp_path: Path) -> None:
    command = [*TORCHRUN, "train", "digits", "--steps", "4", "--batch-size", "37", "--micro-batch-size", "8", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=environment())
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    summary = summary_of(folder)
    assert json.loads(done.stdout) == {**summary, "folder": str(folder.relative_to(tmp_path))}
    assert summary["num_micro_batches"] == history_of(folder)[0]["num_micro_batches"] == 6
    assert summary["full_batch"]["status"] == "finished"
    assert summary["comparison"]["max_weight_difference"] < 1e-5
    assert summary["verification"]["is_exact"]
    assert summary_of(folder / "full_batch")["num_ranks"] == 1


SLOW = """
import os, signal, time
from pathlib import Path

num = 0
fast_loss = loss
def loss(model, batch):
    global num
    num += 1
    time.sleep(0.03)
    with Path(__file__).with_name("draws-" + os.environ["RANK"]).open("a") as file:
        print(float(torch.rand(1)), file=file)
    if os.environ["RANK"] == "1" and num == int(os.environ.get("KILL_AT", 0)):
        os.kill(os.getpid(), signal.SIGKILL)
    return fast_loss(model, batch)
"""


@pytest.mark.slow
def test_stopped_and_killed_runs_go_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    task = write_task(tmp_path, SLOW, dropout=0.3)
    options = ["--no-compare", "--epochs", "5"]
    done = run_ranks("train", task, "--out", tmp_path / "undisturbed", *options)
    assert done.returncode == 0, done.stderr
    draws = [(tmp_path / f"draws-{rank}").read_text().splitlines()[1:] for rank in range(2)]  # the first warms up
    assert not set(draws[0]) & set(draws[1])

    out = tmp_path / "run"
    command = [*TORCHRUN, "train", str(task), "--out", str(out), *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment())
    history = out / "history.jsonl"
    deadline = time.monotonic() + 60
    while not (history.exists() and history.read_text().count("\n") >= 3):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)  # torchrun passes it on, as it does with SIGINT
    told = process.communicate(timeout=30)[1]
    assert "bigbatch: " not in told, told
    assert "bigbatch (rank " not in told, told
    summary = summary_of(out)
    num = summary["num_steps"]
    assert summary["status"] == "interrupted"
    assert 3 <= num < 10
    assert len(history_of(out)) == num

    began = time.monotonic()
    done = run_ranks("train", task, "--resume", out, "--quiet", KILL_AT="20")  # the first warms up; 3 a window
    assert done.returncode != 0
    assert "SIGKILL" in done.stderr
    assert "fast_loss" not in done.stderr
    assert time.monotonic() - began < 30
    assert num + 4 <= len(history_of(out)) < 20
    done = run_ranks("train", task, "--resume", out, "--quiet")
    assert done.returncode == 0, done.stderr
    assert summary_of(out)["status"] == "finished"
    assert history_of(out) == history_of(tmp_path / "undisturbed")
    assert_same_weights(out, tmp_path / "undisturbed")


RANK_1 = """
import os
good_loss = loss
def loss(model, batch):
    if os.environ["RANK"] == "1":
        raise ValueError("my own mistake")
    return good_loss(model, batch)
"""
SHARDED = """
import os
def batches(batch_size, epoch, seed):
    return Batches(batch_size, epoch, seed + int(os.environ["RANK"]))
"""
OF_TENSORFLOW = """
def model():
    import tensorflow

def batches(): ...
def loss(model, batch): ...
"""


def test_what_one_rank_says_ends_all(tmp_path: Path) -> None:
    began = time.monotonic()
    done = run_ranks("train", write_task(tmp_path, RANK_1), "--out", tmp_path / "run", "--no-compare")
    assert time.monotonic() - began < 30
    assert done.returncode != 0
    assert done.stderr.count("bigbatch (rank ") == 1
    assert "bigbatch (rank 1): Traceback" in done.stderr
    assert "ValueError: my own mistake" in done.stderr


@pytest.mark.slow
def test_refusals_are_told_once(tmp_path: Path) -> None:
    task = write_task(tmp_path, SHARDED)
    (tmp_path / "of_tensorflow.py").write_text(OF_TENSORFLOW)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "history.jsonl").touch()
    refused = {
        "did not give all 2 ranks the same batches": ["train", task, "--out", tmp_path / "run"],
        "has a run already: pass another --out": ["train", task, "--out", tmp_path / "there"],
        "torchrun started 2 processes but of_tensorflow is a task for tensorflow": [
            "train", tmp_path / "of_tensorflow.py", "--out", tmp_path / "run",
        ],
        "torchrun started 2 processes but bigbatch verify needs one": ["verify", task],
    }  # fmt: skip
    for text, arguments in refused.items():
        done = run_ranks(*arguments)
        assert done.returncode != 0
        assert text in done.stderr
        assert done.stderr.count("bigbatch (rank ") == 1, done.stderr
