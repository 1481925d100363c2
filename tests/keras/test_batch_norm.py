"""BatchNormalization: moving statistics are updated once per step, with those of the whole batch."""

import warnings
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from bigbatch import BigBatchWarning, OptionError
from bigbatch.keras import accumulate, recalibrate

from .cases import images, rows_of
from .test_windows import MICRO, WHOLE, Feed, batches

BACKEND = keras.backend.backend()
ROUNDING = 1e-10 if BACKEND == "tensorflow" else 1e-6  # on the others, Keras 3.15 runs this layer in float32

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*BatchNormalization layer:bigbatch.BigBatchWarning"),
    pytest.mark.usefixtures("float64"),
]


def first() -> Any:
    """The first layer is a BatchNormalization, so its input does not depend on how the batch is cut."""
    return keras.Sequential([layers.Input((64,)), layers.BatchNormalization(momentum=0.7), layers.Dense(10)])


def image() -> Any:
    return keras.Sequential(
        [
            layers.Input((64,)),
            layers.Reshape((8, 4, 2)),
            layers.BatchNormalization(axis=2, momentum=0.7),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


def twice() -> Any:
    """One layer is called twice, and so updated twice by Keras."""
    x = layers.Input((64,))
    norm = layers.BatchNormalization(momentum=0.7)
    return keras.Model(x, layers.Dense(10)(layers.add([norm(x), norm(2 * x + 1)])))


class Late(keras.Model):
    """Makes its layers when it is built."""

    def build(self, shape: Any) -> None:
        self.norm, self.head = layers.BatchNormalization(momentum=0.7), layers.Dense(10)
        self.norm.build(shape)
        self.head.build(shape)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.head(self.norm(x, training=training))


def fit(build: Any, how: str | None, *, data: Any = None, rate: float = 0.01, **options: Any) -> Any:
    """The model after three epochs: plain fit on whole windows, or one of the two ways to accumulate."""
    keras.utils.set_random_seed(7)
    model = build()
    if how is not None:
        accumulate(model, **{"windows": {"accumulation_steps": 4}, "cut": {"micro_batch_size": 5}}[how], **options)
    model.compile(
        keras.optimizers.SGD(rate), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
    )
    sizes = MICRO if how == "windows" else WHOLE
    model.fit(Feed(batches(data or images()(), sizes)), epochs=3, verbose=0, shuffle=False)
    return model


def statistics(model: Any) -> list[np.ndarray]:
    return [
        keras.ops.convert_to_numpy(v)
        for layer in model._flatten_layers()
        if isinstance(layer, layers.BatchNormalization)
        for v in (layer.moving_mean, layer.moving_variance)
    ]


def gap(ours: Any, plain: Any) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(statistics(ours), statistics(plain), strict=True))


BUILDS = [
    first,
    pytest.param(Late, marks=pytest.mark.any_backend),
    pytest.param(image, marks=pytest.mark.any_backend),
    pytest.param(twice, marks=pytest.mark.any_backend),
]


@pytest.mark.each_value
@pytest.mark.parametrize("how", ["cut", "windows"])
@pytest.mark.parametrize("build", BUILDS)
def test_moving_statistics_are_those_of_plain_fit(build: Any, how: str) -> None:
    assert gap(fit(build, how), fit(build, None)) < ROUNDING


@pytest.mark.any_backend
@pytest.mark.parametrize("how", ["cut", "windows"])
def test_negative_control_each_micro_batch(how: str) -> None:
    """batch_norm="micro_batch" is what Keras does by itself."""
    assert gap(fit(first, how, batch_norm="micro_batch"), fit(first, None)) > 0.01


@pytest.mark.any_backend
@pytest.mark.compiled
@pytest.mark.parametrize("how", ["cut", "windows"])
def test_masked_rows(how: str) -> None:
    """Only the rows that count, some micro-batches having none."""

    def build() -> Any:
        x = layers.Input((None, 16))
        h = layers.BatchNormalization(momentum=0.7)(layers.Masking()(x))
        return keras.Model(x, layers.Dense(5)(h))

    lengths = np.array([3, 0, 9, 1, 4, 0, 0, 0, 7, 7, 7, 2, 5, 5, 1, 6, 9, 3, 8])
    data = {"x": rows_of(lengths), "y": np.random.default_rng(3).integers(0, 5, (19, 9))}
    # Keras divides by the number of rows + 1e-7
    assert gap(fit(build, how, data=data), fit(build, None, data=data)) < 1e-6


def deep() -> Any:
    return keras.Sequential(
        [
            layers.Input((64,)), layers.Dense(6, activation="tanh"), layers.BatchNormalization(momentum=0.7),
            layers.Dense(10),
        ]
    )  # fmt: skip


@pytest.mark.any_backend
def test_later_layers_pool_what_they_saw() -> None:
    """Statistics from the recorded activations of all micro-batches; the weights stay as they are."""
    model = fit(deep, "windows", rate=0.0)
    mean, variance = np.zeros(6), np.ones(6)
    for _ in range(3):
        for x, _ in batches(images()(), WHOLE):
            seen = keras.ops.convert_to_numpy(model.layers[0](x))
            mean, variance = 0.7 * mean + 0.3 * seen.mean(0), 0.7 * variance + 0.3 * seen.var(0)
    np.testing.assert_allclose(statistics(model), [mean, variance], rtol=ROUNDING)


class Frozen(keras.Model):
    """As `deep`, with its BatchNormalization in inference mode."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = deep().layers

    def call(self, x: Any) -> Any:
        return self.parts[2](self.parts[1](self.parts[0](x), training=False))


@pytest.mark.any_backend
@pytest.mark.parametrize("how", ["cut", "windows"])
def test_frozen(how: str) -> None:
    """The gradient is that of plain fit with frozen statistics, and gamma and beta are trained."""

    with warnings.catch_warnings():
        warnings.simplefilter("error", BigBatchWarning)
        model = fit(deep, how, batch_norm="frozen")
    np.testing.assert_array_equal(statistics(model), [np.zeros(6), np.ones(6)])
    assert np.abs(keras.ops.convert_to_numpy(model.layers[1].gamma) - 1).max() > 1e-4
    for a, b in zip(model.get_weights(), fit(Frozen, None).get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


# --- recalibrate -----------------------------------------------------------------------------------------


def two_deep() -> Any:
    """The input of the second layer depends on the statistics of the first."""
    norms = [layers.BatchNormalization(name=name) for name in ("one", "two")]
    return keras.Sequential(
        [layers.Input((64,)), layers.Dense(6), norms[0], layers.Dense(5, activation="tanh"), norms[1], layers.Dense(10)]
    )


@pytest.mark.parametrize("batch_size", [1, 7, 117] if BACKEND == "tensorflow" else [7])
def test_recalibrate(batch_size: int) -> None:
    """Against the statistics of the whole data, by hand, whatever the size of the batches."""
    x = images()()["x"]
    model = two_deep()
    weights = [keras.ops.convert_to_numpy(v) for v in model.trainable_variables]
    recalibrate(model, x, batch_size=batch_size)
    first, one, second, two, _ = model.layers
    seen = keras.ops.convert_to_numpy(first(x))
    np.testing.assert_allclose(statistics(model)[:2], [seen.mean(0), seen.var(0)], rtol=ROUNDING, atol=ROUNDING)
    seen = keras.ops.convert_to_numpy(second((seen - seen.mean(0)) / np.sqrt(seen.var(0) + one.epsilon)))
    np.testing.assert_allclose(
        statistics(model)[2:], [seen.mean(0), seen.var(0)], rtol=10 * ROUNDING, atol=10 * ROUNDING
    )
    for a, b in zip(model.trainable_variables, weights, strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(a), b)
    assert "call" not in vars(one) | vars(two)


def test_recalibrate_takes_data_as_fit_does() -> None:
    data = batches(images()(), MICRO)
    models = [two_deep(), two_deep()]
    models[1].set_weights(models[0].get_weights())
    recalibrate(models[0], Feed(data))
    recalibrate(models[1], np.concatenate([x for x, _ in data]))
    assert gap(*models) < 10 * ROUNDING


def test_refused() -> None:
    with pytest.raises(OptionError, match="a generator can be read only once"):
        recalibrate(first(), iter([]))
    with pytest.raises(OptionError, match="calls no BatchNormalization layer"):
        recalibrate(keras.Sequential([layers.Input((64,)), layers.Dense(1)]), images()()["x"])
    with pytest.raises(OptionError, match="batch_norm"):
        accumulate(first(), 4, batch_norm="off")  # type: ignore[arg-type]
