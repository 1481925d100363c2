"""The batches of a run: the same again after any number of them, whatever the model draws in between."""

import random

import numpy as np
import pytest
import torch

from bigbatch.cli.config import Config
from bigbatch.cli.run import randomness
from bigbatch.cli.run.batches import Batches
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
    """What a batch is depends on every draw before."""
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


def new(batches):
    return Batches(Task("task", "task", "torch", lambda: None, batches, None), Config("task", batch_size=5, seed=3))


def run(batches, num, num_draws=1):
    """The next batches, with what a model draws after each."""
    found = []
    while len(found) < num:
        for batch, is_last in batches.rest_of_epoch():
            draw_as_a_model_does(num_draws)
            batches.done(is_last)
            found.append(batch)
            if len(found) == num:
                break
    return found


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.__name__)
@pytest.mark.parametrize("num", [1, 3, 4, 5, 7])
def test_going_on_gives_the_batches_that_would_have_come(task, num):
    """Five batches are an epoch, so 4, 5 and 7 are at its end, after it, and in the next."""
    whole = run(new(task), 13)
    assert whole[:5] != whole[5:10]
    first = new(task)
    assert run(first, num) == whole[:num]
    state = first.state()
    draw_as_a_model_does(9)
    other = new(task)
    other.load(state)
    assert run(other, 13 - num) == whole[num:]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.__name__)
def test_they_are_the_same_whatever_the_model_draws(task):
    assert run(new(task), 8, num_draws=0) == run(new(task), 8, num_draws=3)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.__name__)
def test_without_the_random_numbers_of_the_beginning_they_are_others(task):
    """The negative control."""
    whole, first, other = run(new(task), 13), new(task), new(task)
    run(first, 7)
    state = first.state()
    other.load({**state, "start": other.state()["start"]})
    assert run(other, 6) != whole[7:]


def test_the_model_does_not_notice_what_batches_draw():
    def drawn(num):
        randomness.seed(1)
        batches = new(by_torch)
        run(batches, num, num_draws=0)
        return float(torch.rand(())), np.random.normal(), random.random()

    assert drawn(0) == drawn(8)


def test_a_batch_that_is_under_way_comes_again():
    """As when a step is interrupted in its middle: of the first batch of an epoch, and of another."""
    for num in (0, 5, 7):
        whole, first, other = run(new(by_numpy), 13), new(by_numpy), new(by_numpy)
        run(first, num)
        batch, _ = next(iter(first.rest_of_epoch()))
        assert batch == whole[num]
        other.load(first.state())
        assert run(other, 13 - num) == whole[num:]
