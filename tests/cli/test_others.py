"""`bigbatch verify`, `doctor`, `--version`, and the built-in tasks of every framework."""

import re
import subprocess
import sys
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file

import bigbatch
from bigbatch.cli import doctor

from .command import BIGBATCH, history_of, run, run_fresh, train, train_both, verify, write_task


def test_version() -> None:
    assert run_fresh("--version").stdout == f"bigbatch {bigbatch.__version__}\n"
    command = [sys.executable, "-m", "bigbatch", "--version"]
    assert subprocess.run(command, capture_output=True, text=True).stdout == f"bigbatch {bigbatch.__version__}\n"


def test_doctor_lists_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks only the framework that loads fastest, and one that does not load."""
    devices = {"jax": doctor._FRAMEWORKS["jax"], "torch": "import no_such_module", "bigbatch-no-such": ""}
    monkeypatch.setattr(doctor, "_FRAMEWORKS", devices)
    text = StringIO()
    doctor.examine(Console(file=text, width=200))
    told = text.getvalue()
    assert bigbatch.__version__ in told
    assert re.search(r"jax .*cpu", told, re.IGNORECASE)
    assert "does not load: ModuleNotFoundError: No module named 'no_such_module'" in told
    assert 'not installed: pip install "bigbatch[bigbatch-no-such]"' in told
    assert "train --tensorboard" in told


@pytest.mark.slow
def test_doctor_loads_every_framework() -> None:
    done = run("doctor")
    assert done.returncode == 0, done.stderr
    for text in ("torch", "tensorflow", "keras", "jax", "cpu", bigbatch.__version__):
        assert text in done.stdout


def test_without_the_extra_there_is_one_sentence(tmp_path: Path) -> None:
    code = "import sys; sys.modules['typer'] = None; from bigbatch.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.strip() == 'bigbatch: the command line needs typer: pip install "bigbatch[cli]"'


def test_verify_says_exact(tmp_path: Path) -> None:
    done = run("verify", write_task(tmp_path), "--micro-batch-size", 5)
    assert done.returncode == 0, done.stderr
    assert "exact: largest error of a parameter" in done.stdout
    assert "NOT" not in done.stdout
    assert "0.weight" in done.stdout


def test_verify_says_why_not(tmp_path: Path) -> None:
    task = write_task(tmp_path, "\ndef weight(micro_batch):\n    return 1\n")
    done = run("verify", task, "--micro-batch-size", 5)
    assert done.returncode == 1, done.stderr
    assert "NOT exact" in done.stdout
    assert "\n- " in done.stdout
    found = verify(task, "--micro-batch-size", 5)
    assert not found["is_exact"]
    assert found["max_error"] == max(found["errors"].values()) > 1e-3


@pytest.mark.parametrize(
    ("framework", "name"),
    [
        ("tensorflow", "digits"),
        pytest.param("torch", "text", marks=pytest.mark.slow),
        pytest.param("keras", "text", marks=pytest.mark.slow),
        pytest.param("jax", "text", marks=pytest.mark.slow),
    ],
)
def test_built_in_tasks(framework: str, name: str, tmp_path: Path) -> None:
    """Accumulated and full batch give equal weights after a few steps."""
    summary, _, comparison = train_both(name, tmp_path / name, "--framework", framework, "--steps", 3)
    assert summary["framework"] == framework
    assert comparison.max_weight_difference < 1e-3  # Adam magnifies rounding if gradients vanish
    assert comparison.max_loss_difference < 1e-5
    assert verify(name, "--framework", framework)["is_exact"]
    assert [step["is_applied"] for step in history_of(tmp_path / name)] == [True] * 3


@pytest.mark.parametrize("framework", ["tensorflow", "keras", pytest.param("jax", marks=pytest.mark.slow)])
def test_resuming_gives_the_history_of_an_undisturbed_run(framework: str, tmp_path: Path) -> None:
    """An epoch of digits has six batches; the run stops in the first and resumes into the second.

    For torch see test_train.py, for JAX test_jax.py.
    """
    options = ["--framework", framework, "--no-compare"]
    train("digits", tmp_path / "whole", *options, "--steps", 8)
    train("digits", tmp_path / "parts", *options, "--steps", 4)
    done = run("train", "digits", "--framework", framework, "--resume", tmp_path / "parts", "--steps", 8)
    assert done.returncode == 0, done.stderr
    assert len(history_of(tmp_path / "whole")) == 8
    assert history_of(tmp_path / "parts") == history_of(tmp_path / "whole")


@pytest.mark.parametrize("framework", ["torch", "tensorflow", "keras", pytest.param("jax", marks=pytest.mark.slow)])
def test_batch_norm_is_named(framework: str) -> None:
    found = verify("digits-batchnorm", "--framework", framework)
    assert not found["is_exact"]
    assert found["max_error"] > 1e-3
    assert any("ormali" in cause for cause in found["causes"])


def test_frozen_batch_norm_is_exact() -> None:
    """The option that the message about BatchNorm advises. The engine of Keras reads it, to the others it is passed."""
    assert verify("digits-batchnorm", "--framework", "keras", "--batch-norm", "frozen")["is_exact"]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_tasks_in_the_documentation(number: int, tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text(encoding="utf-8")
    tasks = re.findall("```python\n(.*?)```", text, re.DOTALL)
    assert len(tasks) == 3
    (tmp_path / "task.py").write_text(tasks[number], encoding="utf-8")
    done = run("verify", tmp_path / "task.py")
    assert done.returncode == 0, done.stderr


def test_the_command_is_installed() -> None:
    assert BIGBATCH.exists()


COMPILED = """
import keras
import numpy as np

def model():
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3)])
    model.compile(keras.optimizers.SGD(1.0{clips}), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model

def batches(batch_size):
    x = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
    yield x, x[:, :3].argmax(1)

loss = None
defaults = {{"batch_size": 16, "micro_batch_size": 3, "lr": 1.0, "epochs": 1}}
"""


def test_a_keras_model_that_the_task_compiled_is_clipped(tmp_path: Path) -> None:
    task = tmp_path / "task.py"
    task.write_text(COMPILED.format(clips=""))
    for norm in (1e-30, 1e-2):
        train(task, tmp_path / f"run{norm}", "--no-compare", "--clip-norm", norm)
    start, clipped = (load_file(tmp_path / f"run{norm}" / "model.safetensors") for norm in (1e-30, 1e-2))
    moved = np.sqrt(sum(((clipped[name] - start[name]) ** 2).sum() for name in start))
    assert moved == pytest.approx(1e-2, rel=1e-3)
    task.write_text(COMPILED.format(clips=", clipvalue=0.5"))
    done = run("train", task, "--out", tmp_path / "run", "--clip-norm", 1)
    assert done.returncode == 2, done.stderr
    assert "the optimizer of task has clipvalue=0.5, and Keras clips in one way only" in done.stderr
