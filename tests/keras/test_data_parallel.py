"""keras.distribution on the jax backend: each device works on its own part of the batch."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import distribution, layers, losses
from keras.src.backend.jax.trainer import _distribute_data

from bigbatch.keras import accumulate

from ..collectives import collectives
from .cases import gap, sgd
from .test_windows import Feed

SIZE = 24
draw = np.random.default_rng(0)
X, Y, WEIGHT = draw.normal(size=(SIZE, 3)), draw.normal(size=(SIZE, 2)), draw.uniform(0, 3, SIZE)
WEIGHT[:6] = 0  # all samples of the first of four devices
TEXT = np.where(np.arange(8) < draw.integers(1, 9, (SIZE, 1)), draw.integers(1, 7, (SIZE, 8)), 0)


@pytest.fixture(autouse=True)
def one_device():
    yield
    distribution.set_distribution(None)


def mlp(*between: Any) -> Any:
    return keras.Sequential([keras.Input((3,)), layers.Dense(5, "tanh"), *between, layers.Dense(2)])


def text() -> Any:
    """Texts whose masks leave a different number of tokens on every device."""
    embedding = layers.Embedding(7, 4, mask_zero=True)
    return keras.Sequential([keras.Input((8,), dtype="int32"), embedding, layers.SimpleRNN(3, return_sequences=True)])


def two_outputs() -> Any:
    x = keras.Input((3,))
    hidden = layers.Dense(4, "tanh")(x)
    return keras.Model(x, {"a": layers.Dense(2)(hidden), "b": layers.Dense(1)(hidden)})


def by_weight() -> Any:
    return losses.MeanSquaredError(reduction="mean_with_sample_weight")


CASES: dict[str, tuple[Callable[[], Any], dict[str, Any], dict[str, Any]]] = {
    "mean": (mlp, {"x": X, "y": Y}, {"loss": "mse", "metrics": ["mae"]}),
    "a sum": (mlp, {"x": X, "y": Y}, {"loss": lambda: losses.MeanSquaredError(reduction="sum")}),
    "divided by the weights": (
        mlp,
        {"x": X, "y": Y, "sample_weight": WEIGHT},
        {"loss": by_weight, "weighted_metrics": ["mae"]},
    ),
    "a mask": (text, {"x": TEXT, "y": draw.normal(size=(SIZE, 8, 3))}, {"loss": "mse", "metrics": ["mae"]}),
    "two outputs": (two_outputs, {"x": X, "y": {"a": Y, "b": Y[:, :1]}}, {"loss": {"a": "mse", "b": "mae"}}),
}


def make(build: Callable[[], Any], micro_batch_size: int | None, **options: Any) -> Any:
    keras.utils.set_random_seed(7)
    model = build()
    if micro_batch_size:
        accumulate(model, micro_batch_size)
    model.compile(sgd(), **{name: option() if callable(option) else option for name, option in options.items()})
    return model


def fit(name: str, micro_batch_size: int | None) -> tuple[Any, dict[str, list[float]]]:
    build, data, options = CASES[name]
    model = make(build, micro_batch_size, **options)
    return model, model.fit(**data, batch_size=SIZE, epochs=2, shuffle=False, verbose=0).history


def share(num_devices: int) -> None:
    distribution.set_distribution(distribution.DataParallel(devices=distribution.list_devices()[:num_devices]))


@pytest.mark.parametrize(
    ("name", "num_devices", "micro_batch_size"),
    [("mean", 4, 20), ("a sum", 4, 3), ("divided by the weights", 4, 8), ("a mask", 4, 16), ("two outputs", 2, 11)],
)
@pytest.mark.usefixtures("float64")
def test_exact(name: str, num_devices: int, micro_batch_size: int) -> None:
    """Sizes that divide evenly, with a rest, unevenly, and sizes below the number of devices."""
    plain = fit(name, None)
    share(num_devices)
    assert gap(fit(name, micro_batch_size), plain) < 1e-12


def reductions(model: Any) -> tuple[dict[str, int], dict[str, int]]:
    """The collectives of a step, outside of loops and inside."""
    state = model._get_jax_state(True, True, True, True)
    return collectives(model.train_step, state, _distribute_data((X, Y, None)))


def test_one_reduction_outside_of_the_loop() -> None:
    share(4)
    model = make(lambda: mlp(layers.Dropout(0.5)), 8, loss="mse", metrics=["mae"])
    model.train_on_batch(X, Y)
    assert reductions(model) == ({"all-reduce": 1}, {})


def fit_one_way(build: Callable[[], Any], x: Any = X, y: Any = Y) -> tuple[Any, dict[str, list[float]]]:
    model = make(build, 8, loss="mse")
    return model, model.fit(x, y, batch_size=SIZE, epochs=2, shuffle=False, verbose=0).history


@pytest.mark.filterwarnings("ignore:1 BatchNormalization layer:bigbatch.BigBatchWarning")
def test_batch_normalization_sees_whole_micro_batches() -> None:
    """Statistics are over all devices, which communicate in every micro-batch but do not gather the batch."""

    def build() -> Any:
        return mlp(layers.BatchNormalization())

    order = np.arange(SIZE).reshape(4, 3, 2).swapaxes(0, 1).ravel()  # a micro-batch has 2 samples from each device
    plain = fit_one_way(build, X[order], Y[order])
    share(4)
    ours = fit_one_way(build)
    assert gap(ours, plain) < 1e-6
    outside, inside = reductions(ours[0])
    assert inside["all-reduce"] > 0
    assert "all-gather" not in outside | inside


@pytest.mark.filterwarnings("ignore:1 BatchNormalization layer:bigbatch.BigBatchWarning")
def test_nobody_gathers_a_shorter_last_micro_batch() -> None:
    """Of 6 samples on each device 4 come first and 2 are left."""
    share(4)
    model = make(lambda: mlp(layers.BatchNormalization()), 16, loss="mse")
    model.train_on_batch(X, Y)
    outside, inside = reductions(model)
    assert "all-gather" not in outside | inside


def test_model_parallel() -> None:
    plain = fit_one_way(mlp)
    mesh = distribution.DeviceMesh((2, 2), ("batch", "model"), distribution.list_devices())
    layout = distribution.LayoutMap(mesh)
    layout["dense_1.*kernel"] = (None, "model")
    distribution.set_distribution(distribution.ModelParallel(layout_map=layout, batch_dim_name="batch"))
    assert gap(fit_one_way(mlp), plain) < 1e-6


def test_devices_draw_different_dropout_masks() -> None:
    """With the same mask on all four, every gradient would be 0 or 2."""
    share(4)
    between = [layers.Dropout(0.5), layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
    model = accumulate(keras.Sequential([keras.Input((64,)), *between]), 4)
    model.compile(keras.optimizers.SGD(1.0), loss=lambda y_true, y_pred: y_pred[:, 0] * 1.0)
    for step in (1, 2):
        before = model.get_weights()[0]
        model.train_on_batch(np.ones((4, 64)), np.ones(4))
        gradient = before - model.get_weights()[0]
        assert set(np.unique(gradient)) > {0.5, 1.0}
        assert model.layers[0].seed_generator.state.numpy()[1] == step


@pytest.mark.usefixtures("float64")
def test_windows() -> None:
    """Micro-batches of 8, 4 and 12 samples, each split over the devices."""
    data = [(X[a:b], Y[a:b]) for a, b in ((0, 8), (8, 12), (12, 24))]
    plain = fit("mean", None)
    share(4)
    model = make(mlp, None, loss="mse", metrics=["mae"])
    accumulate(model, accumulation_steps=3)
    history = model.fit(Feed(data), epochs=2, shuffle=False, verbose=0).history
    assert gap((model, history), plain) < 1e-12
