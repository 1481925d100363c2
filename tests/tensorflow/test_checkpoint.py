"""Saved in the middle of a window and taken up in another process, as if nothing had happened."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from .resume import NUM_MICRO_BATCHES


def run(num_replicas: int, first: int, last: int, path: Path, *more: str) -> None:
    arguments = [str(num_replicas), str(first), str(last), str(path), *more]
    done = subprocess.run([sys.executable, "-m", "tests.tensorflow.resume", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_another_process_goes_on(num_replicas: int, tmp_path: Path) -> None:
    """Bit for bit on one device; over two replicas the sums are put together and split again, which rounds."""
    run(num_replicas, 0, NUM_MICRO_BATCHES, tmp_path / "whole", "with")
    run(num_replicas, 0, 6, tmp_path / "stopped", "with")
    run(num_replicas, 6, NUM_MICRO_BATCHES, tmp_path / "stopped", "with")
    whole, resumed = (np.load(tmp_path / f"{name}.npy") for name in ("whole", "stopped"))
    if num_replicas == 1:
        assert np.array_equal(whole, resumed)
    assert np.linalg.norm(whole - resumed) <= 1e-12 * np.linalg.norm(whole)


def test_negative_control_without_the_accumulators_state_the_result_differs(tmp_path: Path) -> None:
    run(1, 0, NUM_MICRO_BATCHES, tmp_path / "whole")
    run(1, 0, 6, tmp_path / "stopped")
    run(1, 6, NUM_MICRO_BATCHES, tmp_path / "stopped")
    whole, resumed = (np.load(tmp_path / f"{name}.npy") for name in ("whole", "stopped"))
    assert np.linalg.norm(whole - resumed) > 1e-3 * np.linalg.norm(whole)
