"""A process that dies, or a machine that loses power, at any operation on its files."""

import itertools
import re
import shutil
import signal
import warnings
from random import Random

import numpy as np
import pytest

from bigbatch import BigBatchWarning, StateError
from bigbatch.cli.run.folder import RunFolder
from bigbatch.core.checkpoint.store import Store

from .operations import in_a_fork, killed_before, spread, watched
from .power import Disk

NUM_SAVES = 5
NAMES = {"open", "write", "truncate", "fsync", "mkdir", "rename", "unlink", "rmdir"}


def save(folder, last=NUM_SAVES, done=lambda step: None):
    """Goes on to the last checkpoint, with two more lines of the log in each."""
    store = Store(folder)
    found = store.load()
    for step in range(1 if found is None else found.step + 1, last + 1):
        state, new = {"w": np.full(100, step)}, lines(step)[len(lines(step - 1)) :]
        store.save(step, state, {"notes.txt": b"%d" % step}, new_lines=new, wait=True)
        done(step)
    store.close()


def save_twice(folder, done=lambda step: None):
    """A run that is continued once."""
    save(folder, 2, done)
    save(folder, NUM_SAVES, done)


def lines(step):
    """The log after this step."""
    return b"".join(b'{"step": %d}\n' % (line // 2) for line in range(2 * step))


def loaded(folder):
    """The step of the newest checkpoint, which nothing is wrong with; 0 if there is none."""
    with warnings.catch_warnings(action="error"):
        found = Store(folder, is_read_only=True).load()
    if found is None:
        return 0
    assert found.state["w"].tolist() == [found.step] * 100
    assert found.files == {"notes.txt": b"%d" % found.step}
    assert found.log == lines(found.step)
    return found.step


def names(folder):
    return {path.name.partition("-")[0] for path in folder.iterdir()}


@pytest.fixture(scope="module")
def operations(tmp_path_factory):
    """All of them, and how many there were when each save() returned."""
    folder, found, returned = tmp_path_factory.mktemp("operations") / "checkpoints", [], [0]
    with watched(folder, found.append):
        save_twice(folder, done=lambda step: returned.append(len(found)))
    return found, returned


@pytest.mark.parametrize("num_kills", [12, pytest.param(None, marks=pytest.mark.slow)])
def test_a_process_that_is_killed_before_an_operation(num_kills, operations, tmp_path):
    """Before each one, and in the middle of each write. The next process goes on from what was saved."""
    found, returned = operations
    assert {operation.name for operation in found} == NAMES
    assert abs(len(found) - 146) < 10  # docs/checkpoints.md
    for number in spread(len(found), num_kills):
        folder = tmp_path / str(number) / "checkpoints"
        folder.parent.mkdir()

        def run(folder=folder, number=number):
            with watched(folder, killed_before(number)):
                save_twice(folder)

        assert in_a_fork(run) == -signal.SIGKILL
        num_returned = sum(num <= number for num in returned) - 1
        num_saved = loaded(folder)
        assert num_returned <= num_saved <= num_returned + 1, found[number]
        save(folder)
        assert loaded(folder) == NUM_SAVES, found[number]
        if num_saved < NUM_SAVES:  # otherwise nothing was left to do, and nothing was tidied up
            assert names(folder) == {"000004", "000005", "lock", "log"}, found[number]
        assert names(folder.parent) == {"checkpoints"}
        shutil.rmtree(folder.parent)


def survivors(operations, tmp_path, draw):
    """The newest checkpoint after a power failure before each operation, and the last that had been saved by then."""
    found, returned = operations
    disk = Disk(found[0].path)
    for number, operation in enumerate([*found, None]):
        folder = tmp_path / str(number)
        disk.rebuilt(folder, draw)
        yield loaded(folder), sum(num <= number for num in returned) - 1, operation
        shutil.rmtree(folder)
        if operation is not None:
            disk.do(operation)


def drawn_with(seed):
    """Some of the changes; what a file got since it was flushed may be zeros."""
    random = Random(seed)

    def draw(versions):
        version = random.choice(versions)
        if isinstance(version, bytes) and random.random() < 0.5:
            version = version[: len(versions[0])].ljust(len(version), b"\0")
        return version

    return draw


DRAWS = {"nothing that was not flushed": lambda versions: versions[0], "everything": lambda versions: versions[-1]}
DRAWS |= {f"some of it, {seed}": drawn_with(seed) for seed in range(6)}


@pytest.mark.parametrize("kind", DRAWS)
def test_a_power_failure_before_every_operation(kind, operations, tmp_path):
    for survived, saved, operation in survivors(operations, tmp_path, DRAWS[kind]):
        assert saved <= survived <= saved + 1, operation


@pytest.mark.parametrize("path", ["checkpoints", "state.json", "log-.*"])
def test_negative_control_a_file_that_is_not_flushed(path, operations, tmp_path):
    """The simulation finds what it costs to leave out one fsync."""
    found, returned = operations
    is_kept = [operation.name != "fsync" or not re.search(f"/{path}$", operation.path) for operation in found]
    kept = list(itertools.compress(found, is_kept)), [sum(is_kept[:num]) for num in returned]
    with pytest.raises((AssertionError, BigBatchWarning, StateError)):
        for survived, saved, _ in survivors(kept, tmp_path, DRAWS["nothing that was not flushed"]):
            assert survived >= saved


def test_a_power_failure_leaves_the_options_of_a_run(tmp_path):
    """A checkpoint without config.toml could not be resumed."""
    found, num_survived = [], 0
    with watched(tmp_path / "run", found.append):
        (tmp_path / "run").mkdir()
        Store(tmp_path / "run" / "checkpoints").claim()
        RunFolder(tmp_path / "run").write("config.toml", "lr = 0.1")
        save(tmp_path / "run" / "checkpoints")
    disk = Disk(tmp_path / "run")
    for number, operation in enumerate(found):
        disk.do(operation)
        disk.rebuilt(folder := tmp_path / str(number), DRAWS["nothing that was not flushed"])
        if loaded(folder / "checkpoints"):
            assert (folder / "config.toml").read_text() == "lr = 0.1"
            num_survived += 1
    assert num_survived > 50
