"""--on-nonfinite: the effect of a non-finite gradient on a run."""

from pathlib import Path

import pytest

from .command import TINY, assert_ends_as_asked, history_of, run, summary_of, train, write_task
from .jax_task import TINY as JAX

BAD = """
good = batches
def batches(batch_size, epoch, seed):
    for number, (x, y) in enumerate(good(batch_size, epoch, seed)):
        yield (x / 0 if number == 2 and epoch == 0 else x), y
"""


def test_skip(tmp_path: Path) -> None:
    """The schedule counts applied steps."""
    train(write_task(tmp_path, BAD), tmp_path / "run", "--no-compare", "--steps", 8, "--schedule", "linear")
    history = history_of(tmp_path / "run")
    assert [step["is_applied"] for step in history] == [True, True, False, *[True] * 5]
    assert [step["lr"] for step in history] == pytest.approx([0.05 * (1 - k / 8) for k in (0, 1, 2, 2, 3, 4, 5, 6)])


def test_stop_saves_and_has_its_own_exit_code(tmp_path: Path) -> None:
    task, out = write_task(tmp_path, BAD), tmp_path / "run"
    done = run("train", task, "--out", out, "--epochs", 2, "--on-nonfinite", "stop")
    assert done.returncode == 5, done.stderr
    assert summary_of(out)["status"] == "stopped"
    assert summary_of(out)["full_batch"] is None
    assert [step["is_applied"] for step in history_of(out)] == [True, True, False]
    assert "stopped" in (out / "report.html").read_text()
    done = run("train", task, "--resume", out, "--on-nonfinite", "skip", "--no-compare")
    assert done.returncode == 0, done.stderr
    assert summary_of(out)["status"] == "finished"
    train(task, tmp_path / "skipped", "--no-compare", "--epochs", 2)
    assert history_of(out) == history_of(tmp_path / "skipped")


def test_raise_prints_one_sentence(tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = run("train", write_task(tmp_path, BAD), "--out", out, "--on-nonfinite", "raise", "--checkpoint-every", 1)
    assert done.returncode == 2, done.stderr
    assert "0.weight" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(history_of(out)) == 2
    assert list((out / "checkpoints").glob("0*"))


KERAS = """
import keras
import numpy as np

def model():
    return keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(3)])

def batches(batch_size):
    x = np.random.default_rng(0).normal(size=(40, 16, 6)).astype("float32")
    return [(each, each[:, :3].argmax(1)) for each in x]

loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

defaults = {"batch_size": 16, "micro_batch_size": 3, "epochs": 1, "lr": 0.05}
"""
TENSORFLOW = f"""
import tensorflow
{KERAS}
mean = loss
def loss(model, batch):
    return mean(batch[1], model(batch[0]))
"""
GOOD_AT_FIRST = """
all_good = batches
def batches(batch_size):
    return [(x * (1 if number == 0 else np.nan), y) for number, (x, y) in enumerate(all_good(batch_size))]
"""
ALL_BAD = """
all_good = batches
def batches(batch_size):
    return [(x * float("nan"), y) for x, y in all_good(batch_size{})]
"""


def test_keras(tmp_path: Path) -> None:
    task = tmp_path / "task.py"
    task.write_text(KERAS + GOOD_AT_FIRST)
    assert_ends_as_asked(task, tmp_path)


def test_keras_leaves_the_weights_alone(tmp_path: Path) -> None:
    task = tmp_path / "task.py"
    task.write_text(KERAS + GOOD_AT_FIRST)
    for steps in (1, 9):
        train(task, tmp_path / f"{steps}", "--no-compare", "--steps", steps)
    one, nine = ((tmp_path / f"{steps}" / "model.safetensors").read_bytes() for steps in (1, 9))
    assert one == nine


@pytest.mark.parametrize("framework", ["torch", "tensorflow", "keras", "jax"])
def test_a_run_without_an_applied_step_is_an_error(framework: str, tmp_path: Path) -> None:
    task, out = tmp_path / "task.py", tmp_path / "run"
    start = {"torch": TINY.format(dropout=0.0), "tensorflow": TENSORFLOW, "keras": KERAS, "jax": JAX}[framework]
    task.write_text(start + ALL_BAD.format(", 0, 0" if framework in ("torch", "jax") else ""))
    done = run("train", task, "--out", out, "--steps", 3)
    assert done.returncode == 2, done.stderr
    assert "none of the 3 steps was applied, since the gradient was not finite" in done.stderr
    assert [step["is_applied"] for step in history_of(out)] == [False] * 3
    assert not (out / "full_batch").exists()
