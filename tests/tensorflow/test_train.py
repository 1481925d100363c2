"""The whole job over a stream of micro-batches."""

import numpy as np
import pytest
import tensorflow as tf

from bigbatch import BatchError
from bigbatch.tensorflow import train_with_accumulation
from tests.problems import Problem, samples, tokens

from .training import Run, adam, cut, flat, make_batches, make_loss, make_model, make_weight

DIGITS = Problem("digits", "samples", samples(64, 25), 16)
TEXT = Problem("text", "tokens", (tokens(3, 60, 17, 40), tokens(8, 1)), 1)


def micro_batches(problem: Problem) -> list[dict[str, np.ndarray]]:
    return [m for batch in make_batches(problem) for m in cut(batch, problem.micro_batch_size)]


@pytest.mark.parametrize("problem", [DIGITS, TEXT], ids=lambda problem: problem.name)
def test_history_and_weights_are_those_of_full_batch_training(problem: Problem, float64: None) -> None:
    """Two windows an epoch, the second one short."""
    full = Run(problem, adam, epochs=3).full()
    model = make_model(problem)
    history = train_with_accumulation(
        model,
        micro_batches(problem),
        adam(),
        make_loss(problem),
        accumulation_steps=4,
        epochs=3,
        weight=make_weight(problem),
    )
    assert np.linalg.norm(flat(model) - flat(full.model)) <= 1e-9 * np.linalg.norm(full.update)
    assert [step.loss for step in history.steps] == pytest.approx(full.losses, rel=1e-9)
    weights = [step.weight for step in history.steps[:2]]
    means = [np.average(full.losses[k : k + 2], weights=weights) for k in (0, 2, 4)]
    assert history.losses == pytest.approx(means, rel=1e-9)


def test_a_dataset_can_be_iterated_again() -> None:
    (batch,) = make_batches(Problem("digits", "samples", samples(50), 16))
    data = tf.data.Dataset.from_tensor_slices(dict(batch)).batch(8)
    model = make_model(DIGITS)
    history = train_with_accumulation(model, data, adam(), make_loss(DIGITS), accumulation_steps=4, epochs=2)
    assert [step.weight for step in history.steps] == [32, 18, 32, 18]


def test_a_generator_is_refused_before_anything_is_trained() -> None:
    model = make_model(DIGITS)
    before = flat(model)
    stream = (m for m in micro_batches(DIGITS))
    with pytest.raises(BatchError, match="generator, which is spent after 1 of 2 epochs"):
        train_with_accumulation(model, stream, adam(), make_loss(DIGITS), accumulation_steps=4, epochs=2)
    assert np.array_equal(flat(model), before)
