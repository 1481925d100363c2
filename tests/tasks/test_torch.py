import numpy as np
import pytest
import torch

from bigbatch import BigBatchWarning
from bigbatch.tasks import data
from bigbatch.tasks.torch import digits, digits_batchnorm, text
from bigbatch.torch import Accumulator

from .checks import (
    DATASETS,
    assert_batches,
    assert_exact,
    assert_held_out_is_new,
    assert_mean_of_means_is_wrong,
    assert_missing_scikit_learn,
    assert_text_is_ragged,
    assert_untrained_scores,
    gap,
    ragged,
)

TASKS = {"digits": digits, "digits_batchnorm": digits_batchnorm, "text": text}


@pytest.fixture(autouse=True)
def one_thread():
    """The models are small, so threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def model_of(task):
    torch.manual_seed(0)
    return task.model()


def gradients(task, **options):
    """The gradient of one ragged batch, accumulated or of the full batch, taken from a step of SGD."""
    model = model_of(task)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    batch = ragged(task)
    if options:
        Accumulator(model, optimizer, task.loss, **options).step(batch)
    else:
        task.loss(model, batch).backward()
        optimizer.step()
    return [(a - b.detach()).numpy() for a, b in zip(before, model.parameters(), strict=True)]


@pytest.mark.parametrize("task", [digits, text])
@pytest.mark.parametrize("micro_batch_size", [1, 8, 16])
def test_accumulation_is_exact(task, micro_batch_size):
    assert_exact(gradients, task, micro_batch_size)


def test_negative_control_mean_of_means():
    assert_mean_of_means_is_wrong(gradients, text)


def test_batch_norm_is_not_exact():
    with pytest.warns(BigBatchWarning, match="normalises? by the micro-batch"):
        ours = gradients(digits_batchnorm, micro_batch_size=8)
    assert gap(ours, gradients(digits_batchnorm)) > 0.01


@pytest.mark.parametrize("name", TASKS)
def test_batches(name):
    assert_batches(TASKS[name], DATASETS[name]())


@pytest.mark.parametrize("dataset", [data.digits, data.text])
def test_held_out_is_new(dataset):
    assert_held_out_is_new(dataset())


def test_text_is_ragged():
    assert_text_is_ragged()


def test_weight_is_the_number_of_predicted_bytes():
    x, y = ragged(text)
    assert text.weight((x, y)) == int((y != data.IGNORED).sum()) < y.numel()


def test_text_model_does_not_look_ahead():
    model = model_of(text)
    x, _ = ragged(text)
    changed = x.clone()
    changed[:, 20:] = 7
    assert torch.allclose(model(x)[:, :20], model(changed)[:, :20], atol=1e-5)
    assert not torch.allclose(model(x)[:, 20:], model(changed)[:, 20:], atol=1e-2)


def test_untrained_scores():
    assert_untrained_scores(TASKS, model_of, most_bits=9.0)


@pytest.mark.parametrize("name", TASKS)
def test_evaluate_changes_nothing(name):
    model = model_of(TASKS[name])
    before = {key: value.clone() for key, value in model.state_dict().items()}
    TASKS[name].evaluate(model)
    assert model.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_model_with_uniform_predictions_scores_eight_bits():
    nothing = data.bits_per_byte(lambda x: np.zeros((*x.shape, data.NUM_BYTES)))
    assert nothing == pytest.approx(8.0)


def test_missing_scikit_learn():
    assert_missing_scikit_learn()


# --- quality: the defaults reach the promised scores --------------------------------------------------


def train(task, seed, epochs=None):
    torch.manual_seed(seed)
    model = task.model()
    options = task.defaults
    make_optimizer = getattr(task, "optimizer", None)
    lr = options["lr"]
    optimizer = make_optimizer(model, lr) if make_optimizer else torch.optim.AdamW(model.parameters(), lr)
    weight = getattr(task, "weight", None)
    accumulator = Accumulator(model, optimizer, task.loss, options["micro_batch_size"], weight=weight)
    for epoch in range(epochs or options["epochs"]):
        for batch in task.batches(options["batch_size"], epoch, seed):
            accumulator.step(batch)
    return task.evaluate(model)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_digits_are_learnt(seed):
    assert train(digits, seed)["accuracy"] >= 0.97


@pytest.mark.filterwarnings("ignore::bigbatch.BigBatchWarning")
def test_digits_are_learnt_with_batch_norm():
    assert train(digits_batchnorm, 0)["accuracy"] >= 0.97


def test_text_is_learnt():
    assert train(text, 0, epochs=1)["bits_per_byte"] < 4.5
