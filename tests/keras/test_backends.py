"""The same tests on the other backends of Keras, each in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import keras
import pytest

ROOT = Path(__file__).parents[2]
FILES = ["tests/keras/test_exactness.py", "tests/keras/test_fit.py", "tests/keras/test_accumulate.py"]
OTHERS = sorted({"tensorflow", "jax", "torch"} - {keras.backend.backend()})


@pytest.mark.parametrize("backend", OTHERS)
def test_backend(backend: str) -> None:
    environment = {**os.environ, "KERAS_BACKEND": backend}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *FILES]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
