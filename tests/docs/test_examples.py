"""Every example runs, and says what it promises."""

import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("example", sorted(FOLDER.glob("*.py")), ids=lambda path: path.name)
def test_examples_are_short(example: Path) -> None:
    assert len(example.read_text(encoding="utf-8").splitlines()) < 100


def test_digits() -> None:
    """Both histories are the same to the last digit shown, the weights to rounding, and it learns."""
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


def test_tensorflow_digits() -> None:
    """The weights of a loop with a tape of its own are those of the full batch, in float32."""
    output = run("tensorflow_digits.py")
    assert float(re.search(r"weights are (\S+) apart", output)[1]) < 1e-3
    assert float(re.search(r"held-out digits: ([\d.]+)%", output)[1]) > 95
    assert "11 micro-batches" in output  # 1500 = 3 x 384 + 348: a short window with a short micro-batch


def test_tensorflow_mirrored() -> None:
    output = run("tensorflow_mirrored.py")
    assert float(re.search(r"held-out digits: ([\d.]+)%", output)[1]) > 95
    assert "348 samples" in output
    assert "traces: 1" in output


@pytest.mark.parametrize("name", ["jax_optax.py", "jax_nnx.py", "jax_linen.py", "jax_equinox.py"])
def test_jax(name: str) -> None:
    """Every epoch's loss is the full batch's to the last digit shown, and the weights to rounding."""
    output = run(name, "-W", "error")
    assert float(re.search(r"weights are (\S+) apart", output)[1]) < 1e-12
    assert float(re.search(r"held-out digits: ([\d.]+)%", output)[1]) > 95
    if name == "jax_optax.py":
        rows = re.findall(r"^ +\d+ +([\d.]+) +([\d.]+)$", output, re.MULTILINE)
        assert len(rows) == 15
        assert all(full == ours for full, ours in rows)
        assert "\nexact: " in output
    elif name == "jax_linen.py":
        assert "60 steps, loss of the last batch of 348" in output  # 1500 = 3 x 384 + 348: a short window
    else:
        full, ours = (re.findall(r"^epoch .*$", part, re.MULTILINE) for part in output.split("batch of 384"))
        assert full == ours != []


def processes_of(session: int) -> list[str]:
    listed = subprocess.run(["ps", "-A", "-o", "sid=,pid=,args="], check=True, capture_output=True, text=True).stdout
    return [line for line in listed.splitlines() if line.split()[0] == str(session)]


def test_torch_ray() -> None:
    """Two workers with uneven data end with the weights of one process, and no process of Ray's is left."""
    command = [sys.executable, str(FOLDER / "torch_ray.py")]
    # Not tmp_path: Ray puts sockets there, whose paths may have 107 characters at most.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        # With a token given, Ray does not write one into the home folder.
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        environment = {**os.environ, **token, "RAY_TMPDIR": folder}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
        ) as process:
            try:
                output, _ = process.communicate(timeout=300)
            finally:
                process.kill()  # where it still runs; Ray's processes end with it
        end = time.monotonic() + 30
        while (left := processes_of(process.pid)) and time.monotonic() < end:
            time.sleep(0.1)
    assert process.returncode == 0
    assert left == []
    assert len(re.findall(r"^epoch +\d+: loss [\d.]+$", output, re.MULTILINE)) == 15
    assert float(re.search(r"weights are (\S+) apart", output)[1]) < 1e-12
    assert float(re.search(r"held-out digits: ([\d.]+)%", output)[1]) > 95
