"""Natural mistakes are answered with what to write; an accumulator prints readably."""

import inspect

import keras
import pytest
import tensorflow as tf

import bigbatch.tensorflow
from bigbatch import BatchError, OptionError
from bigbatch.tensorflow import Accumulator, train_with_accumulation, verify

from .training import sgd


def make_model() -> keras.Model:
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])


def make_batch() -> tuple[tf.Tensor, tf.Tensor]:
    return tf.random.normal((5, 3)), tf.random.normal((5, 2))


def loss(model: keras.Model, batch: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
    return tf.reduce_mean(tf.square(model(batch[0]) - batch[1]))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("gradient_accumulation_steps", "or accumulation_steps if you feed micro-batches"),
        ("global_clipnorm", r"did you mean clip_norm\?"),
        ("micro_batchsize", r"did you mean micro_batch_size\?"),
        ("verbose", "its options are model, optimizer, loss, micro_batch_size, "),
    ],
)
def test_an_option_of_another_library_is_answered_with_ours(name: str, told: str) -> None:
    with pytest.raises(OptionError, match=f"Accumulator has no option {name}: .*{told}"):
        Accumulator(make_model(), sgd(), loss, **{name: 4})
    with pytest.raises(OptionError, match=f"Accumulator has no option {name}: .*{told}"):
        train_with_accumulation(make_model(), [], sgd(), loss, 4, **{name: 4})
    with pytest.raises(OptionError, match=f"verify has no option {name}: "):
        verify(make_model(), make_batch(), loss, 2, **{name: 4})
    assert "clip_norm" in inspect.signature(Accumulator.__init__).parameters


def test_the_parts_of_a_batch_are_to_be_one_argument() -> None:
    with pytest.raises(BatchError, match=r"step\(\) got 2 arguments: .* pass step\(\(x, y\)\)"):
        Accumulator(make_model(), sgd(), loss, 2).step(*make_batch())
    with pytest.raises(BatchError, match=r"gradients\(\) got 2 arguments: .* pass gradients\(\(x, y\)\)"):
        Accumulator(make_model(), sgd(), loss, 2).gradients(*make_batch())


@pytest.mark.parametrize("criterion", [keras.losses.MeanSquaredError(), keras.losses.mean_squared_error])
def test_a_criterion_is_answered_with_the_lambda_to_write(criterion: object) -> None:
    with pytest.raises(OptionError, match="which compares predictions with targets") as caught:
        Accumulator(make_model(), sgd(), criterion, 2)
    with pytest.raises(OptionError, match="which compares predictions with targets"):
        verify(make_model(), make_batch(), criterion, 2)
    written = "lambda" + str(caught.value).partition("loss=lambda")[2]
    names = {"MeanSquaredError": keras.losses.MeanSquaredError, "mean_squared_error": keras.losses.mean_squared_error}
    value = eval(written, names)(make_model(), make_batch())
    assert value.shape[1:] == ()


def test_model_and_optimizer_the_wrong_way_round() -> None:
    with pytest.raises(OptionError, match="model is a SGD, an optimizer: the model comes first"):
        Accumulator(sgd(), make_model(), loss, 2)


def test_repr_shows_what_is_not_at_its_default() -> None:
    model = make_model()
    accumulator = Accumulator(model, sgd(), loss, 2, clip_norm=1.0)
    assert (
        repr(accumulator) == "Accumulator(Sequential, SGD, loss=loss, micro_batch_size=2, clip_norm=1.0) after 0 steps"
    )
    accumulator.step(make_batch())
    assert repr(accumulator).endswith("after 1 step")


def test_names_of_other_frameworks_say_what_to_use() -> None:
    for name, told in (
        ("value_and_grad", "gradients"),
        ("multi_steps", "micro_batch"),
        ("windows", "from bigbatch"),
    ):
        with pytest.raises(ImportError, match=rf"bigbatch\.tensorflow has no {name}: .*{told}"):
            getattr(bigbatch.tensorflow, name)
    assert not hasattr(bigbatch.tensorflow, "nothing")
