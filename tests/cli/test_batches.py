"""A resumed run has the same batches, wherever it stopped and whatever the model draws."""

import itertools
import random

import numpy as np
import pytest
import torch

from bigbatch.cli.config import Config
from bigbatch.cli.engines.engine import Engine
from bigbatch.cli.run import randomness
from bigbatch.cli.run.batches import Batches
from bigbatch.cli.run.checkpoints import RunCheckpoints
from bigbatch.cli.run.folder import RunFolder
from bigbatch.cli.task import Task

NUMBERS = list(range(23))


def by_torch(batch_size):
    loader = torch.utils.data.DataLoader(NUMBERS, batch_size, shuffle=True)
    yield from ([*batch.tolist(), float(torch.rand(()))] for batch in loader)


def by_numpy(batch_size):
    order = np.random.permutation(NUMBERS)
    yield from ([*order[k : k + batch_size], np.random.normal()] for k in range(0, len(NUMBERS), batch_size))


def by_python(batch_size):
    order = random.sample(NUMBERS, len(NUMBERS))
    yield from ([*order[k : k + batch_size], random.random()] for k in range(0, len(NUMBERS), batch_size))


def by_a_buffer(batch_size):
    """Yields batches that depend on every earlier draw."""
    buffer, batch = [], []
    for number in NUMBERS:
        buffer.append(number)
        if len(buffer) > 6:
            batch.append(buffer.pop(random.randrange(7)))
        if len(batch) == batch_size:
            yield batch
            batch = []
    yield batch + buffer


TASKS = [by_torch, by_numpy, by_python, by_a_buffer]


def draw_as_a_model_does(num=1):
    for _ in range(num):
        torch.rand(7)
        np.random.normal(size=5)
        random.random()


class Idle(Engine):
    """An engine that trains nothing."""

    def state(self):
        return None

    def load(self, state):
        pass


class Run:
    """The batches of a run, from the loop that a run uses."""

    def __init__(self, batches, folder):
        config = Config("task", batch_size=5, seed=3, checkpoint_every=None)
        files = RunFolder(folder)
        files.begin_with(b"")
        self.data = Batches(Task("task", "task", "torch", lambda: None, batches, None), config)
        self.checkpoints = RunCheckpoints(files, Idle(), config, is_read_only=False)

    def next(self, num, num_draws=1, *, is_saved=False, is_interrupted=False):
        """The next batches, with the model's draws after each; the last may be interrupted instead of trained."""
        found = []
        for batch, _ in self.checkpoints.batches(self.data, 9):
            found.append(batch)
            if len(found) == num and is_interrupted:
                break
            draw_as_a_model_does(num_draws)
            self.checkpoints.count()
            if len(found) == num:
                break
        if is_saved:
            self.checkpoints.save(wait=True)
            self.checkpoints.close()
        return found


@pytest.fixture
def new(tmp_path):
    """Makes runs, each in its own folder."""
    numbers = itertools.count()

    def make(batches, name=None):
        folder = tmp_path / (name or str(next(numbers)))
        folder.mkdir(exist_ok=True)
        return Run(batches, folder)

    return make


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.__name__)
@pytest.mark.parametrize("num", [1, 3, 4, 5, 7])
def test_resuming_gives_the_remaining_batches(task, num, new):
    """An epoch has five batches, so 4, 5 and 7 are before its end, at its end, and in the next epoch."""
    whole = new(task).next(13)
    assert whole[:5] != whole[5:10]
    assert new(task, "parts").next(num, is_saved=True) == whole[:num]
    draw_as_a_model_does(9)
    assert new(task, "parts").next(13 - num) == whole[num:]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.__name__)
def test_batches_do_not_depend_on_what_the_model_draws(task, new):
    assert new(task).next(8, num_draws=0) == new(task).next(8, num_draws=3)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.__name__)
def test_negative_control_without_the_random_state_of_the_epoch(task, new, monkeypatch):
    """Without it, the batches differ."""
    whole = new(task).next(13)
    new(task, "parts").next(7, is_saved=True)
    monkeypatch.setattr(RunCheckpoints, "_set_random", lambda *_: None)
    assert new(task, "parts").next(6) != whole[7:]


def test_model_does_not_depend_on_what_batches_draw(new):
    def drawn(num):
        randomness.seed(1)
        new(by_torch).next(num, num_draws=0)
        return float(torch.rand(())), np.random.normal(), random.random()

    assert drawn(1) == drawn(8)


@pytest.mark.parametrize("num", [0, 5, 7])
def test_interrupted_batch_is_repeated(num, new):
    """The step of the first batch of an epoch, or of another batch, is interrupted in its middle."""
    whole = new(by_numpy).next(13)
    assert new(by_numpy, "parts").next(num + 1, is_saved=True, is_interrupted=True)[-1] == whole[num]
    assert new(by_numpy, "parts").next(13 - num) == whole[num:]
