"""A disk that is full, a folder that cannot be written to, checkpoints that were changed: nothing good is lost."""

import os
import resource
import shutil

import pytest

from tests.cli.command import run, run_fresh

from .comparison import differences, newest
from .process import ROOT, num_lines

TASK = ROOT / "tests/crash/tasks/torch_task.py"


def train(*arguments, preexec_fn=None, has_rights=True):
    """Runs to its end; returns the exit code and what was said."""
    given = ["train", TASK, "--seed", 7, "--schedule", "constant", *arguments]
    done = run_fresh(*given, preexec_fn=preexec_fn) if preexec_fn else run(*given, has_rights=has_rights)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of 12 steps."""
    folder = tmp_path_factory.mktemp("whole")
    assert train("--out", folder / "run", "--steps", 12)[0] == 0
    return folder / "run"


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """The first 6 of them, with the checkpoints of the last two."""
    folder = tmp_path_factory.mktemp("half")
    for steps in (3, 6):
        where = "--resume" if (folder / "run").exists() else "--out"
        code, told = train(where, folder / "run", "--steps", steps)
        assert code == 0, told
    assert len(list((folder / "run" / "checkpoints").glob("0*"))) == 2
    return folder / "run"


def copied(half, folder):
    shutil.copytree(half, folder / "run")
    return folder / "run"


def limited(num_bytes):
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))

    return limit


def test_a_full_disk_leaves_the_checkpoints_before(half, whole, tmp_path):
    """Files may not grow beyond what the history needs: no new checkpoint fits, and the good ones stay."""
    out = copied(half, tmp_path)
    before = {path: path.read_bytes() for path in (out / "checkpoints").glob("0*/*")}
    size = (out / "checkpoints").joinpath("000002", "state.json").stat().st_size // 2
    assert num_lines(out / "history.jsonl") == 6
    assert size > 3 * (out / "history.jsonl").stat().st_size
    code, told = train("--resume", out, "--steps", 12, "--checkpoint-every", 2, preexec_fn=limited(size))
    assert code == 4, told
    assert "Traceback" not in told
    assert "File too large" in told
    assert "earlier ones are untouched" in " ".join(told.split())  # of those that were due on the way
    assert {path: path.read_bytes() for path in (out / "checkpoints").glob("0*/*")} == before
    assert not list((out / "checkpoints").glob("*.part"))
    assert train("--resume", out, "--steps", 12)[0] == 0
    assert differences(whole, out) == []


def test_a_folder_that_cannot_be_written_to(half, tmp_path):
    """Not even by root, whose rights to do so are dropped."""
    out = copied(half, tmp_path)
    out.chmod(0o555)
    before = sorted(path.name for path in out.iterdir())
    code, told = train("--resume", out, "--steps", 12, has_rights=False)
    assert code == 4, told
    assert "Traceback" not in told
    assert "make sure that the folder is writable" in told
    assert sorted(path.name for path in out.iterdir()) == before


def test_checkpoints_that_are_a_file(tmp_path):
    """What nobody can write to, root neither."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("mine")
    code, told = train("--out", tmp_path / "run", "--steps", 2)
    assert code == 2, told
    assert "checkpoints is not a folder, which bigbatch does not make" in told
    assert (tmp_path / "run" / "checkpoints").read_text() == "mine"


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path):
    os.truncate(path, path.stat().st_size - 10)


DAMAGE = {
    "a bit of the weights": lambda folder: flip(folder / "state.safetensors"),
    "the manifest is gone": lambda folder: (folder / "manifest.json").unlink(),
    "a history cut short": lambda folder: cut(next(folder.parent.glob("log-*"))),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(kind, half, whole, tmp_path):
    out = copied(half, tmp_path)
    DAMAGE[kind](out / "checkpoints" / "000002")
    code, told = train("--resume", out, "--steps", 12)
    assert code == 0, told
    assert f"{out / 'checkpoints' / '000002'} is damaged" in told
    assert f"continuing from {out / 'checkpoints' / '000001'}" in told
    assert differences(whole, out) == []


def test_no_checkpoint_is_whole(half, tmp_path):
    out = copied(half, tmp_path)
    for name in ("000001", "000002"):
        flip(out / "checkpoints" / name / "state.json")
    history = (out / "history.jsonl").read_bytes()
    code, told = train("--resume", out, "--steps", 12)
    assert code == 2, told
    assert "no checkpoint in" in told
    assert (out / "history.jsonl").read_bytes() == history


def test_the_history_comes_from_the_checkpoint(half, whole, tmp_path):
    """Whatever became of the files beside it."""
    out = copied(half, tmp_path)
    (out / "history.jsonl").write_text("somebody else's\n" * 9)
    (out / "times.jsonl").write_text('{"step": 0, "seconds": 0.1}\n{"step": 1, "sec')
    assert train("--resume", out, "--steps", 12)[0] == 0
    assert differences(whole, out) == []
    assert num_lines(out / "times.jsonl") == 12
    assert newest(out).step == 12
