"""A short soak for every test run; `make soak` runs the long one."""

import subprocess
import sys

import pytest

from .steps import complaints

slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("framework", "num_steps"),
    [
        ("torch", 1500),
        pytest.param("torch", 4000, marks=slow),
        pytest.param("tensorflow", 3000, marks=slow),
        pytest.param("jax", 4000, marks=slow),
    ],
)
def test_memory_handles_and_threads_do_not_grow(framework: str, num_steps: int) -> None:
    command = [sys.executable, "-m", "tests.crash.steps", "--framework", framework, "--steps", str(num_steps)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "0 file handles and 0 threads left over" in done.stdout


def test_growth_is_named() -> None:
    found = {"growth": 0.03, "handles": ["/tmp/file"], "threads": 1}
    assert [text.split()[0] for text in complaints(found)] == ["resident", "1", "1"]
