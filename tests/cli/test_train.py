"""`bigbatch train`: what it does, shows and leaves."""

import json
import math
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from safetensors.numpy import load_file

from bigbatch import History

from .command import history_of, run, summary_of, train, train_both, verify, write_task


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run folder, and what was said."""
    folder = tmp_path_factory.mktemp("finished")
    done = run("train", write_task(folder), "--out", folder / "run")
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    return folder / "run", done.stderr


def test_what_a_run_leaves(finished: tuple[Path, str]) -> None:
    out, told = finished
    names = {
        "config.toml", "history.jsonl", "times.jsonl", "summary.json", "model.safetensors", "report.html",
        "full_batch", "checkpoints",
    }  # fmt: skip
    assert {path.name for path in out.iterdir()} == names
    summary = summary_of(out)
    assert summary["status"] == summary["full_batch"]["status"] == "finished"
    assert (summary["num_steps"], summary["num_epochs"], summary["num_samples"]) == (12, 3, 159)
    assert (summary["batch_size"], summary["micro_batch_size"], summary["num_micro_batches"]) == (16, 3, 6)
    history = History.load(out / "history.jsonl")
    assert len(history) == 12
    assert len(history.losses) == 3
    assert history.losses[-1] == pytest.approx(summary["loss"])
    assert {name: array.shape for name, array in load_file(out / "model.safetensors").items()} == {
        "0.weight": (12, 6), "0.bias": (12,), "3.weight": (3, 12), "3.bias": (3,),
    }  # fmt: skip
    assert tomllib.loads((out / "config.toml").read_text())["micro_batch_size"] == 3
    for text in ("Held-out accuracy", "full batch", "Peak memory", str(out), "6 × 3"):
        assert text in told


def test_it_equals_the_full_batch_and_the_summary_tells_the_truth(finished: tuple[Path, str]) -> None:
    out, _ = finished
    summary = summary_of(out)
    ours, full = (load_file(folder / "model.safetensors") for folder in (out, out / "full_batch"))
    gaps = {name: np.abs(ours[name] - full[name]).max() / np.abs(full[name]).max() for name in full}
    assert summary["comparison"]["max_weight_difference"] == pytest.approx(max(gaps.values()), rel=1e-6)
    assert max(gaps.values()) < 1e-5
    assert summary["verification"]["is_exact"]
    assert [step["num_micro_batches"] for step in history_of(out)][:4] == [6, 6, 6, 2]
    assert [step["num_micro_batches"] for step in history_of(out / "full_batch")][:4] == [1, 1, 1, 1]
    assert full["0.weight"].any()


def test_a_wrong_weight_shows(tmp_path: Path) -> None:
    """The negative control: every micro-batch counts the same, whatever its size."""
    task = write_task(tmp_path, "\ndef weight(micro_batch):\n    return 1\n")
    _, _, comparison = train_both(task, tmp_path / "run")
    assert comparison.max_weight_difference > 1e-3
    found = verify(task)
    assert not found["is_exact"]
    assert found["causes"]


def test_the_same_seed_gives_the_same_history(tmp_path: Path) -> None:
    task = write_task(tmp_path, dropout=0.3)
    for name, seed in (("one", 5), ("two", 5), ("other", 6)):
        train(task, tmp_path / name, "--seed", seed, "--no-compare")
    one, two, other = (history_of(tmp_path / name) for name in ("one", "two", "other"))
    assert one == two
    assert one[0]["loss"] != other[0]["loss"]


def test_json_is_all_that_is_on_stdout(tmp_path: Path) -> None:
    done = run("train", write_task(tmp_path), "--out", tmp_path / "run", "--no-compare", "--json")
    assert done.returncode == 0
    summary = json.loads(done.stdout)
    assert summary.pop("folder") == str(tmp_path / "run")
    assert summary == summary_of(tmp_path / "run")
    assert done.stderr == ""


def test_flags_win_over_the_file_and_the_file_over_the_task(tmp_path: Path) -> None:
    config = tmp_path / "options.toml"
    text = 'micro-batch-size = 5\nsteps = 7\nlr = 0.01\ncompare = false\nschedule = "linear"\nquiet = true\n'
    config.write_text(text + f'out = "{tmp_path / "run"}"\n')
    task = write_task(tmp_path)
    done = run("train", task, "--config", config, "--lr", "0.02")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    used = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert (used["micro_batch_size"], used["steps"], used["lr"], used["batch_size"]) == (5, 7, 0.02, 16)
    assert "epochs" not in used
    assert len(history_of(tmp_path / "run")) == 7
    train(task, tmp_path / "again", "--config", tmp_path / "run" / "config.toml")
    assert history_of(tmp_path / "again") == history_of(tmp_path / "run")


def test_the_learning_rate_follows_batch_warm_up_and_schedule(tmp_path: Path) -> None:
    options = ["--lr-scaling", "sqrt", "--base-batch-size", 4, "--warmup-steps", 3, "--schedule", "cosine"]
    train(write_task(tmp_path), tmp_path / "run", "--no-compare", *options)
    top = 0.05 * 2
    expected = [top / 3, top * 2 / 3, top, *(top * (1 + math.cos(math.pi * k / 9)) / 2 for k in range(9))]
    assert [step["lr"] for step in history_of(tmp_path / "run")] == pytest.approx(expected)


def test_clipping_reaches_the_optimizer(tmp_path: Path) -> None:
    task = write_task(tmp_path, "\ndef optimizer(model):\n    return torch.optim.SGD(model.parameters())\n")
    train(task, tmp_path / "run", "--no-compare", "--steps", 1, "--clip-norm", 1e-6, "--lr", 1)
    train(task, tmp_path / "free", "--no-compare", "--steps", 1, "--lr", 1)
    clipped, free = (load_file(tmp_path / name / "model.safetensors") for name in ("run", "free"))
    assert max(np.abs(clipped[name] - free[name]).max() for name in free) > 1e-3


TWO_OPTIMIZERS = """
def optimizer(model, lr):
    weights, biases = ([p for p in model.parameters() if (p.ndim == 2) == is_weight] for is_weight in (True, False))
    return [torch.optim.Muon(weights, lr), torch.optim.AdamW(biases, lr / 10)]
"""


def test_a_task_with_two_optimizers_is_resumed(tmp_path: Path) -> None:
    task, options = write_task(tmp_path, TWO_OPTIMIZERS, dropout=0.3), ["--no-compare", "--warmup-steps", 6]
    train(task, tmp_path / "whole", *options, "--steps", 7)
    train(task, tmp_path / "parts", *options, "--steps", 5)
    done = run("train", task, "--resume", tmp_path / "parts", "--steps", 7)
    assert done.returncode == 0, done.stderr
    assert history_of(tmp_path / "parts") == history_of(tmp_path / "whole")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("parts", "whole"))
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)


def test_a_second_run_does_not_touch_the_first(finished: tuple[Path, str]) -> None:
    out, _ = finished
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    done = run("train", out.parent / "tiny.py", "--out", out, "--no-compare")
    assert done.returncode == 2
    assert "has a run already: pass another --out, or continue it with --resume" in done.stderr
    assert {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()} == before


INTERRUPTED = """
import os
import signal
num_calls = 0
quiet_loss = loss
def loss(model, batch):
    global num_calls
    num_calls += 1
    if num_calls == int(os.environ.get("INTERRUPT_AT", 0)):
        os.kill(os.getpid(), signal.SIGINT)
    return quiet_loss(model, batch)
"""


def test_ctrl_c_ends_cleanly_and_the_resumed_run_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of the third step. A signal from outside is in tests/crash/test_signals.py."""
    task, out = write_task(tmp_path, INTERRUPTED, dropout=0.3), tmp_path / "run"
    train(task, tmp_path / "undisturbed", "--no-compare")
    monkeypatch.setenv("INTERRUPT_AT", str(1 + 2 * 6 + 2))  # the first call warms up
    done = run("train", task, "--out", out, "--no-compare")
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    assert f"interrupted: to continue, bigbatch train {task} --resume {out}" in done.stderr
    summary = summary_of(out)
    assert (summary["status"], summary["num_steps"], len(history_of(out))) == ("interrupted", 2, 2)
    assert (out / "model.safetensors").exists()
    assert (out / "report.html").exists()
    monkeypatch.delenv("INTERRUPT_AT")
    done = run("train", task, "--resume", out, "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert summary_of(out)["status"] == "finished"
    assert history_of(out) == history_of(tmp_path / "undisturbed")
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (out, tmp_path / "undisturbed"))
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)


FAILS = """
import sys
if any(argument.endswith("full_batch") for argument in sys.argv):
    raise MemoryError("not enough for so many")
"""


def test_a_full_batch_that_fails_is_told_and_the_run_is_kept(tmp_path: Path) -> None:
    """It fails before it imports torch, which is most of the time of its process."""
    task = write_task(tmp_path)
    task.write_text(FAILS + task.read_text())
    done = run("train", task, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    summary = summary_of(tmp_path / "run")
    assert summary["full_batch"]["status"] == "failed"
    assert "not enough for so many" in summary["full_batch"]["reason"]
    assert "no comparison with the full batch" in done.stderr
    assert summary["comparison"] is None
    assert summary["loss"] < 1.2


def test_tensorboard_reads_the_event_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the process that has TensorFlow, which TensorBoard's writer imports; its reader can do without."""
    options = ["--framework", "tensorflow", "--steps", 3, "--no-compare", "--tensorboard"]
    train("digits", tmp_path / "run", *options)
    monkeypatch.setitem(sys.modules, "tensorboard.compat.notf", ModuleType("notf"))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "run")).Reload()
    for name in ("loss", "grad_norm", "lr"):
        found = [event.value for event in events.Scalars(name)]
        assert found == pytest.approx([step[name] for step in history_of(tmp_path / "run")], rel=1e-6)
