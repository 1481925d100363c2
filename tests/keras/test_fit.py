"""fit works as without bigbatch: its inputs, its callbacks, and saving."""

import importlib
import sys

import keras
import numpy as np
import pytest
from keras import layers, ops

from bigbatch import BatchError
from bigbatch.keras import accumulate

from .cases import BATCH_SIZE, NUM_SAMPLES, compiled, fitted, gap, images, plain_digits

BACKEND = keras.backend.backend()


# --- inputs of fit -------------------------------------------------------------------------------------


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


@pytest.mark.compiled
@pytest.mark.parametrize("name", FEEDS)
def test_feeds(name):
    feed, options = FEEDS[name]
    assert gap(fitted(compiled(), feed(), **options), plain_digits()) < 1e-5


@pytest.mark.any_backend
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


@pytest.mark.parametrize("kind", ["sample_weight", "class_weight"])
def test_train_on_batch_with_weights(kind):
    x, y = batches()[0]
    weights = {"sample_weight": np.linspace(0, 2, len(x)), "class_weight": {i: i / 4 for i in range(10)}}[kind]
    ours, plain = compiled(metrics=None), compiled(None, metrics=None)
    for _ in range(2):
        logs = [model.train_on_batch(x, y, **{kind: weights}, return_dict=True) for model in (ours, plain)]
        assert float(logs[0]["loss"]) == pytest.approx(float(logs[1]["loss"]), rel=1e-5)
    for now, then in zip(ours.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(now, then, rtol=1e-4, atol=1e-6)


def test_inputs_whose_axes_do_not_match():
    a, b = keras.Input((2,), name="a"), keras.Input((2,), name="b")
    model = keras.Model({"a": a, "b": b}, layers.Dense(1)(layers.concatenate([a, b])))
    accumulate(model, 2).compile(keras.optimizers.SGD(0.1), "mse")

    def feed(num):
        return {"a": np.ones((4, 2), "float32"), "b": np.ones((num, 2), "float32")}, np.ones((4, 1), "float32")

    model.train_on_batch(*feed(4))
    before = [np.array(value) for value in model.get_weights()]
    with pytest.raises(Exception, match=r"samples but|another number of samples|incompatible|must"):
        model.train_on_batch(*feed(8))
    for now, then in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(now, then)


@pytest.mark.compiled
@pytest.mark.each_value
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("nums", [(5, 11), (11, 5), (11, 1), (6, 3)])
def test_a_batch_whose_axes_do_not_match(nums, is_first):
    """Cut by the rows of x, surplus rows of y would be left out silently."""
    model = compiled(4, metrics=None)
    x, y = batches()[0]
    if not is_first:
        model.train_on_batch(x, y)
        model.train_on_batch(x[:4], y[:4])  # TensorFlow makes one graph for all sizes
    before = [np.array(value) for value in model.get_weights()]
    with pytest.raises(Exception, match=r"samples but y has|another number of samples|incompatible|must"):
        model.train_on_batch(np.resize(x, (nums[0], *x.shape[1:])), np.resize(y, (nums[1], *y.shape[1:])))
    for now, then in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(now, then)


@pytest.mark.skipif(BACKEND == "tensorflow", reason="in a graph an empty batch is a step that changes nothing")
def test_an_empty_batch():
    model = compiled()
    x, y = batches()[0]
    model.train_on_batch(x, y)
    with pytest.raises(BatchError, match="x has 0 samples"):
        model.train_on_batch(x[:0], y[:0])


@pytest.mark.compiled
def test_convolution_and_dropout_train():
    """Dropout draws different numbers than on the full batch, so this tests only that the model learns."""

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
    """Equal samples in separate micro-batches; with the same masks their outputs would be equal."""

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
    _, history = fitted(
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


def test_a_saved_model_opens_without_bigbatch(tmp_path, monkeypatch):
    model, _ = fitted(compiled(), **images()(), batch_size=BATCH_SIZE)
    model.save(tmp_path / "model.keras")
    expected = model.predict(images()()["x"][:5], verbose=0)
    for name in [name for name in sys.modules if name.partition(".")[0] == "bigbatch"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError):
        importlib.import_module("bigbatch.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert np.allclose(again.predict(images()()["x"][:5], verbose=0), expected, atol=1e-6)
    again.fit(**images()(), verbose=0)
    assert again.optimizer.iterations.numpy() == 6 + 4


def test_loaded_model_continues(tmp_path):
    """Two epochs, saving, loading, and two more epochs give the result of four epochs."""
    options = {**images()(), "batch_size": BATCH_SIZE}
    model, _ = fitted(compiled(), **options)
    model.save(tmp_path / "model.keras")
    again = accumulate(keras.models.load_model(tmp_path / "model.keras"), 16)
    fitted(again, **options)
    straight, _ = plain_digits(epochs=4)
    assert gap((again, {}), (straight, {})) < 1e-5
