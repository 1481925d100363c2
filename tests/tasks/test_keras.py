import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import pytest
from keras import ops

from bigbatch import BigBatchWarning
from bigbatch.keras import accumulate
from bigbatch.tasks import data
from bigbatch.tasks.keras import digits, digits_batchnorm, text

from .checks import DATASETS, assert_batches, assert_does_not_look_ahead, assert_untrained_scores, gap, ragged

TASKS = {"digits": digits, "digits_batchnorm": digits_batchnorm, "text": text}

# Keras 3.15 with NumPy 2
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword")


@pytest.fixture(autouse=True)
def one_thread():
    """The models are small, so threads would only wait for each other."""
    if keras.backend.backend() == "torch":
        import torch

        torch.set_num_threads(1)


def model_of(task):
    keras.utils.set_random_seed(0)
    return task.model()


def gradients(task, micro_batch_size=None, loss=None):
    """The gradient of one ragged batch, taken from a step of SGD in fit."""
    model = model_of(task)
    before = [ops.convert_to_numpy(v) for v in model.trainable_variables]
    accumulate(model, micro_batch_size)
    model.compile(keras.optimizers.SGD(1.0), loss or task.loss)
    x, y = ragged(task)
    model.fit(x, y, batch_size=len(x), epochs=1, shuffle=False, verbose=0)
    return [a - ops.convert_to_numpy(b) for a, b in zip(before, model.trainable_variables, strict=True)]


@pytest.mark.parametrize("task", [digits, text])
def test_accumulation_is_exact(task):
    assert gap(gradients(task, 8), gradients(task)) < 1e-5


def test_negative_control_mean_of_means():
    """The result of a loss that is a mean over bytes without a sample weight."""

    def mean(y_true, y_pred):
        return text.loss(y_true, y_pred)

    with pytest.warns(BigBatchWarning, match="the loss mean is neither a mean nor a sum over samples"):
        ours = gradients(text, 8, mean)
    assert gap(ours, gradients(text)) > 0.01


def test_batch_norm_is_not_exact():
    with pytest.warns(BigBatchWarning, match="normalises? by the micro-batch"):
        ours = gradients(digits_batchnorm, 8)
    assert gap(ours, gradients(digits_batchnorm)) > 0.01


@pytest.mark.parametrize("name", TASKS)
def test_batches(name):
    assert_batches(TASKS[name], DATASETS[name]())


@pytest.mark.parametrize("name", TASKS)
def test_batches_suit_fit(name):
    task = TASKS[name]
    model = model_of(task)
    model.compile("sgd", task.loss)
    x, y = ragged(task)
    assert isinstance(x, np.ndarray)
    assert isinstance(y, np.ndarray)
    assert np.isfinite(model.train_on_batch(x, y))


def test_text_model_does_not_look_ahead():
    x, _ = ragged(text)
    assert_does_not_look_ahead(model_of(text).predict_on_batch, x)


def test_untrained_scores():
    assert_untrained_scores(TASKS, model_of, most_bits=10.0)


def test_the_score_is_the_loss_in_bits():
    model = model_of(text)
    x, y = data.text().held_out.rows(slice(None))
    nats = float(text.loss(y, model.predict(x, batch_size=128, verbose=0)))
    assert text.evaluate(model)["bits_per_byte"] == pytest.approx(nats / np.log(2.0), rel=1e-5)
