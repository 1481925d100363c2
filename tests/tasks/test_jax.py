import jax
import numpy as np
import optax
import pytest

from bigbatch.jax import value_and_grad
from bigbatch.tasks import data
from bigbatch.tasks.jax import digits, digits_batchnorm, text

from .checks import (
    DATASETS,
    assert_batches,
    assert_does_not_look_ahead,
    assert_exact,
    assert_mean_of_means_is_wrong,
    assert_untrained_scores,
    gap,
    ragged,
)

TASKS = {"digits": digits, "digits_batchnorm": digits_batchnorm, "text": text}


def model_of(task):
    return task.model(seed=0)


def gradients(task, **options):
    """The gradient of one ragged batch, accumulated or of the full batch."""
    make = value_and_grad if options else jax.value_and_grad
    _, found = jax.jit(make(task.loss, **options))(model_of(task), ragged(task))
    return [np.asarray(leaf) for leaf in jax.tree.leaves(found)]


@pytest.mark.each_value
@pytest.mark.parametrize("task", [digits, text])
@pytest.mark.parametrize("micro_batch_size", [1, 8])
def test_accumulation_is_exact(task, micro_batch_size):
    assert_exact(gradients, task, micro_batch_size)


def test_negative_control_mean_of_means():
    assert_mean_of_means_is_wrong(gradients, text)


def test_batch_norm_is_not_exact():
    ours = gradients(digits_batchnorm, micro_batch_size=8)
    assert gap(ours, gradients(digits_batchnorm)) > 0.01


@pytest.mark.parametrize("name", TASKS)
def test_batches(name):
    assert_batches(TASKS[name], DATASETS[name]())


@pytest.mark.parametrize("name", TASKS)
def test_a_seed_gives_its_own_weights(name):
    one, same, other = (jax.tree.leaves(TASKS[name].model(seed)) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(one, same, strict=True))
    assert gap([*map(np.asarray, one)], [*map(np.asarray, other)]) > 0.1


def test_weight_is_the_number_of_predicted_bytes():
    x, y = ragged(text)
    assert int(text.weight((x, y))) == int((y != data.IGNORED).sum()) < y.size


def test_text_model_does_not_look_ahead():
    x, _ = ragged(text)
    params = model_of(text)
    assert_does_not_look_ahead(lambda x: np.asarray(text.logits(params, x)), x)


def test_score_with_batch_norm_does_not_depend_on_the_other_samples():
    params = model_of(digits_batchnorm)
    x, _ = ragged(digits_batchnorm)
    _, known = digits_batchnorm.logits(params, data.digits().train.x)
    alone, together = (digits_batchnorm.logits(params, part, known)[0][:3] for part in (x[:3], x))
    assert np.allclose(alone, together, atol=1e-4)
    alone, together = (digits_batchnorm.logits(params, part)[0][:3] for part in (x[:3], x))
    assert not np.allclose(alone, together, atol=1e-2)


def test_untrained_scores():
    assert_untrained_scores(TASKS, model_of, most_bits=9.0)


# --- quality: the defaults reach the promised scores --------------------------------------------------


def train(task, seed, epochs=None):
    """Trains with the full batch, which gives the same result if the task is exact, and is faster."""
    options = task.defaults
    optimizer = optax.adamw(options["lr"], eps=1e-5, weight_decay=0.01)
    params = task.model(seed)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, batch):
        updates, state = optimizer.update(jax.grad(task.loss)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    for epoch in range(epochs or options["epochs"]):
        for batch in task.batches(options["batch_size"], epoch, seed):
            params, state = step(params, state, batch)
    return task.evaluate(params)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_digits_are_learnt(seed):
    assert train(digits, seed)["accuracy"] >= 0.97


@pytest.mark.slow
def test_digits_are_learnt_with_batch_norm():
    assert train(digits_batchnorm, 0)["accuracy"] >= 0.97


@pytest.mark.slow
def test_text_is_learnt():
    assert train(text, 0, epochs=1)["bits_per_byte"] < 4.5
