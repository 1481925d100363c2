"""accumulate itself: taken back, changed, refused."""

import warnings

import keras
import numpy as np
import pytest
from keras import layers, ops

from bigbatch import BigBatchWarning, LossError, OptionError
from bigbatch.keras import accumulate

from .cases import BATCH_SIZE, Subclassed, compiled, entropy, fitted, gap, images, mlp, plain_digits, sgd


@pytest.mark.any_backend
def test_compile_may_come_before():
    model = compiled(None)
    accumulate(model, 16)
    assert gap(fitted(model, **images()(), batch_size=BATCH_SIZE), plain_digits()) < 1e-5


def count_calls():
    """A model that notes the sizes that it is traced with."""
    sizes = []

    class Noting(layers.Layer):
        def call(self, x):
            sizes.append(x.shape[0])
            return x

    return keras.Sequential([layers.Input((64,)), Noting(), layers.Dense(10)]), sizes


@pytest.mark.any_backend
def test_again_changes_the_size_and_none_takes_it_back():
    model, sizes = count_calls()
    model.compile(sgd(), **entropy()(), run_eagerly=True)
    x, y = (array[:8] for array in images()().values())

    def seen():
        sizes.clear()
        model.fit(x, y, batch_size=8, verbose=0)
        return max(size for size in sizes if size)

    assert seen() == 8
    accumulate(model, 2)
    assert seen() == 2
    accumulate(model, 4)
    assert seen() == 4
    accumulate(model, None)
    assert seen() == 8
    assert "train_step" not in vars(model)
    accumulate(model, None)  # nothing to take back: nothing happens


def test_the_class_stays_what_it_is():
    model = accumulate(Subclassed(), 16)
    assert type(model) is Subclassed
    assert Subclassed.train_step is keras.Model.train_step
    other = Subclassed()
    assert "train_step" not in vars(other)


def test_compiling_again_with_another_loss():
    options = {**images()(), "batch_size": BATCH_SIZE}
    model = compiled()
    fitted(model, **options)
    model.compile(sgd(), **entropy(None, reduction="sum")(), run_eagerly=True)
    plain = compiled(None)
    fitted(plain, **options)
    plain.compile(sgd(), **entropy(None, reduction="sum")())
    assert gap(fitted(model, **options), fitted(plain, **options)) < 1e-4


# --- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, -1, 2.5, "auto", True, [8]])
def test_sizes_that_are_none(size):
    with pytest.raises(OptionError, match=r"micro_batch_size is .*: pass a whole number of at least 1"):
        accumulate(mlp(), size)


def test_no_model():
    with pytest.raises(OptionError, match=r"is a Dense, which is not a keras\.Model"):
        accumulate(layers.Dense(3), 8)


def test_a_train_step_of_its_own():
    class Own(keras.Model):
        def train_step(self, *args):
            return {}

    with pytest.raises(OptionError, match="Own has a train_step of its own"):
        accumulate(Own(), 8)
    model = mlp()
    model.train_step = lambda *args: {}
    with pytest.raises(OptionError, match="Sequential has a train_step of its own"):
        accumulate(model, 8)


def test_an_optimizer_that_accumulates():
    with pytest.raises(OptionError, match="gradient_accumulation_steps=4"):
        accumulate(compiled(None, optimizer=sgd(gradient_accumulation_steps=4)), 8)
    model = compiled(optimizer=sgd(gradient_accumulation_steps=4))
    with pytest.raises(OptionError, match="gradient_accumulation_steps=4"):
        fitted(model, **images()())


def test_a_stateful_layer():
    def build():
        return keras.Sequential(
            [
                layers.Input((64,), batch_size=BATCH_SIZE), layers.Reshape((8, 8)), layers.SimpleRNN(4, stateful=True),
                layers.Dense(10),
            ]
        )  # fmt: skip

    with pytest.raises(OptionError, match="is stateful"):
        fitted(compiled(build=build), **{k: v[:BATCH_SIZE] for k, v in images()().items()}, batch_size=BATCH_SIZE)


def test_batch_normalization_is_told_once():
    def build():
        return keras.Sequential([layers.Input((64,)), layers.BatchNormalization(name="bn_1"), layers.Dense(10)])

    model = compiled(build=build)
    with pytest.warns(BigBatchWarning, match=r"1 BatchNormalization layer in training mode \(bn_1\) normalises"):
        fitted(model, **images()(), batch_size=BATCH_SIZE)
    with warnings.catch_warnings():
        warnings.simplefilter("error", BigBatchWarning)
        fitted(model, **images()(), batch_size=BATCH_SIZE)


def test_frozen_batch_normalization_is_exact():
    def build():
        model = keras.Sequential([layers.Input((64,)), layers.BatchNormalization(), layers.Dense(10)])
        model.layers[0].trainable = False
        return model

    options = {**images()(), "batch_size": BATCH_SIZE}
    assert gap(fitted(compiled(build=build), **options), fitted(compiled(None, build=build), **options)) < 1e-5


def mean_of_all(y_true, y_pred):
    return ops.mean(ops.square(ops.one_hot(ops.cast(y_true, "int32"), 10) - y_pred))


def test_a_loss_of_one_number():
    """Is found to be a mean over samples, and cannot be weighted."""
    options = {**images()(), "batch_size": BATCH_SIZE}
    model = compiled(loss=mean_of_all)
    assert gap(fitted(model, **options), fitted(compiled(None, loss=mean_of_all), **options)) < 1e-5
    with pytest.raises(LossError, match="sample_weight cannot weight them"):
        fitted(compiled(loss=mean_of_all), **options, class_weight={i: 1.0 + i for i in range(10)})


@pytest.mark.parametrize(
    "loss", [keras.losses.Dice(), keras.losses.Tversky(), keras.losses.Circle()], ids=lambda x: x.name
)
def test_losses_that_couple_samples(loss):
    y = np.eye(10, dtype="float32")[images()()["y"]] if loss.name != "circle" else images()()["y"]
    with pytest.raises(LossError, match="cannot be computed in micro-batches"):
        fitted(compiled(loss=loss, metrics=None), images()()["x"], y)
