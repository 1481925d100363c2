"""Runs that are killed with SIGKILL until they finish are bitwise equal to those that were not killed; see soak.py."""

import re
import subprocess
import sys

import pytest

from .process import ROOT, environment


def soak(*arguments):
    command = [sys.executable, "-m", "tests.crash.soak", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment(), timeout=1200)


ALL = [
    pytest.param(framework, kills, marks=pytest.mark.slow)
    for framework, kills in (("torch", 15), ("tensorflow", 5), ("jax", 5))
]


@pytest.mark.parametrize(("framework", "kills"), [("torch", 6), *ALL])
def test_killed_runs_end_bitwise_equal(framework, kills, tmp_path):
    report = tmp_path / "soak.md"
    done = soak("--kills", kills, "--framework", framework, "--report", report)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"## {framework}: {kills} kills, bitwise the same as undisturbed" in report.read_text()


def test_negative_control_run_without_its_random_state(tmp_path):
    """The comparison finds a run that does not restore its random state."""
    done = soak("--kills", 2, "--task", ROOT / "tests/crash/tasks/forgetful_task.py")
    assert done.returncode == 1, done.stdout + done.stderr
    for name in ("history.jsonl", "model.safetensors", "checkpoint: state/trained/engine/parts/model/0.weight"):
        assert name in done.stdout


@pytest.mark.parametrize("kills", [6, pytest.param(None, marks=pytest.mark.slow)])
def test_a_run_that_is_killed_before_an_operation_on_its_folder(kills):
    """The quick run tries a few of them; see every.py."""
    command = [sys.executable, "-m", "tests.crash.every", *(["--kills", str(kills)] if kills else [])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment(), timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    num_kills, num_operations = re.fullmatch(
        r"(\d+) kills before (\d+) operations, 0 with problems\n", done.stdout
    ).groups()
    assert int(num_kills) == (kills or int(num_operations))
    assert abs(int(num_operations) - 127) < 10  # docs/checkpoints.md
