import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import pytest
import tensorflow as tf

from bigbatch import BigBatchWarning
from bigbatch.tasks import data
from bigbatch.tasks.tensorflow import digits, digits_batchnorm, text
from bigbatch.tensorflow import Accumulator

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
    keras.utils.set_random_seed(0)
    return task.model()


def gradients(task, **options):
    """The gradient of one ragged batch, accumulated or of the full batch, taken from a step of SGD."""
    model = model_of(task)
    before = [v.numpy() for v in model.trainable_variables]
    optimizer = keras.optimizers.SGD(1.0)
    batch = ragged(task)
    if options:
        Accumulator(model, optimizer, task.loss, **options).step(batch)
    else:
        with tf.GradientTape() as tape:
            value = task.loss(model, batch)
        optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)
    return [a - b.numpy() for a, b in zip(before, model.trainable_variables, strict=True)]


@pytest.mark.parametrize("task", [digits, text])
@pytest.mark.parametrize("micro_batch_size", [8, 16])
def test_accumulation_is_exact(task, micro_batch_size):
    assert_exact(gradients, task, micro_batch_size)


def test_negative_control_mean_of_means():
    assert_mean_of_means_is_wrong(gradients, text)


def test_batch_norm_is_not_exact():
    with pytest.warns(BigBatchWarning, match="normalises? by the micro-batch"):
        ours = gradients(digits_batchnorm, micro_batch_size=8)
    assert gap(ours, gradients(digits_batchnorm)) > 0.01


def test_batches_of_all_sizes_share_one_graph():
    model = model_of(text)
    accumulator = Accumulator(model, keras.optimizers.Adam(1e-3), text.loss, 8, weight=text.weight)
    for (x, y), size in zip(text.batches(64, 0, 0), (64, 53, 9), strict=False):
        accumulator.step((x[:size], y[:size]))
    assert accumulator.num_traces == 1


@pytest.mark.parametrize("name", TASKS)
def test_batches(name):
    assert_batches(TASKS[name], DATASETS[name]())


def test_weight_is_the_number_of_predicted_bytes():
    x, y = ragged(text)
    assert int(text.weight((x, y))) == int((y != data.IGNORED).sum()) < y.size


def test_text_model_does_not_look_ahead():
    x, _ = ragged(text)
    assert_does_not_look_ahead(model_of(text).predict_on_batch, x)


def test_untrained_scores():
    assert_untrained_scores(TASKS, model_of, most_bits=10.0)
