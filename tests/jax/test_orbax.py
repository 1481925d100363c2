"""States saved with orbax in the middle of a window resume exactly."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from .feeding import apart
from .resume import NUM_MICRO_BATCHES, begin, main


def ended(folder: Path) -> dict[str, np.ndarray]:
    return dict(np.load(folder / "ended.npz"))


def assert_same_bits(one: Path, other: Path) -> None:
    a, b = ended(one), ended(other)
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    main(0, NUM_MICRO_BATCHES, folder)
    assert ended(folder)["step"] == 3  # windows of 4, 4 and 2
    return folder


@pytest.mark.parametrize("stop", [1, 4, 6])
def test_window_resumes_from_any_micro_batch(stop: int, undisturbed: Path, tmp_path: Path) -> None:
    main(0, stop, tmp_path)
    main(stop, NUM_MICRO_BATCHES, tmp_path)
    assert_same_bits(tmp_path, undisturbed)


def test_another_process_continues(undisturbed: Path, tmp_path: Path) -> None:
    """The first process stops after 6 of 10 micro-batches, two into a window of four."""
    main(0, 6, tmp_path)
    command = [sys.executable, "-m", "tests.jax.resume", "6", str(NUM_MICRO_BATCHES), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_bits(tmp_path, undisturbed)


def test_negative_control_without_the_open_window_the_result_differs(undisturbed: Path, tmp_path: Path) -> None:
    main(0, 6, tmp_path)
    ours = main(6, NUM_MICRO_BATCHES, tmp_path, is_whole=False)
    full = {name: part for name, part in ended(undisturbed).items() if name != "step"}
    assert apart(ours, full, begin()[1]) > 1e-3
