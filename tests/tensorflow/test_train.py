"""Training over a stream of micro-batches with `train_with_accumulation`."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from bigbatch import BatchError, OptionError
from bigbatch.tensorflow import train_with_accumulation
from tests.problems import Problem, samples, tokens

from .training import Run, adam, cut, flat, make_batches, make_loss, make_model, make_weight, sgd

DIGITS = Problem("digits", "samples", samples(64, 25), 16)
TEXT = Problem("text", "tokens", (tokens(3, 60, 17, 40), tokens(8, 1)), 1)
TERMS = Problem("terms", "terms", (tokens(3, 60, 17, 40), tokens(8, 1)), 1)


def micro_batches(problem: Problem) -> list[dict[str, Any]]:
    return [m for batch in make_batches(problem) for m in cut(batch, problem.micro_batch_size)]


@pytest.mark.parametrize("problem", [DIGITS, TEXT, TERMS], ids=lambda problem: problem.name)
@pytest.mark.usefixtures("float64")
def test_history_and_weights_are_those_of_full_batch_training(problem: Problem) -> None:
    """Each epoch has two windows; the second one is short."""
    full = Run(problem, adam, epochs=3, clip_norm=0.5).full()
    model = make_model(problem)
    history = train_with_accumulation(
        model,
        micro_batches(problem),
        adam(),
        make_loss(problem),
        accumulation_steps=4,
        epochs=3,
        weight=make_weight(problem),
        clip_norm=0.5,
    )
    assert np.linalg.norm(flat(model) - flat(full.model)) <= 1e-9 * np.linalg.norm(full.update)
    assert [step.loss for step in history.steps] == pytest.approx(full.losses, rel=1e-9)
    assert history.losses == pytest.approx(logged_by_full_batch(problem), rel=1e-9)
    assert len(history.losses) == 3
    assert history.steps[1].num_micro_batches == 2


def logged_by_full_batch(problem: Problem) -> list[float]:
    """The losses that full-batch training logs: means over all samples or tokens of an epoch."""
    run = Run(problem, adam, clip_norm=0.5)
    weigh = make_weight(problem) or (lambda batch: len(batch["y"]))
    epochs = []
    for _ in range(3):
        sums: Any = 0
        counts: Any = 0
        for batch in make_batches(problem):
            losses, weight = run.loss(run.model, batch), weigh(batch)
            losses, weight = (losses, weight) if isinstance(losses, tuple) else ((losses,), (weight,))
            sums = sums + np.array([float(v) * float(w) for v, w in zip(losses, weight, strict=True)])
            counts = counts + np.array([*map(float, weight)])
            run._step_plainly(run._gradients(batch)[1])
        epochs.append(float((sums / counts).sum()))
    return epochs


@pytest.mark.usefixtures("float64")
def test_a_dataset_can_be_iterated_again() -> None:
    """50 samples in micro-batches of 8, in windows of 4: 32 and 18."""
    (batch,) = make_batches(Problem("digits", "samples", samples(50), 16))
    data = tf.data.Dataset.from_tensor_slices(batch).batch(8)
    model = make_model(DIGITS)
    history = train_with_accumulation(model, data, sgd(), make_loss(DIGITS), accumulation_steps=4, epochs=2)
    assert [step.weight for step in history.steps] == [32, 18, 32, 18]
    full = Run(DIGITS, sgd)
    for _ in range(2):
        for rows in (slice(0, 32), slice(32, 50)):
            full._step_plainly(full._gradients({name: array[rows] for name, array in batch.items()})[1])
    assert np.linalg.norm(flat(model) - flat(full.model)) <= 1e-12 * np.linalg.norm(full.update)


@pytest.mark.usefixtures("float64")
def test_batches_are_cut() -> None:
    """50 samples in batches of 32 and 18, each in micro-batches of 5. Passing both options, or neither, is refused."""
    (batch,) = make_batches(Problem("digits", "samples", samples(50), 16))
    data = tf.data.Dataset.from_tensor_slices(batch).batch(32)
    model = make_model(DIGITS)
    history = train_with_accumulation(model, data, sgd(), make_loss(DIGITS), epochs=2, micro_batch_size=5)
    assert [step.num_micro_batches for step in history.steps] == [7, 4, 7, 4]
    assert [step.micro_batch_size for step in history.steps] == [5] * 4
    full = Run(DIGITS, sgd)
    for _ in range(2):
        for rows in (slice(0, 32), slice(32, 50)):
            full._step_plainly(full._gradients({name: array[rows] for name, array in batch.items()})[1])
    assert np.linalg.norm(flat(model) - flat(full.model)) <= 1e-12 * np.linalg.norm(full.update)
    with pytest.raises(OptionError, match=r"accumulation_steps=4 and micro_batch_size=3: pass exactly one"):
        train_with_accumulation(model, [], sgd(), make_loss(DIGITS), accumulation_steps=4, micro_batch_size=3)
    with pytest.raises(OptionError, match="accumulation_steps=None and micro_batch_size=None: pass exactly one"):
        train_with_accumulation(model, [], sgd(), make_loss(DIGITS))
    with pytest.raises(BatchError, match="0 batches in epoch 1 of 1"):
        train_with_accumulation(model, [], sgd(), make_loss(DIGITS), micro_batch_size=3)


def test_a_dataset_of_pairs_and_a_ramp() -> None:
    (batch,) = make_batches(Problem("digits", "samples", samples(50), 16))
    data = tf.data.Dataset.from_tensor_slices((batch["x"], batch["y"])).shuffle(50).batch(8)
    model = make_model(DIGITS)

    def loss(model: Any, batch: Any) -> Any:
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)(batch[1], model(batch[0]))

    history = train_with_accumulation(model, data, sgd(), loss, accumulation_steps=lambda step: 1 + step, epochs=2)
    assert [step.num_micro_batches for step in history.steps] == [1, 2, 3, 1, 5, 2]
    assert [step.weight for step in history.steps] == [8, 16, 24, 2, 40, 10]


def test_a_generator_is_refused_before_anything_is_trained() -> None:
    model = make_model(DIGITS)
    before = flat(model)
    stream = (m for m in micro_batches(DIGITS))
    with pytest.raises(BatchError, match="generator, which is exhausted after 1 of 2 epochs"):
        train_with_accumulation(model, stream, adam(), make_loss(DIGITS), accumulation_steps=4, epochs=2)
    assert np.array_equal(flat(model), before)


def test_a_generator_is_fine_for_one_epoch() -> None:
    model = make_model(DIGITS)
    stream = (m for m in micro_batches(DIGITS))
    assert len(train_with_accumulation(model, stream, sgd(), make_loss(DIGITS), accumulation_steps=4)) == 2


class SpentInSecret:
    """Can be iterated again, but yields nothing the second time."""

    def __init__(self) -> None:
        self._stream = iter(micro_batches(DIGITS))

    def __iter__(self) -> Iterator[Any]:
        yield from self._stream


def test_empty_epoch_is_refused() -> None:
    model = make_model(DIGITS)
    with pytest.raises(BatchError, match="0 micro-batches in epoch 2 of 3"):
        train_with_accumulation(model, SpentInSecret(), sgd(), make_loss(DIGITS), accumulation_steps=4, epochs=3)
    with pytest.raises(BatchError, match="0 micro-batches in epoch 1 of 1"):
        train_with_accumulation(model, [], sgd(), make_loss(DIGITS), accumulation_steps=4)


def test_no_epochs_are_refused() -> None:
    model = make_model(DIGITS)
    with pytest.raises(OptionError, match="epochs is 0"):
        train_with_accumulation(model, [], sgd(), make_loss(DIGITS), accumulation_steps=4, epochs=0)


@pytest.mark.usefixtures("float64")
def test_on_step_is_called_with_each_step() -> None:
    model, seen = make_model(DIGITS), []
    options: dict[str, Any] = {"accumulation_steps": 4, "epochs": 2, "on_step": seen.append}
    history = train_with_accumulation(model, micro_batches(DIGITS), sgd(), make_loss(DIGITS), **options)
    assert [step.loss for step in seen] == [step.loss for step in history.steps]
    assert len(seen) == 4
