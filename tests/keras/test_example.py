"""Runs the example and checks the figures that it prints."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "keras_fit.py"


@pytest.mark.any_backend
def test_keras_fit() -> None:
    """bigbatch gives the history of the full batch, Keras's own accumulation does not, and the model learns."""
    command = [sys.executable, str(EXAMPLE)]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    found = re.findall(r"^ +\d+ +([\d.]+) +([\d.]+) +([\d.]+)$", output, re.MULTILINE)
    rows = [tuple(map(float, row)) for row in found]
    assert len(rows) == 15
    assert all(abs(full - ours) < 1e-5 * max(full, 1) for full, ours, _ in rows)
    assert any(abs(full - theirs) > 1e-3 for full, _, theirs in rows)
    assert float(re.search(r"weights of bigbatch: (\S+) from", output)[1]) < 1e-4
    assert float(re.search(r"weights of gradient_accumulation_steps: (\S+)", output)[1]) > 1e-2
    assert float(re.search(r"held-out digits: ([\d.]+)%", output)[1]) > 95
