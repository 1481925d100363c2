"""A task whose loss returns aux: `has_aux = True`."""

import re
from pathlib import Path
from typing import Any

import pytest

from .command import history_of, run, train, train_both, verify, write_task
from .jax_task import EVEN, write
from .page import Page
from .runs import write_run

LOSS = """
has_aux = True
aux = {{"share": "mean", "counts": {{"correct": "sum", "samples": "auto"}}, "logits": "concatenate"}}

plain = loss
def loss(model, batch):
    logits = {logits}
    is_correct = logits.argmax(1) == batch[1]
    counts = {{"correct": {correct}, "samples": len(batch[1])}}
    return plain(model, batch), {{"share": {share}, "counts": counts, "logits": logits}}
"""
TORCH = LOSS.format(logits="model(batch[0])", correct="is_correct.sum()", share="is_correct.float().mean()")
JAX = LOSS.format(logits="logits_of(model, batch[0])", correct="is_correct.sum()", share="is_correct.mean()")
JAX = "\nlogits_of = logits\n" + JAX


TENSORFLOW = """
import keras
import numpy as np
import tensorflow as tf

def model():
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(12, "tanh"), keras.layers.Dense(3)])

def batches(batch_size, epoch, seed):
    x = np.random.default_rng((seed, epoch)).normal(size=(53, 6)).astype(np.float32)
    return [(x[k : k + batch_size], x[k : k + batch_size, :3].argmax(1)) for k in range(0, 53, batch_size)]

def loss(model, batch):
    losses = keras.losses.sparse_categorical_crossentropy(batch[1], model(batch[0]), from_logits=True)
    return tf.reduce_mean(losses)

defaults = {"batch_size": 16, "micro_batch_size": 3, "epochs": 2, "lr": 0.05}
"""
TENSORFLOW += (
    LOSS.format(
        logits="model(batch[0])",
        correct="tf.reduce_sum(tf.cast(is_correct, tf.int32))",
        share="tf.reduce_mean(tf.cast(is_correct, tf.float32))",
    )
    .replace("logits.argmax(1) == batch[1]", "tf.equal(tf.argmax(logits, 1), batch[1])")
    .replace("len(batch[1])", "tf.shape(batch[1])[0]")
)


def tasks() -> list[Any]:
    return [
        pytest.param(lambda folder: write_task(folder, TORCH), id="torch"),
        pytest.param(lambda folder: write(folder, JAX, start=EVEN), id="jax"),
        pytest.param(lambda folder: write(folder, TENSORFLOW, start=""), id="tensorflow"),
    ]


def metrics_of(folder: Path) -> list[dict[str, float]]:
    return [step["metrics"] for step in history_of(folder)]


@pytest.mark.parametrize("make", tasks())
def test_metrics_are_those_of_the_full_batch_everywhere(tmp_path: Path, make: Any) -> None:
    task, out = make(tmp_path), tmp_path / "run"
    ours, full, comparison = train_both(task, out, "--epochs", 2)
    assert comparison.max_weight_difference < 1e-4
    for found, theirs in zip(metrics_of(out), metrics_of(out / "full_batch"), strict=True):
        assert found == pytest.approx(theirs, abs=1e-6)
        assert found["counts.correct"] == pytest.approx(found["share"] * found["counts.samples"], abs=1e-4)
        assert set(found) == {"share", "counts.correct", "counts.samples"}
    assert {step["counts.samples"] for step in metrics_of(out)} <= {16, 5}
    assert all(step["summed"] == ["counts.correct", "counts.samples"] for step in history_of(out))
    assert ours["metrics"] == pytest.approx(full["metrics"], abs=1e-6)
    last = metrics_of(out)[len(metrics_of(out)) // 2 :]
    assert ours["metrics"]["counts.correct"] == sum(step["counts.correct"] for step in last)
    page = Page((out / "report.html").read_text(encoding="utf-8"))
    assert {"metric-0", "metric-1", "metric-2"} <= set(page.plots)
    assert "share of the last epoch" in page.text
    assert verify(task)["is_exact"]


@pytest.mark.parametrize(
    "make", [tasks()[0], *(pytest.param(task.values[0], id=task.id, marks=pytest.mark.slow) for task in tasks()[1:])]
)
def test_a_resumed_run_keeps_them(tmp_path: Path, make: Any) -> None:
    task = make(tmp_path)
    train(task, tmp_path / "run", "--no-compare", "--steps", 3)
    done = run("train", task, "--resume", tmp_path / "run", "--steps", 6)
    assert done.returncode == 0, done.stderr
    assert re.search(r"step 6/6 +loss [\d.]+ +counts\.correct \d+ .*share 0|share 0.*counts.correct", done.stderr)
    train(task, tmp_path / "whole", "--no-compare", "--steps", 6)
    assert metrics_of(tmp_path / "run") == metrics_of(tmp_path / "whole")


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("\nhas_aux = 1\n", "has_aux of tiny is 1: make it True if the loss returns (loss, aux)"),
        ("\nhas_aux = True\n", "with has_aux=True the loss must return"),
        (
            "\nplain = loss\ndef loss(model, batch):\n    return plain(model, batch), {}\n",
            "pass has_aux=True, then aux arrives in step.aux (in a task, write has_aux = True in the file)",
        ),
    ],
)
def test_a_task_that_cannot_have_aux_says_why(tmp_path: Path, code: str, told: str) -> None:
    done = run("train", write_task(tmp_path, code), "--out", tmp_path / "run")
    assert done.returncode == 2, done.stderr
    assert told in " ".join(done.stderr.split())


def test_a_keras_task_has_none(tmp_path: Path) -> None:
    path = tmp_path / "tiny.py"
    path.write_text(
        "import keras\nhas_aux = True\nloss = 'mse'\ndef model(): pass\ndef batches(): pass\n", encoding="utf-8"
    )
    done = run("train", path, "--out", tmp_path / "run")
    assert done.returncode == 2, done.stderr
    assert "tiny has has_aux, but a Keras loss returns one number" in " ".join(done.stderr.split())


def test_the_report_draws_a_plot_for_each_metric(tmp_path: Path) -> None:
    hostile = "<b>$x$ & y"

    def add(record: dict[str, Any]) -> None:
        record["metrics"] = {"accuracy": record["step"] / 50, hostile: 1.0}
        if record["step"] < 20:
            record["metrics"]["late"] = "nan"

    folder = write_run(
        tmp_path / "run",
        has_full_batch=False,
        change_record=add,
        change=lambda summary: summary.update(metrics={"accuracy": 0.9, hostile: 1.0}),
    )
    done = run("report", folder, "--out", tmp_path / "report.html")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.plots[:5] == ["loss", "loss-time", "metric-0", "metric-1", "grad-norm"]
    assert "accuracy over steps" in page.text
    assert "The late is not finite in any step." in page.text
    assert page.values["run", "metrics.accuracy"] == "0.9"
    assert "<b>" not in text
