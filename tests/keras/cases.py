"""Models with data, fitted with and without accumulation, the same on every backend."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
from keras import layers, losses, ops

from bigbatch.keras import accumulate

from ..problems import IGNORED, digits, tokens

BATCH_SIZE = 53
NUM_SAMPLES = 117  # an epoch is 53 + 53 + 11 samples: batches of different sizes, none of which divides by 16


def floats(array: np.ndarray) -> np.ndarray:
    return array.astype(keras.config.floatx())


@dataclass(frozen=True)
class Case:
    """One problem: `build()` returns the model, `data()` the arguments of fit, `compile` those of compile."""

    name: str
    build: Callable[[], Any]
    data: Callable[[], dict[str, Any]]
    compile: Callable[[], dict[str, Any]]
    micro_batch_size: int = 16
    batch_size: int = BATCH_SIZE
    momentum: float = 0.9
    adds_losses: bool = False
    """Whether layers or regularizers add to the loss."""

    def __repr__(self) -> str:
        return self.name

    def fit(self, micro_batch_size: int | None, **options: Any) -> tuple[Any, dict[str, list[float]]]:
        """Returns the fitted model and its history; options are passed to compile."""
        keras.utils.set_random_seed(7)
        model = self.build()
        if micro_batch_size:
            assert accumulate(model, micro_batch_size) is model
        model.compile(**{"optimizer": sgd(self.momentum), **self.compile(), **options})
        history = model.fit(**self.data(), batch_size=self.batch_size, epochs=3, shuffle=False, verbose=0)
        return model, history.history

    def plain(self) -> tuple[Any, dict[str, list[float]]]:
        """The weights and the history of plain fit. Computed once for all tests."""
        return _plain(self, keras.config.floatx())


@functools.cache
def _plain(case: Case, floatx: str) -> tuple[Any, dict[str, list[float]]]:
    return only_weights(case.fit(None))


def only_weights(fitted: tuple[Any, dict[str, list[float]]]) -> tuple[Any, dict[str, list[float]]]:
    """What `gap` compares, without the model."""
    model, history = fitted
    weights = model.get_weights()
    return SimpleNamespace(get_weights=lambda: weights), history


def sgd(momentum: float = 0.9, **options: Any) -> Any:
    return keras.optimizers.SGD(0.05, momentum, **options)


def gap(ours: tuple[Any, dict], plain: tuple[Any, dict]) -> float:
    """The distance of two fits: weights relative to the largest of each, histories entry by entry."""
    assert ours[1].keys() == plain[1].keys()
    gaps = [0.0]
    for a, b in zip(ours[0].get_weights(), plain[0].get_weights(), strict=True):
        gaps.append(float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-3)))
    for name in plain[1]:
        a, b = np.array(ours[1][name]), np.array(plain[1][name])
        assert a.shape == b.shape
        gaps.append(float((np.abs(a - b) / np.maximum(np.abs(b), 1e-3)).max()))
    assert not np.isnan(gaps).any()
    return max(gaps)


def compiled(micro_batch_size: int | None = 16, build: Any = None, **options: Any) -> Any:
    """A model for digits, accumulated and compiled."""
    keras.utils.set_random_seed(7)
    model = (build or mlp)()
    if micro_batch_size:
        accumulate(model, micro_batch_size)
    model.compile(**{"optimizer": sgd(), **entropy()(), **options})
    return model


def fitted(model: Any, *args: Any, **options: Any) -> tuple[Any, dict[str, list[float]]]:
    """The model after fit, and its history."""
    return model, model.fit(*args, **{"epochs": 2, "verbose": 0, "shuffle": False, **options}).history


@functools.cache
def plain_digits(epochs: int = 2) -> tuple[Any, dict[str, list[float]]]:
    """Plain fit of digits in batches of BATCH_SIZE, computed once for all tests."""
    return only_weights(fitted(compiled(None), **images()(), batch_size=BATCH_SIZE, epochs=epochs))


# --- models ----------------------------------------------------------------------------------------------


def mlp() -> Any:
    return keras.Sequential([layers.Input((64,)), layers.Dense(24, activation="tanh"), layers.Dense(10)])


def unbuilt() -> Any:
    return keras.Sequential([layers.Dense(24, activation="tanh"), layers.Dense(10)])


def regularized() -> Any:
    return keras.Sequential(
        [
            layers.Input((64,)),
            layers.Dense(24, activation="tanh", kernel_regularizer="l2", activity_regularizer="l1"),
            layers.Dense(10, bias_regularizer="l1"),
        ]
    )


class Subclassed(keras.Model):
    """Is built by its first batch and adds its own loss, a mean over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = layers.Dense(24, activation="tanh")
        self.head = layers.Dense(10)

    def call(self, x):
        h = self.hidden(x)
        self.add_loss(0.1 * ops.mean(ops.square(h)))
        return self.head(h)


class OwnLoss(keras.Model):
    """Has its own compute_loss and metric."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = layers.Dense(24, activation="tanh", kernel_regularizer="l2")
        self.head = layers.Dense(10)
        self.tracker = keras.metrics.Mean(name="own")

    def call(self, x, training=False):
        return self.head(self.hidden(x))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        own = ops.mean(ops.square(ops.one_hot(ops.cast(y, "int32"), 10) - y_pred)) + ops.mean(x) * 0.01
        self.tracker.update_state(own, sample_weight=ops.shape(x)[0])
        return own + sum(self.losses)


class OwnMetrics(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.head = layers.Dense(10)
        self.own = keras.metrics.Mean(name="own")

    def call(self, x):
        return self.head(x)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        result = super().compute_metrics(x, y, y_pred, sample_weight)
        self.own.update_state(ops.max(y_pred))  # of the whole batch
        result["own"] = self.own.result()
        return result


def masking() -> Any:
    """A model for rows of features that are zero where padded."""
    x = layers.Input((None, 16))
    h = layers.Masking()(x)
    h = layers.SimpleRNN(8, return_sequences=True, unroll=False)(h)
    return keras.Model(x, layers.Dense(5)(h))


def masked_rows() -> Any:
    return keras.Sequential([layers.Input((None, 16)), layers.Masking(), layers.Dense(5)])


def masked_and_regularized() -> Any:
    return keras.Sequential(
        [
            layers.Input((None, 16)), layers.Masking(),
            layers.Dense(8, activation="tanh", activity_regularizer="l2"), layers.Dense(5),
        ]
    )  # fmt: skip


class Stacked(layers.Layer):
    """A layer whose gradients are parts of one tensor on torch."""

    def build(self, shape: Any) -> None:
        self.positions = self.add_weight(shape=(1, 2, shape[-1]), name="positions")
        self.a, self.b = (self.add_weight(shape=(shape[-1],), name=name) for name in "ab")

    def call(self, x: Any) -> Any:
        tokens = ops.concatenate([ops.reshape(self.a, (1, -1)), ops.reshape(self.b, (1, -1))])
        return ops.tanh(ops.matmul(x, ops.transpose(tokens + ops.squeeze(self.positions, 0))))


def stacked() -> Any:
    return keras.Sequential([layers.Input((64,)), Stacked(), layers.Dense(10)])


def embedding() -> Any:
    return keras.Sequential([layers.Input((60,)), layers.Embedding(128, 12, mask_zero=True), layers.Dense(128)])


def language() -> Any:
    return keras.Sequential([layers.Input((60,)), layers.Embedding(128, 12), layers.Dense(128)])


def two_outputs() -> Any:
    """Two inputs; one output with a mask, per row of features, and one without, per sample."""
    rows, image = layers.Input((None, 16), name="rows"), layers.Input((64,), name="image")
    h = layers.Masking()(rows)
    h = layers.Dense(8, activation="tanh")(h)
    pooled = layers.GlobalAveragePooling1D()(layers.Dense(8, activation="tanh")(rows))  # no mask: it may be empty
    joined = layers.Concatenate()([pooled, layers.Dense(8, activation="tanh")(image)])
    outputs = {"token": layers.Dense(5, name="token")(h), "digit": layers.Dense(10, name="digit")(joined)}
    return keras.Model({"rows": rows, "image": image}, outputs)


def listed() -> Any:
    """Two outputs in a list."""
    x = layers.Input((64,))
    h = layers.Dense(12, activation="tanh")(x)
    return keras.Model(x, [layers.Dense(10, name="digit")(h), layers.Dense(1, name="mean")(h)])


# --- data ------------------------------------------------------------------------------------------------


def images(**more: Any) -> Callable[[], dict[str, Any]]:
    def data() -> dict[str, Any]:
        x, y = digits()
        return {"x": floats(x[:NUM_SAMPLES]), "y": y[:NUM_SAMPLES], **{k: v() for k, v in more.items()}}

    return data


def sample_weight() -> np.ndarray:
    """Weights from 0 to 3. A third are zero, and all those of samples 16 to 31, so one micro-batch has weight zero."""
    weight = np.random.default_rng(0).uniform(0, 3, NUM_SAMPLES)
    weight[::3] = weight[16:32] = 0
    return floats(weight)


def rows_of(lengths: np.ndarray, width: int = 9) -> np.ndarray:
    x = np.random.default_rng(1).normal(size=(len(lengths), width, 16))
    x[np.arange(width)[None] >= lengths[:, None]] = 0
    return floats(x)


def lengths() -> np.ndarray:
    """The number of rows that count; zero for samples 16 to 31."""
    found = np.random.default_rng(2).integers(0, 10, NUM_SAMPLES)
    found[16:32] = 0
    return found


def rows() -> dict[str, Any]:
    return {"x": rows_of(lengths()), "y": np.random.default_rng(3).integers(0, 5, (NUM_SAMPLES, 9))}


def weighted_rows() -> dict[str, Any]:
    return {**rows(), "sample_weight": floats(np.random.default_rng(4).uniform(0, 2, (NUM_SAMPLES, 9)))}


def text() -> dict[str, Any]:
    batch = tokens(3, 60, 0, 40, 21, 17, 60, 1, 5, 0, 0, 33, 59)
    return {"x": batch["x"], "y": batch["y"]}


def masked_text() -> dict[str, Any]:
    batch = text()
    return {"x": batch["x"], "y": np.maximum(batch["y"], 0)}


def both() -> dict[str, Any]:
    x, y = digits()
    found = rows()
    return {
        "x": {"rows": found["x"], "image": floats(x[:NUM_SAMPLES])},
        "y": {"token": found["y"], "digit": y[:NUM_SAMPLES]},
    }


def pair() -> dict[str, Any]:
    data = images()()
    return {"x": data["x"], "y": [data["y"], data["x"].mean(1, keepdims=True)]}


# --- compile ---------------------------------------------------------------------------------------------


def entropy(metrics: Any = ("accuracy",), weighted: Any = None, **options: Any) -> Callable[[], dict[str, Any]]:
    def arguments() -> dict[str, Any]:
        loss = losses.SparseCategoricalCrossentropy(from_logits=True, **options)
        return {"loss": loss, "metrics": metrics and list(metrics), "weighted_metrics": weighted and list(weighted)}

    return arguments


def two_losses() -> dict[str, Any]:
    loss = losses.SparseCategoricalCrossentropy
    return {
        "loss": {"token": loss(from_logits=True), "digit": loss(from_logits=True, reduction="sum")},
        "loss_weights": {"token": 2.0, "digit": 0.01},
        "metrics": {"token": ["accuracy"], "digit": ["accuracy", "sparse_categorical_crossentropy"]},
    }


def two_listed() -> dict[str, Any]:
    loss = losses.SparseCategoricalCrossentropy(from_logits=True)
    return {"loss": [loss, "mse"], "loss_weights": [1.0, 0.3]}


def per_sample(y_true: Any, y_pred: Any) -> Any:
    return ops.mean(ops.square(ops.one_hot(ops.cast(y_true, "int32"), 10) - y_pred), axis=-1)


# An embedding has sparse gradients, which Keras's momentum treats differently from dense ones, so plain SGD.
TINY: dict[str, Any] = {
    "micro_batch_size": 3,
    "batch_size": 8,
    "momentum": 0.0,
}  # 13 texts: 8 = 3 + 3 + 2, then 5 = 3 + 2
WEIGHTED = images(sample_weight=sample_weight)

CASES = [
    Case("digits", mlp, images(), entropy()),
    Case("equal sizes", mlp, images(), entropy(), 13, 39),
    Case("no metrics", mlp, images(), entropy(None)),
    Case("built by its first batch", unbuilt, images(), entropy()),
    Case("regularizers", regularized, images(), entropy(), adds_losses=True),
    Case("a subclass that adds a loss", Subclassed, images(), entropy(), adds_losses=True),
    Case("a compute_loss of its own", OwnLoss, images(), entropy()),
    Case("a compute_metrics of its own", OwnMetrics, images(), entropy()),
    Case("reduction sum", mlp, images(), lambda: {**entropy(reduction="sum")(), "optimizer": sgd(clipnorm=0.1)}),
    Case("sample_weight", mlp, WEIGHTED, entropy(weighted=("accuracy", "sparse_categorical_crossentropy"))),
    Case("sample_weight, no metrics", mlp, WEIGHTED, entropy(None)),
    Case("sample_weight, divided by it", mlp, WEIGHTED, entropy(reduction="mean_with_sample_weight")),
    Case("class_weight", mlp, images(class_weight=lambda: {i: i / 4 for i in range(10)}), entropy()),
    Case("a function as loss", mlp, images(), lambda: {"loss": per_sample}),
    Case("masked rows in an RNN", masking, rows, entropy()),
    Case("masked rows, no metrics", masked_rows, rows, entropy(None)),
    Case("masked rows, weighted", masked_rows, weighted_rows, entropy(weighted=("accuracy",))),
    Case("masked rows, divided by weight", masked_rows, weighted_rows, entropy(reduction="mean_with_sample_weight")),
    Case("masked rows, regularized", masked_and_regularized, rows, entropy(None), adds_losses=True),
    Case("weights in a stack", stacked, images(), entropy()),
    Case("masked text", embedding, masked_text, entropy(), **TINY),
    Case("text with ignored tokens", language, text, entropy(ignore_class=IGNORED), **TINY),
    Case("two outputs, one masked", two_outputs, both, two_losses),
    Case("outputs in a list", listed, pair, two_listed),
]
