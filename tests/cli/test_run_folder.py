"""The run folder: nothing of the user's is overwritten, and no link in it is followed."""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from bigbatch.cli.child import started
from bigbatch.cli.doctor import _devices
from tests.crash.process import num_lines, start

from .command import BIGBATCH, environment, history_of, run, summary_of, train, write_task
from .test_refusals import assert_refused

FILES = ("config.toml", "history.jsonl", "times.jsonl", "summary.json", "report.html", "model.safetensors")
FOLDERS = ("checkpoints", "full_batch")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def run_of_6(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    train(task, folder, "--steps", 6, "--no-compare", "--checkpoint-every", 3)
    return folder


def contents(folder: Path) -> dict[str, Any]:
    """Everything under a folder: what each name is, and the bytes of files."""
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.is_file() and path.read_bytes()
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize("name", [*FILES, "notes.txt"])
def test_a_folder_with_something_else_in_it(name: str, task: Path, tmp_path: Path) -> None:
    (tmp_path / name).write_text("mine")
    assert_refused(run("train", task, "--out", tmp_path, "--steps", 2), str(tmp_path), "pass another --out")
    assert contents(tmp_path) == {name: b"mine"}


def test_an_empty_folder_and_a_file(task: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    train(task, tmp_path / "empty", "--steps", 2, "--no-compare")
    (tmp_path / "file").write_text("mine")
    assert_refused(run("train", task, "--out", tmp_path / "file"), "is not a folder: pass another --out")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("name", ["config.toml", "history.jsonl", "checkpoints", "full_batch"])
def test_a_new_run_in_a_folder_with_a_link(name: str, task: Path, tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "victim")
    before = contents(tmp_path)
    assert_refused(run("train", task, "--out", tmp_path / "run", "--steps", 2), str(tmp_path / "run"))
    assert contents(tmp_path) == before


def names_of_ours(folder: Path) -> list[str]:
    """Every name that a run writes, in the run folder and in its checkpoints."""
    inside = [f"checkpoints/{path.name}" for path in (folder / "checkpoints").iterdir()]
    newest = max((folder / "checkpoints").glob("0*"))
    return [*FILES, *FOLDERS, *inside, *(str(path.relative_to(folder)) for path in newest.iterdir())]


def written_outside(folder: Path, writes: Path) -> set[str]:
    """What a process wrote, made, moved or removed that is neither in this folder nor a question to the system."""
    allowed = (f"{folder.resolve()}/", "/proc/", "/dev/null")
    return {line for line in writes.read_text().splitlines() if not line.startswith(allowed)}


def test_no_link_is_followed(run_of_6: Path, task: Path, tmp_path: Path) -> None:
    """A link at every name that a run writes, to a file or to a folder, which is there or not."""
    tried = 0
    for name in names_of_ours(run_of_6):
        for target in ("file", "folder", "nothing"):
            place = tmp_path / f"{name.replace('/', '-')}-{target}"
            victim, folder = place / "victim", place / "run"
            (victim / "folder").mkdir(parents=True)
            (victim / "file").write_text("mine")
            (victim / "folder" / "photo.jpg").write_text("mine")
            shutil.copytree(run_of_6, folder)
            ours = folder / name
            shutil.rmtree(ours) if ours.is_dir() else ours.unlink(missing_ok=True)
            ours.symlink_to(victim / target)
            before, writes = contents(victim), place / "writes.txt"
            done = run("train", task, "--resume", folder, "--steps", 8, "--no-compare", writes=writes)
            assert contents(victim) == before, (name, target, done.stderr)
            assert written_outside(folder, writes) == set(), (name, target)
            assert "Traceback" not in done.stderr, (name, target, done.stderr)
            if name in (*FILES, *FOLDERS, "checkpoints/lock"):
                assert done.returncode == 2, (name, target, done.stderr)
                assert f"{ours} is a link" in " ".join(done.stderr.split())
            tried += 1
    assert tried == 3 * len(names_of_ours(run_of_6)) >= 40


def test_negative_control_of_what_is_written_outside(run_of_6: Path, tmp_path: Path) -> None:
    """The list has what a task writes."""
    code = "\nfrom os import mkdir, rename\nname = __file__\nopen(f'{name}.1', 'w')\nmkdir(f'{name}.2')\n"
    code += "rename(f'{name}.2', f'{name}.3')\n"
    task, writes = write_task(tmp_path, code), tmp_path / "writes.txt"
    shutil.copytree(run_of_6, tmp_path / "run")
    assert run("train", task, "--resume", tmp_path / "run", "--no-compare", writes=writes).returncode == 0
    assert written_outside(tmp_path / "run", writes) == {f"{task}.{number}" for number in (1, 2, 3)}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (".", "is not readable"),
        ("config.toml", "cannot read"),
        ("history.jsonl", None),  # the checkpoint has its own
        ("times.jsonl", "Permission denied"),
        ("checkpoints", "Permission denied"),
        ("checkpoints/lock", "Permission denied"),
        ("checkpoints/000002", "cannot be read (Permission denied), which does not mean that it is damaged"),
        ("checkpoints/000002/state.json", "000002 cannot be read (Permission denied), which does not mean that"),
    ],
)
def test_a_run_of_which_somebody_else_owns_a_part(
    name: str, reason: str | None, run_of_6: Path, task: Path, tmp_path: Path
) -> None:
    """Root's own rights are dropped. What cannot be read is named, and nothing changes."""
    folder = tmp_path / "run"
    shutil.copytree(run_of_6, folder)
    taken = folder / name
    if os.geteuid() == 0:
        os.chown(taken, 65534, 65534)
    mode = taken.stat().st_mode
    taken.chmod(0)
    before = contents(folder) if os.geteuid() == 0 else None
    done = run("train", task, "--resume", folder, "--steps", 8, "--no-compare", has_rights=False)
    assert "Traceback" not in done.stderr
    if reason is None:
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode in (2, 4), done.stderr
        assert reason in " ".join(done.stderr.split())
        assert before in (None, contents(folder))
    if os.geteuid() == 0:
        os.chown(taken, 0, 0)
    taken.chmod(mode)
    assert run("train", task, "--resume", folder, "--steps", 8, "--no-compare").returncode == 0
    assert len(history_of(folder)) == 8


@pytest.mark.parametrize(
    "name", ["history.jsonl.part", "config.toml.part", "checkpoints/000003.part", "times.jsonl.part"]
)
def test_names_that_could_be_foreseen(name: str, run_of_6: Path, task: Path, tmp_path: Path) -> None:
    shutil.copytree(run_of_6, tmp_path / "run")
    (tmp_path / "run" / name).symlink_to(tmp_path / "target")
    assert run("train", task, "--resume", tmp_path / "run", "--steps", 8, "--no-compare").returncode == 0
    assert not (tmp_path / "target").exists()
    assert len(history_of(tmp_path / "run")) == 8


def test_a_second_start_in_the_same_folder(task: Path, tmp_path: Path) -> None:
    """It is refused before it writes anything: the first, killed and continued, keeps its own options."""
    slow = write_task(tmp_path, "\nquick = loss\ndef loss(model, batch):\n    import time\n    time.sleep(0.05)\n"
                      "    return quick(model, batch)\n", "slow")  # fmt: skip
    out = tmp_path / "run"
    process = start(["train", slow, "--out", out, "--steps", 2000, "--no-compare"], tmp_path / "log.txt")
    try:
        deadline = time.monotonic() + 60
        while num_lines(out / "history.jsonl") < 2:
            assert time.monotonic() < deadline, (tmp_path / "log.txt").read_text()
            time.sleep(0.01)
        before = (out / "config.toml").read_bytes()
        assert_refused(run("train", slow, "--out", out, "--lr", 9), "has a run already")
        assert_refused(run("train", slow, "--resume", out, "--lr", 9), "is in use by another process")
        assert (out / "config.toml").read_bytes() == before
    finally:
        process.kill()
        process.wait()


def test_a_refused_resume_leaves_the_options(run_of_6: Path, task: Path, tmp_path: Path) -> None:
    shutil.copytree(run_of_6, tmp_path / "run")
    before = (tmp_path / "run" / "config.toml").read_bytes()
    fails = write_task(tmp_path, "\ndef loss(model, batch):\n    raise ValueError('not today')\n", "tiny")
    assert run("train", fails, "--resume", tmp_path / "run", "--steps", 9, "--lr", 3).returncode == 3
    assert (tmp_path / "run" / "config.toml").read_bytes() == before
    train_on = run("train", task, "--resume", tmp_path / "run", "--steps", 9, "--no-compare")
    assert train_on.returncode == 0, train_on.stderr


def test_what_a_killed_process_has_left(task: Path, tmp_path: Path) -> None:
    """A start that was killed can be repeated, and the next one tidies up, but only what is ours."""
    out = tmp_path / "run"
    names = {".config.toml.0123456789abcdef.part", ".full_batch.toml.0123456789abcdef.part"}
    out.mkdir()
    for name in names:
        (out / name).write_text("lr = ")
    train(task, out, "--steps", 2, "--no-compare")
    assert not names & set(contents(out))
    (out / ".notes.txt.0123456789abcdef.part").write_text("mine")
    train_on = run("train", task, "--resume", out, "--steps", 3, "--no-compare")
    assert train_on.returncode == 0, train_on.stderr
    assert ".notes.txt.0123456789abcdef.part" in contents(out)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / ".notes.txt.0123456789abcdef.part").write_text("mine")
    assert_refused(run("train", task, "--out", tmp_path / "new"), "is not empty, and not a run of bigbatch")


def test_a_history_that_was_cut_off(run_of_6: Path, task: Path, tmp_path: Path) -> None:
    """The checkpoint has its own."""
    shutil.copytree(run_of_6, tmp_path / "run")
    history = tmp_path / "run" / "history.jsonl"
    whole = history.read_bytes()
    history.write_bytes(whole[:100])
    assert run("train", task, "--resume", tmp_path / "run", "--steps", 8, "--no-compare").returncode == 0
    assert history.read_bytes().startswith(whole.replace(b'"ends_epoch": true', b'"ends_epoch": true'))
    assert len(history_of(tmp_path / "run")) == 8


def test_another_task_of_the_same_shapes(run_of_6: Path, tmp_path: Path) -> None:
    shutil.copytree(run_of_6, tmp_path / "run")
    other = write_task(tmp_path, name="other")
    before = contents(tmp_path / "run")
    done = run("train", other, "--resume", tmp_path / "run", "--steps", 8)
    assert_refused(done, "the run is of the task tiny for torch, and not of other for torch")
    assert contents(tmp_path / "run") == before


def test_the_last_checkpoint_cannot_be_written(tmp_path: Path) -> None:
    """All that can be written is, and the message says what is missing."""
    code = """
import pathlib, shutil, sys
kept = loss
num = 0
def loss(model, batch):
    global num
    num += 1
    if num == 31:
        folder = pathlib.Path(sys.argv[sys.argv.index("--out") + 1]) / "checkpoints"
        shutil.rmtree(folder)
        folder.write_text("in the way")
    return kept(model, batch)
"""
    task = write_task(tmp_path, code)
    done = run("train", task, "--out", tmp_path / "run", "--steps", 6, "--no-compare", "--batch-size", 16)
    assert_refused(done, "the last checkpoint is missing", str(tmp_path / "run" / "model.safetensors"), code=4)
    assert summary_of(tmp_path / "run")["num_steps"] == 6
    assert all((tmp_path / "run" / name).is_file() for name in FILES)


def test_weights_that_cannot_be_written_into_the_run_folder(tmp_path: Path) -> None:
    """They are written elsewhere, and the message says where."""
    code = """
import pathlib, sys
kept = loss
def loss(model, batch):
    (pathlib.Path(sys.argv[sys.argv.index("--out") + 1]) / "model.safetensors").mkdir(exist_ok=True)
    return kept(model, batch)
"""
    task = write_task(tmp_path, code)
    done = run("train", task, "--out", tmp_path / "run", "--steps", 2, "--no-compare")
    assert_refused(done, "the weights are in", code=4)
    (place,) = re.findall(r"the weights are in (\S+) instead", " ".join(done.stderr.split()))
    assert set(load_file(place)) == {"0.weight", "0.bias", "3.weight", "3.bias"}
    shutil.rmtree(Path(place).parent)


TALKATIVE = "\nkept = loss\ndef loss(model, batch):\n    print('x' * 10_000)\n    return kept(model, batch)\n"


def closed_pipe() -> int:
    """The end of a pipe that nobody reads."""
    read, write = os.pipe()
    os.close(read)
    return write


def full_disk() -> int:
    return os.open("/dev/full", os.O_WRONLY)


@pytest.mark.parametrize("opened", [closed_pipe, full_disk])
def test_output_that_cannot_be_written(opened: Callable[[], int], tmp_path: Path) -> None:
    task, out = write_task(tmp_path, TALKATIVE), opened()
    given = ["train", task, "--out", tmp_path / "run", "--steps", 20, "--no-compare"]
    done = subprocess.run([BIGBATCH, *map(str, given)], env=environment(), timeout=120, stdout=out, stderr=out)
    os.close(out)
    assert summary_of(tmp_path / "run")["status"] == "finished"
    assert len(history_of(tmp_path / "run")) == 20
    assert done.returncode == 0


def test_a_terminal_that_is_closed(tmp_path: Path) -> None:
    """The bar has nowhere to go; the run goes on, as under nohup."""
    terminal, screen = os.openpty()
    task, out = write_task(tmp_path, TALKATIVE), tmp_path / "run"
    given = ["train", task, "--out", out, "--steps", 400, "--no-compare"]
    process = subprocess.Popen([BIGBATCH, *map(str, given)], env=environment(), stdout=screen, stderr=screen)
    os.close(screen)
    shown = b""
    while num_lines(out / "history.jsonl") < 3:
        shown += os.read(terminal, 100_000)
    os.close(terminal)
    assert process.wait(120) == 0
    assert b"\x1b[?25l" in shown  # the bar hides the cursor
    assert summary_of(out)["status"] == "finished"
    assert len(history_of(out)) == 400


def test_names_are_shown_as_text(tmp_path: Path) -> None:
    """Markup of rich, and escape sequences that a terminal would obey."""
    code = "\ndef evaluate(model):\n    return {'f1[macro]': 1.0, '[/b]': 2.0, 'a\\x1b[31mred': 3.0}\n"
    task = write_task(tmp_path, code)
    done = run("train", task, "--out", tmp_path / "run", "--steps", 2, "--no-compare")
    assert done.returncode == 0, done.stderr
    assert "f1[macro]" in done.stderr.lower()
    assert "[/b]" in done.stderr.lower()
    assert "\x1b[31m" not in done.stderr
    assert "\\x1b[31mred" in done.stderr


def test_files_of_the_current_folder_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by the processes that train and verify with the full batch, nor by those of `doctor`."""
    for name in ("typer", "rich", "numpy", "json"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w'); raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    with (tmp_path / "log.txt").open("w") as log, started("report", "nothing", output=log, errors=log) as child:
        assert child.wait(60) == 2
    assert "pass the folder of a run" in (tmp_path / "log.txt").read_text()
    assert _devices("import typer; print(['a device'])") == "a device"
    assert not (tmp_path / "imported").exists()
