"""Every example runs, and says what it promises."""

import re
import subprocess
import sys
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


def run(name: str) -> str:
    command = [sys.executable, str(FOLDER / name)]
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
