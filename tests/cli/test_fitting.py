"""A checkpoint that does not fit the task is refused with one sentence, and the task does not change."""

import copy
import json
import subprocess
import time
from itertools import pairwise

import pytest
import torch
from torch import nn

from bigbatch import Interrupted, StateError
from bigbatch.cli.config import Config
from bigbatch.cli.engines.torch import TorchEngine
from bigbatch.cli.run.folder import RunFolder
from bigbatch.cli.run.ranks import Launch
from bigbatch.cli.task import Task
from bigbatch.core.checkpoint.serialize import from_bytes, to_bytes
from bigbatch.core.checkpoint.store import Store
from bigbatch.torch.arrays import from_array, to_array

from .command import BIGBATCH, environment, run, train, write_task


def engine(layers=(6, 4, 3), dtype=torch.float32, optimizer=torch.optim.Adam, seed=0):
    def model():
        return nn.Sequential(*(nn.Linear(a, b, dtype=dtype) for a, b in pairwise(layers)))

    def loss(model, batch):
        return model(batch).square().mean()

    task = Task("task", "task", "torch", model, list, loss, lambda model, lr: optimizer(model.parameters(), lr))
    return TorchEngine(task, Config("task", batch_size=6, micro_batch_size=4, seed=seed), Launch())


def saved(found):
    return from_bytes(to_bytes(found.state(), to_array), from_array)


def test_saved_state_resumes_bit_for_bit():
    one, other, batch = engine(), engine(seed=1), torch.randn(6, 6)
    one.step(batch)
    other.load(saved(one))
    for each in (one, other):
        each.step(batch * 2)
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True))


OTHERS = {
    "another size": (
        {"layers": (6, 5, 3)},
        r"0.weight is .*32\[4, 6\] in the checkpoint but .*32\[5, 6\] in",
    ),
    "another type": (
        {"dtype": torch.float64},
        r"0.weight is .*32\[4, 6\] in the checkpoint but .*64\[4, 6\]",
    ),
    "one layer more": ({"layers": (6, 4, 3, 3)}, "only the model has 2.bias"),
    "one layer less": ({"layers": (6, 4)}, "only the checkpoint has 1.bias"),
    "another optimizer": (
        {"optimizer": torch.optim.SGD},
        "the optimizer of the checkpoint is Adam, that of this run is SGD",
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_checkpoint_that_does_not_fit_changes_nothing(kind):
    options, text = OTHERS[kind]
    one, other = engine(), engine(**options)
    one.step(torch.randn(6, 6))
    before = copy.deepcopy(other.state())
    with pytest.raises(StateError, match=text):
        other.load(saved(one))
    assert to_bytes(other.state(), to_array) == to_bytes(before, to_array)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64])
def test_all_kinds_of_tensors_are_restored(dtype):
    tensor = (torch.randn(3, 5) * 9).to(dtype)
    for given in (tensor, tensor.T, tensor[0, 0]):
        array = to_array(given)
        back = from_array(array)
        assert (back.dtype, back.shape) == (given.dtype, given.shape)
        assert torch.equal(back.double(), given.double())
    assert to_array("no tensor") is None


class Odd(nn.Module):
    """A model with unusual state: a sparse gradient and buffer, a plain value, rare dtypes."""

    def __init__(self):
        super().__init__()
        self.table, self.out, self.num_calls = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2), 0
        self.register_buffer("neighbours", torch.eye(4).to_sparse())
        self.register_buffer("small", torch.ones(3).to(torch.float8_e4m3fn))
        self.register_buffer("narrow", torch.ones(3).bfloat16())
        self.register_buffer("waves", torch.randn(2, 3, dtype=torch.complex128))

    def forward(self, x):
        self.num_calls += 1
        return self.out(self.table(x).mean(1) @ self.neighbours)

    def get_extra_state(self):
        return {"calls": self.num_calls}

    def set_extra_state(self, state):
        self.num_calls = state["calls"]


def odd_engine(stop_after=None):
    def loss(model, batch):
        if model.num_calls == stop_after:
            found.interrupt()
        return model(batch).square().mean()

    task = Task("task", "task", "torch", Odd, list, loss, lambda model, lr: torch.optim.SGD(model.parameters(), lr))
    found = TorchEngine(task, Config("task", batch_size=6, micro_batch_size=2), Launch())
    return found


def test_interrupted_window_of_an_unusual_model(tmp_path):
    """A signal saves this state; if it could not be written, everything since the last checkpoint would be lost."""
    batch = torch.randint(9, (6, 5), generator=torch.Generator().manual_seed(0))
    whole, stopped, taken_up = odd_engine(), odd_engine(stop_after=1), odd_engine()
    whole.step(batch)
    with pytest.raises(Interrupted):
        stopped.step(batch)
    taken_up.load(saved(stopped))
    assert taken_up.model.num_calls == 2
    taken_up.step(batch)
    RunFolder(tmp_path).write_weights(whole.weights())
    weights, others = RunFolder(tmp_path).weights(), taken_up.weights()
    assert weights.keys() == others.keys() == whole.model.state_dict().keys() - {"_extra_state"}
    assert all((weights[name] == others[name]).all() for name in weights)


KERAS = """
import keras
import numpy as np
import {framework}

def model():
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense({size}), keras.layers.Dense(1)])

def batches(batch_size):
    return [(np.ones((8, 6), np.float32), np.ones((8, 1), np.float32))] * 3

loss = {loss}
defaults = {{"batch_size": 8, "micro_batch_size": 3, "compare": False, "steps": 2}}
"""
LOSSES = {
    "tensorflow": "lambda model, batch: tensorflow.reduce_mean((model(batch[0]) - batch[1]) ** 2)",
    "keras": "'mse'",
}


NAMED = """
def model():
    return keras.Sequential([keras.Input((6,)), *(keras.layers.Dense(6, name=name) for name in "{names}")])
"""
OTHERS_IN_KERAS = {
    "another shape": (
        "",
        KERAS,
        "dense/kernel is float32[6, 4] in the saved state but float32[6, 5] in the task",
    ),
    "another optimizer, whose variables have the same shapes": (
        "",
        KERAS + "\ndef optimizer(model, lr):\n    return keras.optimizers.AdamW(lr)\n",
        "the optimizer of the checkpoint is Adam, that of this run is AdamW",
    ),
    "another order": (
        NAMED.format(names="ab"),
        KERAS + NAMED.format(names="ba"),
        "the model has sequential/b/kernel where it had sequential/a/kernel when the checkpoint was saved",
    ),
}


@pytest.mark.parametrize("kind", OTHERS_IN_KERAS)
@pytest.mark.parametrize("framework", LOSSES)
@pytest.mark.each_value
def test_another_state_in_keras(framework, kind, tmp_path):
    code, other, told = OTHERS_IN_KERAS[kind]
    task = tmp_path / "task.py"
    task.write_text(KERAS.format(framework=framework, size=4, loss=LOSSES[framework]) + code)
    train(task, tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    task.write_text(other.format(framework=framework, size=5, loss=LOSSES[framework]))
    done = run("train", task, "--resume", tmp_path / "run", "--steps", 4)
    assert done.returncode == 2, done.stderr
    assert told in done.stderr
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


NOISE = """
class Noise(keras.layers.Layer):
    def call(self, x):
        return x + 0.1 * keras.random.normal((1, 6))

def model():
    return keras.Sequential([keras.Input((6,)), Noise(), keras.layers.Dense(1)])
"""


def test_random_numbers_of_keras_without_a_seed(tmp_path):
    task = tmp_path / "task.py"
    task.write_text(KERAS.format(framework="keras", size=4, loss="'mse'") + NOISE)
    train(task, tmp_path / "whole", "--steps", 4)
    train(task, tmp_path / "parts", "--steps", 2)
    done = run("train", task, "--resume", tmp_path / "parts", "--steps", 4)
    assert done.returncode == 0, done.stderr
    whole, parts = ((tmp_path / name / "history.jsonl").read_text() for name in ("whole", "parts"))
    assert whole == parts
    losses = [json.loads(line)["loss"] for line in whole.splitlines()]
    assert len(set(losses)) == 4


SKIPPED = """
import numpy as np

def batches(batch_size):
    return [(np.full((8, 6), np.nan, np.float32), np.ones((8, 1), np.float32))] * 10
"""


def test_steps_skipped_before_a_resume_count_in_tensorflow(tmp_path):
    """32 in a row are too many, in one run or in two together."""
    task = tmp_path / "task.py"
    task.write_text(KERAS.format(framework="tensorflow", size=4, loss=LOSSES["tensorflow"]) + SKIPPED)
    out = tmp_path / "run"
    done = run("train", task, "--out", out, "--steps", 20)
    assert done.returncode == 2, done.stderr
    assert "none of the 20 steps was applied" in " ".join(done.stderr.split())
    done = run("train", task, "--resume", out, "--steps", 40)
    assert done.returncode == 2, done.stderr
    assert "32 steps were skipped" in " ".join(done.stderr.split())
    assert "at step 1, where" in " ".join(done.stderr.split())
    assert len((out / "history.jsonl").read_text().splitlines()) == 31


def test_checkpoint_with_other_contents(tmp_path):
    task = write_task(tmp_path)
    train(task, tmp_path / "run", "--no-compare", "--steps", 1)
    history = (tmp_path / "run" / "history.jsonl").read_bytes()
    store = Store(tmp_path / "run" / "checkpoints")
    for state in ({"trained": {}}, {"engine": {}}, {"trained": {"engine": {"model": [1]}}}, [1, 2]):
        store.save(1, state, wait=True)
        store.close()
        done = run("train", task, "--resume", tmp_path / "run", "--steps", 2)
        assert done.returncode == 2, done.stderr
        assert "is not a checkpoint of this kind of run" in done.stderr.replace("\n", " ")
    assert (tmp_path / "run" / "history.jsonl").read_bytes() == history


def test_other_batches_are_refused_and_other_rates_are_not(tmp_path):
    """The position in the data counts batches of the old size and order."""
    task, out = write_task(tmp_path), tmp_path / "run"
    train(task, out, "--no-compare", "--steps", 1)
    for option, text in {"--batch-size": "--batch-size 16, and with 9", "--seed": "--seed 0, and with 9"}.items():
        done = run("train", task, "--resume", out, "--steps", 2, option, 9)
        assert done.returncode == 2, done.stderr
        assert text in done.stderr
    given = ["--batch-size", 16, "--seed", 0, "--lr", 0.1, "--micro-batch-size", 5]
    done = run("train", task, "--resume", out, "--steps", 2, *given)
    assert done.returncode == 0, done.stderr


EVALUATE = """
import pathlib
import time

def evaluate(model):
    folder = pathlib.Path(__file__).parent
    (folder / "evaluates").touch()
    while not (folder / "go on").exists():
        time.sleep(0.01)
    return {}
"""


def test_run_that_is_still_evaluating_is_not_resumed(tmp_path):
    """Both processes would write its summary."""
    task, out = write_task(tmp_path, EVALUATE), tmp_path / "run"
    command = [str(BIGBATCH), "train", str(task), "--out", str(out), "--no-compare", "--steps", "1", "--quiet"]
    first = subprocess.Popen(command, env=environment())
    try:
        while not (tmp_path / "evaluates").exists():
            assert first.poll() is None
            time.sleep(0.01)
        done = run("train", task, "--resume", out, "--steps", 2)
        assert done.returncode == 2, done.stderr
        assert "is in use by another process" in done.stderr
    finally:
        (tmp_path / "go on").touch()
        assert first.wait(60) == 0
