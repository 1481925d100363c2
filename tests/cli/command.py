"""The installed command, run as a process, on tasks that are written for a test."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

BIGBATCH = Path(sys.executable).parent / "bigbatch"
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


def run(*arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs `bigbatch …` to its end."""
    command = [str(BIGBATCH), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment(), **options)


def environment() -> dict[str, str]:
    return {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "COLUMNS": "120", "OMP_NUM_THREADS": "1"}


def write_task(folder: Path, code: str = "", name: str = "tiny", dropout: float = 0.0) -> Path:
    path = folder / f"{name}.py"
    path.write_text(TINY.format(dropout=dropout) + code, encoding="utf-8")
    return path


def train(task: Path | str, out: Path, *arguments: Any) -> dict[str, Any]:
    """A run that must go well; returns its summary."""
    done = run("train", task, "--out", out, *arguments)
    assert done.returncode == 0, done.stderr
    return summary_of(out)


def summary_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return found


def history_of(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "history.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]
