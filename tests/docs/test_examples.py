"""Runs every example and checks the figures that it prints."""

import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("example", sorted(FOLDER.glob("*.py")), ids=lambda path: path.name)
def test_examples_are_short(example: Path) -> None:
    assert len(example.read_text(encoding="utf-8").splitlines()) < 100


def test_digits() -> None:
    """Both histories agree to the last digit shown and the weights up to rounding, and the model learns."""
    command = [sys.executable, "-W", "error", str(FOLDER / "digits.py")]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    rows = re.findall(r"^ +\d+ +([\d.]+) +([\d.]+)$", output, re.MULTILINE)
    assert len(rows) == 15
    assert all(full == ours for full, ours in rows)
    assert float(re.search(r"weights are (\S+) apart", output)[1]) < 1e-12
    assert float(re.search(r"held-out digits: ([\d.]+)%", output)[1]) > 95
    assert "\nexact: " in output


def run(name: str, *options: str) -> str:
    command = [sys.executable, *options, str(FOLDER / name)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout


def test_torch_capture() -> None:
    output = run("torch_capture.py", "-W", "error")
    assert "8 micro-batches a step, the last of 52 rows" in output
    first, last = re.search(r"loss of a byte: (\S+) at first, (\S+) after", output).groups()
    assert float(last) < 2.6 < 5 < float(first)


def test_tensorflow_digits() -> None:
    """A loop with its own tape gives the weights of the full batch, in float32."""
    output = run("tensorflow_digits.py")
    assert float(re.search(r"weights are (\S+) apart", output)[1]) < 1e-3
    assert float(re.search(r"held-out digits: ([\d.]+)%", output)[1]) > 95
    assert "11 micro-batches" in output  # 1500 = 3 x 384 + 348: a short window with a short micro-batch


@pytest.mark.slow
def test_tensorflow_mirrored() -> None:
    output = run("tensorflow_mirrored.py")
    assert float(re.search(r"held-out digits: ([\d.]+)%", output)[1]) > 95
    assert "348 samples" in output
    assert "traces: 1" in output


def new_lines(name: str) -> list[str]:
    """The lines of NAME_after.py that are not in NAME_before.py, wherever they stand and however they are indented."""
    before, after = (
        Counter(line.strip() for line in (FOLDER / f"{name}_{which}.py").read_text().split('"""', 2)[2].splitlines())
        for which in ("before", "after")
    )
    return [line for line in (after - before).elements() if line]


def weights_of(name: str, folder: Path, *changes: tuple[str, str]) -> tuple[list[np.ndarray], list[str]]:
    """The weights that an example ends with, if these changes are made to it, and the lines that it prints."""
    text = (FOLDER / name).read_text(encoding="utf-8")
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = folder / "weights.npz"
    text += f"\nimport numpy\nnumpy.savez({str(path)!r}, *[p.detach().numpy() for p in model.parameters()])\n"
    (folder / name).write_text(text, encoding="utf-8")
    output = run(str(folder / name), "-W", "error")
    with np.load(path) as found:
        return list(found.values()), output.splitlines()


def apart(ours: list[np.ndarray], full: list[np.ndarray]) -> float:
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(ours, full, strict=True))


def test_a_loop_with_two_optimizers_changes_in_six_lines(tmp_path: Path) -> None:
    """Muon, AdamW, two schedules and an accuracy, in float64. One optimizer alone gives other weights."""
    assert len(new_lines("torch")) <= 6
    full, full_lines = weights_of("torch_before.py", tmp_path)
    ours, our_lines = weights_of("torch_after.py", tmp_path)
    assert apart(ours, full) < 1e-12
    assert our_lines == full_lines
    assert float(re.search(r"accuracy ([\d.]+)%", full_lines[-1])[1]) > 95
    one = ("(model, optimizers, loss", "(model, [muon], loss"), ("scheduler=schedulers", "scheduler=schedulers[:1]")
    wrong, _ = weights_of("torch_after.py", tmp_path, *one)
    assert apart(wrong, full) > 1e-3


def test_a_loop_with_a_language_model_changes_in_four_lines(tmp_path: Path) -> None:
    """Padded batches; Hugging Face computes the loss in float32. tests/torch/test_weights.py has the control."""
    assert len(new_lines("transformers")) <= 4
    full, full_lines = weights_of("transformers_before.py", tmp_path)
    ours, our_lines = weights_of("transformers_after.py", tmp_path)
    assert apart(ours, full) < 1e-5
    numbers = [[float(line.split()[1]) for line in lines] for lines in (our_lines, full_lines)]
    assert numbers[0] == pytest.approx(numbers[1], abs=2e-4)
    assert numbers[0][-1] < numbers[0][0] - 0.5


JAX = ["jax_optax.py", "jax_nnx.py", "jax_linen.py", "jax_equinox.py"]
slow = pytest.mark.slow


@pytest.mark.parametrize("name", ["jax_optax.py", "jax_linen.py", *(pytest.param(JAX[k], marks=slow) for k in (1, 3))])
def test_jax(name: str) -> None:
    output = run(name, "-W", "error")
    assert float(re.search(r"held-out digits: ([\d.]+)%", output)[1]) > 95
    if name == "jax_linen.py":
        assert "60 steps, loss of the last 348 samples" in output  # 1500 = 3 x 384 + 348: a short window
    else:
        assert float(re.search(r"^exact: largest error of a parameter (\S+),", output, re.MULTILINE)[1]) < 1e-12


# These changes make an example train on the full batch: plain JAX, or one micro-batch per window.
FULL = {
    "jax_optax.py": [("= value_and_grad(loss, micro_batch_size=32)", "= jax.value_and_grad(loss)")],
    "jax_nnx.py": [
        ('= value_and_grad(loss, micro_batch_size=32, rng="per_sample")', "= jax.value_and_grad(loss)"),
        ("(params, batch, key)\n", "(params, batch, jax.random.split(key, len(batch[0])))\n"),
    ],
    "jax_linen.py": [
        ("accumulation_steps=12", "accumulation_steps=1"),
        ("range(0, len(x), 32)", "range(0, len(x), 384)"),
        ("start + 32", "start + 384"),
    ],
    "jax_equinox.py": [("= value_and_grad(loss, micro_batch_size=32)", "= jax.value_and_grad(loss)")],
}
# These changes turn its gradient into the mean of the micro-batches' means.
MEAN_OF_MEANS = {
    **{name: [("= value_and_grad(loss, ", "= value_and_grad(loss, weight=lambda *batch: 1, ")] for name in JAX},
    "jax_linen.py": [("weight=len(y)", "weight=1")],
}
# Flax needs these changes besides JAX_ENABLE_X64 for weights in float64.
WIDE = {
    "jax_nnx.py": [("rngs=rngs)", "rngs=rngs, param_dtype=float)")],
    "jax_linen.py": [(f"Dense({size})", f"Dense({size}, param_dtype=float)") for size in (64, 10)],
}


def train(name: str, changes: list[tuple[str, str]], folder: Path) -> tuple[list[np.ndarray], list[str]]:
    """Runs an example with these changes; returns its final weights and the lines about its epochs."""
    text = (FOLDER / name).read_text(encoding="utf-8")
    for old, new in [*WIDE.get(name, []), *changes]:
        assert old in text
        text = text.replace(old, new)
    script, weights = folder / name, folder / "weights.npz"
    text += f"\nimport numpy\nnumpy.savez({str(weights)!r}, *jax.tree.leaves(params))\n"
    script.write_text(text, encoding="utf-8")
    output = run(str(script), "-W", "error")
    with np.load(weights) as found:
        return list(found.values()), re.findall(r"^epoch .*$", output, re.MULTILINE)


def gap(ours: list[np.ndarray], full: list[np.ndarray]) -> float:
    assert {array.dtype for array in [*ours, *full]} == {np.dtype(np.float64)}
    return max(np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(ours, full, strict=True))


@pytest.mark.parametrize("name", ["jax_optax.py", *(pytest.param(name, marks=slow) for name in JAX[1:])])
def test_jax_examples_match_the_full_batch(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The losses agree to the last digit shown and the weights up to rounding; a mean of means fails both checks."""
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    full, full_epochs = train(name, FULL[name], tmp_path)
    ours, our_epochs = train(name, [], tmp_path)
    naive, naive_epochs = train(name, MEAN_OF_MEANS[name], tmp_path)
    assert len(full_epochs) >= 15
    assert our_epochs == full_epochs
    assert gap(ours, full) < 1e-12
    assert naive_epochs != full_epochs
    assert gap(naive, full) > 1e-3


def processes_of(session: int) -> list[str]:
    listed = subprocess.run(["ps", "-A", "-o", "sid=,pid=,args="], check=True, capture_output=True, text=True).stdout
    return [line for line in listed.splitlines() if line.split()[0] == str(session)]


@pytest.mark.slow
def test_torch_ray() -> None:
    """Two workers with uneven data end with the weights of one process, and all processes of Ray end."""
    command = [sys.executable, str(FOLDER / "torch_ray.py")]
    # Not tmp_path: Ray puts sockets there, and their paths may have at most 107 characters.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        # If it is given a token, Ray does not write one into the home folder.
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        environment = {**os.environ, **token, "RAY_TMPDIR": folder}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
        ) as process:
            try:
                output, _ = process.communicate(timeout=300)
            finally:
                process.kill()  # if it still runs; Ray's processes end with it
        end = time.monotonic() + 30
        while (left := processes_of(process.pid)) and time.monotonic() < end:
            time.sleep(0.1)
    assert process.returncode == 0
    assert left == []
    assert len(re.findall(r"^epoch +\d+: loss [\d.]+$", output, re.MULTILINE)) == 15
    assert float(re.search(r"weights are (\S+) apart", output)[1]) < 1e-12
    assert float(re.search(r"held-out digits: ([\d.]+)%", output)[1]) > 95
