"""All else about fit stays as it is: what it is fed, what callbacks see, what is saved."""

import subprocess
import sys
import warnings

import keras
import numpy as np
import pytest
from keras import layers, ops

from bigbatch import BigBatchWarning, LossError, OptionError
from bigbatch.keras import accumulate

from .cases import BATCH_SIZE, CASES, NUM_SAMPLES, Subclassed, entropy, gap, images, mlp, sgd

BACKEND = keras.backend.backend()
DIGITS = CASES[0]


def compiled(micro_batch_size: int | None = 16, build=mlp, **options):
    keras.utils.set_random_seed(7)
    model = build()
    if micro_batch_size:
        accumulate(model, micro_batch_size)
    model.compile(**{"optimizer": sgd(), **entropy()(), **options})
    return model


def fitted(model, *args, **options):
    return model, model.fit(*args, **{"epochs": 2, "verbose": 0, "shuffle": False, **options}).history


# --- what fit is fed -------------------------------------------------------------------------------------


def batches():
    x, y = images()().values()
    return [(x[i : i + BATCH_SIZE], y[i : i + BATCH_SIZE]) for i in range(0, NUM_SAMPLES, BATCH_SIZE)]


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return len(batches())

    def __getitem__(self, index):
        return batches()[index]


def generator():
    while True:
        yield from batches()


def tf_dataset():
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(tuple(images()().values())).batch(BATCH_SIZE)


def data_loader():
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    tensors = [torch.tensor(array) for array in images()().values()]
    return DataLoader(TensorDataset(*tensors), batch_size=BATCH_SIZE)


FEEDS = {
    "a generator": (generator, {"steps_per_epoch": 3}),
    "a PyDataset": (lambda: Batches(), {}),
    "a tf.data.Dataset": (tf_dataset, {}),
    "a torch DataLoader": (data_loader, {}),
}


@pytest.mark.parametrize("name", FEEDS)
def test_feeds(name):
    feed, options = FEEDS[name]
    plain = fitted(compiled(None), feed(), **options)
    assert gap(fitted(compiled(), feed(), **options), plain) < 1e-5


def test_fit_with_validation_and_evaluate():
    options = {**images()(), "batch_size": BATCH_SIZE, "validation_split": 0.2}
    ours, plain = fitted(compiled(), **options), fitted(compiled(None), **options)
    assert "val_accuracy" in plain[1]
    assert gap(ours, plain) < 1e-5
    scores = [model.evaluate(**images()(), batch_size=10, verbose=0) for model in (ours[0], plain[0])]
    assert np.allclose(*scores, rtol=1e-5)
    x = images()()["x"]
    assert np.allclose(*(model.predict(x, verbose=0) for model in (ours[0], plain[0])), rtol=1e-4, atol=1e-5)


def test_train_on_batch():
    x, y = batches()[0]
    logs = [[model.train_on_batch(x, y, return_dict=True) for _ in range(3)] for model in (compiled(), compiled(None))]
    for ours, plain in zip(*logs, strict=True):
        assert {name: pytest.approx(float(value), rel=1e-5) for name, value in plain.items()} == ours


def test_convolution_and_dropout_train():
    """Dropout draws other numbers than the full batch would, so here only that it learns."""

    def build():
        return keras.Sequential(
            [
                layers.Input((64,)), layers.Reshape((8, 8, 1)), layers.Conv2D(8, 3, activation="relu"),
                layers.Flatten(), layers.Dropout(0.2), layers.Dense(10),
            ]
        )  # fmt: skip

    model = compiled(build=build, optimizer=keras.optimizers.Adam(1e-2))
    _, history = fitted(model, **images()(), batch_size=BATCH_SIZE, epochs=25)
    assert history["loss"][-1] < history["loss"][0] / 2


def spread(y_true, y_pred):
    return ops.std(y_pred, axis=0)


def test_dropout_differs_from_micro_batch_to_micro_batch():
    """Equal samples, a micro-batch each: were the numbers the same, so would be the outputs."""

    def build():
        return keras.Sequential([layers.Input((64,)), layers.Dropout(0.5), layers.Dense(1, kernel_initializer="ones")])

    model = compiled(1, build=build, loss="mse", metrics=[spread])
    _, history = fitted(model, np.ones((4, 64)), np.ones((4, 1)), epochs=1)
    assert history["spread"][0] > 1


# --- callbacks and saving --------------------------------------------------------------------------------


def test_callbacks_see_steps(tmp_path):
    rates, ends = [], []
    path = tmp_path / "best.keras"
    callbacks = keras.callbacks
    model, history = fitted(
        compiled(),
        **images()(),
        batch_size=BATCH_SIZE,
        epochs=50,
        callbacks=[
            callbacks.LearningRateScheduler(lambda epoch, rate: rates.append(rate) or 0.05 / (epoch + 1)),
            callbacks.LambdaCallback(on_train_batch_end=lambda step, logs: ends.append((step, sorted(logs)))),
            callbacks.ModelCheckpoint(path, monitor="loss", save_best_only=True),
            callbacks.EarlyStopping(monitor="loss", min_delta=1e3, patience=2),
            *([callbacks.TensorBoard(tmp_path / "logs", update_freq=1)] if BACKEND == "tensorflow" else []),
        ],
    )
    assert ends == [(step, ["accuracy", "loss"]) for _ in range(3) for step in range(3)]
    assert len(rates) == 3
    assert history["learning_rate"] == pytest.approx([0.05, 0.025, 0.05 / 3])
    assert path.exists()
    assert (tmp_path / "logs").exists() or BACKEND != "tensorflow"


def test_a_saved_model_opens_without_bigbatch(tmp_path):
    model, _ = fitted(compiled(), **images()(), batch_size=BATCH_SIZE)
    path = tmp_path / "model.keras"
    model.save(path)
    expected = model.predict(images()()["x"][:5], verbose=0)
    np.save(tmp_path / "x.npy", images()()["x"])
    np.save(tmp_path / "y.npy", images()()["y"])
    code = f"""
import sys
sys.modules["bigbatch"] = None
import keras, numpy as np
model = keras.models.load_model({str(path)!r})
x, y = np.load({str(tmp_path / "x.npy")!r}), np.load({str(tmp_path / "y.npy")!r})
np.save({str(tmp_path / "out.npy")!r}, model.predict(x[:5], verbose=0))
model.fit(x, y, verbose=0)
assert model.optimizer.iterations.numpy() == 6 + 4, model.optimizer.iterations
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=300)
    assert np.allclose(np.load(tmp_path / "out.npy"), expected, atol=1e-6)


def test_a_loaded_model_goes_on(tmp_path):
    """Saved after two epochs, loaded, accumulated again: the same as four in one go."""
    options = {**images()(), "batch_size": BATCH_SIZE}
    model, _ = fitted(compiled(), **options)
    model.save(tmp_path / "model.keras")
    again = accumulate(keras.models.load_model(tmp_path / "model.keras"), 16)
    fitted(again, **options)
    straight, _ = fitted(compiled(None), **options, epochs=4)
    assert gap((again, {}), (straight, {})) < 1e-5


# --- accumulate itself -----------------------------------------------------------------------------------


def test_compile_may_come_before():
    plain = fitted(compiled(None), **images()(), batch_size=BATCH_SIZE)
    model = compiled(None)
    accumulate(model, 16)
    assert gap(fitted(model, **images()(), batch_size=BATCH_SIZE), plain) < 1e-5


def count_calls(build=mlp):
    """A model that notes the sizes that it is traced with."""
    sizes = []

    class Noting(layers.Layer):
        def call(self, x):
            sizes.append(x.shape[0])
            return x

    return keras.Sequential([layers.Input((64,)), Noting(), layers.Dense(10)]), sizes


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
    with pytest.raises(OptionError, match="micro_batch_size is .*: pass a whole number of at least 1"):
        accumulate(mlp(), size)


def test_no_model():
    with pytest.raises(OptionError, match="got a Dense, which is no keras.Model"):
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
        fitted(compiled(build=build), *batches()[0], batch_size=BATCH_SIZE)


def test_batch_normalization_is_told_once():
    def build():
        return keras.Sequential([layers.Input((64,)), layers.BatchNormalization(name="bn_1"), layers.Dense(10)])

    model = compiled(build=build)
    with pytest.warns(BigBatchWarning, match=r"1 BatchNormalization layer \(bn_1\) normalise"):
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
    """Is taken to be a mean over samples, with a warning, and cannot be weighted."""
    options = {**images()(), "batch_size": BATCH_SIZE}
    model = compiled(loss=mean_of_all)
    with pytest.warns(BigBatchWarning, match="mean_of_all returns one number for all samples"):
        ours = fitted(model, **options)
    assert gap(ours, fitted(compiled(None, loss=mean_of_all), **options)) < 1e-5
    with pytest.raises(LossError, match="sample_weight cannot weight them"):
        fitted(compiled(loss=mean_of_all), **options, class_weight={i: 1.0 + i for i in range(10)})


@pytest.mark.parametrize("loss", [keras.losses.Dice(), keras.losses.Tversky(), keras.losses.Circle()], ids=lambda x: x.name)
def test_losses_that_couple_samples(loss):
    y = np.eye(10, dtype="float32")[images()()["y"]] if loss.name != "circle" else images()()["y"]
    with pytest.raises(LossError, match="cannot be cut"):
        fitted(compiled(loss=loss, metrics=None), images()()["x"], y)
