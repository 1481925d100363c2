"""--on-nonfinite: the effect of a non-finite gradient on a run."""

from pathlib import Path

import pytest

from .command import history_of, run, summary_of, train, write_task

BAD = """
good = batches
def batches(batch_size, epoch, seed):
    for number, (x, y) in enumerate(good(batch_size, epoch, seed)):
        yield (x / 0 if number == 2 and epoch == 0 else x), y
"""


def test_skip(tmp_path: Path) -> None:
    """The schedule counts applied steps."""
    train(write_task(tmp_path, BAD), tmp_path / "run", "--no-compare", "--steps", 8, "--schedule", "linear")
    history = history_of(tmp_path / "run")
    assert [step["is_applied"] for step in history] == [True, True, False, *[True] * 5]
    assert [step["lr"] for step in history] == pytest.approx([0.05 * (1 - k / 8) for k in (0, 1, 2, 2, 3, 4, 5, 6)])


def test_stop_saves_and_has_its_own_exit_code(tmp_path: Path) -> None:
    task, out = write_task(tmp_path, BAD), tmp_path / "run"
    done = run("train", task, "--out", out, "--epochs", 2, "--on-nonfinite", "stop")
    assert done.returncode == 5, done.stderr
    assert summary_of(out)["status"] == "stopped"
    assert summary_of(out)["full_batch"] is None
    assert [step["is_applied"] for step in history_of(out)] == [True, True, False]
    assert "stopped" in (out / "report.html").read_text()
    done = run("train", task, "--resume", out, "--on-nonfinite", "skip", "--no-compare")
    assert done.returncode == 0, done.stderr
    assert summary_of(out)["status"] == "finished"
    train(task, tmp_path / "skipped", "--no-compare", "--epochs", 2)
    assert history_of(out) == history_of(tmp_path / "skipped")


def test_raise_prints_one_sentence(tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = run("train", write_task(tmp_path, BAD), "--out", out, "--on-nonfinite", "raise", "--checkpoint-every", 1)
    assert done.returncode == 2, done.stderr
    assert "0.weight" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(history_of(out)) == 2
    assert list((out / "checkpoints").glob("0*"))


def test_stop_is_refused_for_keras(tmp_path: Path) -> None:
    done = run("train", "digits", "--framework", "keras", "--out", tmp_path / "run", "--on-nonfinite", "stop")
    assert done.returncode == 2
    assert "--on-nonfinite stop is for torch, tensorflow, jax, but digits is a task for keras" in done.stderr
