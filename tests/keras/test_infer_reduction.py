"""What a loss divides by is inferred before the first step. What does not fit is a warning with numbers."""

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, losses, ops

from bigbatch import BatchError, BigBatchWarning
from bigbatch.keras import accumulate

BACKEND = keras.backend.backend()
SIZE, MICRO = 17, 5
draw = np.random.default_rng(0)
X, TARGET = draw.normal(size=(SIZE, 6)), draw.normal(size=(SIZE, 4))
CLASS = draw.integers(0, 4, SIZE)
WEIGHT = draw.uniform(0, 3, SIZE)
WEIGHT[5:10] = 0  # a whole micro-batch
ROWS = draw.normal(size=(SIZE, 7, 6))
ROWS[np.arange(7)[None] >= draw.integers(1, 8, SIZE)[:, None]] = 0
TOKEN = draw.integers(0, 4, (SIZE, 7))

Fit = tuple[list[np.ndarray], dict[str, list[float]], list[str]]


def fit(
    build: Callable[[], Any], data: tuple[Any, ...], size: int | None, *, shuffle: bool = True, **options: Any
) -> Fit:
    """The weights, the history, and what bigbatch warned of."""
    keras.utils.set_random_seed(3)
    model = build()
    if size is not None:
        accumulate(model, size)
    model.compile(optimizer=keras.optimizers.SGD(0.1), **options)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        history = model.fit(
            *data[:2],
            sample_weight=data[2] if data[2:] else None,
            batch_size=SIZE,
            epochs=2,
            verbose=0,
            shuffle=shuffle,
        )
    told = [str(each.message) for each in said if issubclass(each.category, BigBatchWarning)]
    return model.get_weights(), history.history, told


def distance(ours: Fit, plain: Fit) -> float:
    """The largest relative distance of weights and of histories."""
    pairs = [(a, b) for a, b in zip(ours[0], plain[0], strict=True) if np.asarray(a).dtype.kind == "f"]
    pairs += [(np.array(ours[1][name]), np.array(plain[1][name])) for name in plain[1]]
    return max(float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-3)) for a, b in pairs)


def is_exact(ours: Fit, plain: Fit) -> bool:
    """To rounding; Keras 3.15 rounds losses in float64 to float32, except in part on tensorflow."""
    return distance(ours, plain) < 2e-6


# --- models and losses -----------------------------------------------------------------------------------


def mlp(**options: Any) -> Any:
    return keras.Sequential([layers.Input((6,)), layers.Dense(5, "tanh", **options), layers.Dense(4)])


def masked() -> Any:
    return keras.Sequential([layers.Input((7, 6)), layers.Masking(), layers.Dense(4)])


def squares(y_true: Any, y_pred: Any) -> Any:
    return ops.mean(ops.square(y_pred - ops.cast(y_true, y_pred.dtype)), -1)


class Sum(losses.Loss):
    def __call__(self, y_true, y_pred, sample_weight=None):
        return ops.sum(squares(y_true, y_pred))


class MeanByWeight(losses.Loss):
    def __call__(self, y_true, y_pred, sample_weight=None):
        values = squares(y_true, y_pred)
        weight = ops.cast(sample_weight, values.dtype)
        return ops.sum(values * weight) / ops.sum(weight)


def delegates(y_true, y_pred):
    return losses.MeanSquaredError()(y_true, y_pred)


def sum_over_the_batch(y_true, y_pred):
    return ops.sum(ops.square(y_pred - ops.cast(y_true, y_pred.dtype)), 0)


class Wrapped(keras.Model):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def call(self, x, training=False):
        return self.inner(x, training=training)


class CallsSuper(Wrapped):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, y, y_pred, sample_weight)


class SuperAndMore(Wrapped):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, y, y_pred, sample_weight) + 0.1 * ops.mean(ops.square(y_pred))


class FromCall(Wrapped):
    """Its loss uses what its call left on it."""

    def call(self, x, training=False):
        self.last = self.inner(x)
        return self.last

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(squares(y, y_pred)) + 0.1 * ops.mean(ops.square(self.last))


class AddsSum(Wrapped):
    def call(self, x, training=False):
        found = self.inner(x)
        self.add_loss(0.1 * ops.sum(ops.square(found)))
        return found


class AddsCoupled(Wrapped):
    """As load balancing in a mixture of experts: of the mean over the batch."""

    def call(self, x, training=False):
        found = self.inner(x)
        self.add_loss(ops.sum(ops.square(ops.mean(found, 0))))
        return found


def mean_activity(x):
    return 0.3 * ops.mean(ops.square(x))


def on_the_instance() -> Any:
    model = mlp()

    def compute_loss(x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.sum(ops.square(y_pred - ops.cast(y, y_pred.dtype)))

    model.compute_loss = compute_loss
    return model


def one_axis() -> Any:
    return keras.Sequential([layers.Input((6,)), layers.Dense(1), layers.Reshape(())])


def sum_of_squares() -> Any:
    return losses.MeanSquaredError(reduction="sum")


EXACT: dict[str, tuple[Callable[[], Any], tuple[Any, ...], Callable[[], Any]]] = {
    "a Loss with a __call__ that is a sum": (mlp, (X, TARGET), Sum),
    "a Loss with a __call__ that is a mean by weights": (mlp, (X, TARGET, WEIGHT), MeanByWeight),
    "a sum over the batch axis": (mlp, (X, TARGET), lambda: sum_over_the_batch),
    "super().compute_loss of a mean": (lambda: SuperAndMore(mlp()), (X, TARGET), lambda: "mse"),
    "super().compute_loss of a sum": (lambda: CallsSuper(mlp()), (X, TARGET), sum_of_squares),
    "super().compute_loss of a sum, and a regularizer": (
        lambda: CallsSuper(mlp(kernel_regularizer="l2")),
        (X, TARGET),
        sum_of_squares,
    ),
    "a compute_loss that uses what call left": (lambda: FromCall(mlp()), (X, TARGET), lambda: "mse"),
    "a compute_loss on the instance": (on_the_instance, (X, TARGET), lambda: None),
    "an activity regularizer that is a mean": (
        lambda: mlp(activity_regularizer=mean_activity),
        (X, TARGET),
        lambda: "mse",
    ),
    "an add_loss that is a sum": (lambda: AddsSum(mlp()), (X, TARGET), lambda: "mse"),
    "an output of one axis": (one_axis, (X, TARGET[:, 0]), lambda: "mse"),
    "an output of one axis, reduction sum": (one_axis, (X, TARGET[:, 0]), sum_of_squares),
    "focal, smoothed": (
        mlp,
        (X, np.eye(4)[CLASS]),
        lambda: losses.CategoricalFocalCrossentropy(from_logits=True, label_smoothing=0.1),
    ),
    "a metric as a loss": (mlp, (X, TARGET), lambda: keras.metrics.mean_squared_error),
}


# How the steps use what was found differs by backend: each kind of loss on all, the rest on one.
ON_ALL = (
    "a Loss with a __call__ that is a mean by weights", "super().compute_loss of a sum, and a regularizer",
    "a compute_loss that uses what call left", "an activity regularizer that is a mean", "a sum over the batch axis",
)  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=pytest.mark.compiled if name in ON_ALL else [] if BACKEND == "tensorflow" else pytest.mark.slow,
        )
        for name in EXACT
    ],
)
@pytest.mark.usefixtures("float64")
def test_made_right(name: str) -> None:
    build, data, loss = EXACT[name]
    ours = fit(build, data, MICRO, loss=loss())
    assert ours[2] == []
    assert is_exact(ours, fit(build, data, None, loss=loss()))


@pytest.mark.usefixtures("float64")
@pytest.mark.any_backend
@pytest.mark.parametrize("size", [1, 2, 16])
@pytest.mark.parametrize("name", list(EXACT)[1:3])
def test_made_right_at_other_sizes(name: str, size: int) -> None:
    build, data, loss = EXACT[name]
    assert is_exact(fit(build, data, size, loss=loss()), fit(build, data, None, loss=loss()))


# --- told ------------------------------------------------------------------------------------------------


def root(y_true, y_pred):
    return ops.sqrt(ops.mean(squares(y_true, y_pred)))


def by_the_largest(y_true, y_pred):
    values = squares(y_true, y_pred)
    return values / ops.stop_gradient(ops.max(values))


def dice(y_true, y_pred):
    found, target = ops.sigmoid(y_pred), ops.cast(ops.abs(y_true) > 0.5, y_pred.dtype)
    return 1 - 2 * ops.sum(found * target) / (ops.sum(found) + ops.sum(target))


def contrastive(y_true, y_pred):
    unit = y_pred / ops.sqrt(ops.sum(ops.square(y_pred), -1, keepdims=True))
    similar = ops.matmul(unit, ops.transpose(unit)) / 0.2
    return losses.sparse_categorical_crossentropy(ops.arange(ops.shape(y_pred)[0]), similar, from_logits=True)


TOLD: dict[str, tuple[Callable[[], Any], tuple[Any, ...], Any, str]] = {
    "a root of a mean": (mlp, (X, TARGET), root, "the loss root is neither"),
    "divided by the largest": (mlp, (X, TARGET), by_the_largest, "the loss by_the_largest is neither"),
    "a ratio of sums": (mlp, (X, TARGET), dice, "the loss dice is neither"),
    "contrastive": (mlp, (X, TARGET), contrastive, "the loss contrastive is neither"),
    "coupled in add_loss": (lambda: AddsCoupled(mlp()), (X, TARGET), "mse", "what adds_coupled adds to the loss is"),
    "a sum and a mean": (
        lambda: SuperAndMore(mlp()),
        (X, TARGET),
        losses.MeanSquaredError(reduction="sum"),
        "compute_loss is neither",
    ),
    "super().compute_loss with a mask": (
        lambda: CallsSuper(masked()),
        (ROWS, TOKEN),
        losses.SparseCategoricalCrossentropy(from_logits=True),
        "compute_loss is neither",
    ),
}


@pytest.mark.any_backend
@pytest.mark.parametrize("name", TOLD)
@pytest.mark.usefixtures("float64")
def test_told(name: str) -> None:
    """With both numbers; and it is so: the weights are others."""
    build, data, loss, says = TOLD[name]
    ours = fit(build, data, MICRO, loss=loss)
    (said,) = (sentence for sentence in ours[2] if says in sentence)
    assert "a mean nor a sum over samples: on 5 samples it is" in said
    assert "when they are cut (off by" in said
    assert distance(ours, fit(build, data, None, loss=loss)) > 1e-3


def over_the_positive(y_true, y_pred):
    is_counted = ops.cast(y_true > 0, y_pred.dtype)
    return ops.sum(is_counted * ops.square(y_pred - ops.cast(y_true, y_pred.dtype))) / ops.sum(is_counted)


def by_the_deviation(y_true, y_pred):
    return squares(y_true, y_pred) / ops.std(y_pred[:, 0])


SORTED = np.abs(TARGET)  # from the seventh row on one value of four counts
SORTED[6:, 1:] *= -1
BARREN = np.abs(TARGET) * np.where(np.arange(SIZE) % 5 == 1, -1, 1)[:, None]  # rows without one that counts
UNTYPICAL: dict[str, tuple[Any, Any]] = {
    "the first samples all count": (SORTED, over_the_positive),
    "a cut is 0/0": (BARREN, over_the_positive),
    "not defined for one sample": (TARGET, by_the_deviation),
}


@pytest.mark.any_backend
@pytest.mark.parametrize("name", UNTYPICAL)
@pytest.mark.usefixtures("float64")
def test_told_where_the_first_samples_do_not_show_it(name: str) -> None:
    target, loss = UNTYPICAL[name]
    ours, plain = (fit(mlp, (X, target), size, loss=loss, shuffle=False) for size in (MICRO, None))
    assert any(f"the loss {loss.__name__} is neither" in sentence for sentence in ours[2])
    assert not distance(ours, plain) < 1e-3


class InTraining(Wrapped):
    """Adds a loss in training alone, or another one."""

    def __init__(self, inner: Any, in_training: Any, else_: Any = None) -> None:
        super().__init__(inner)
        self.add = in_training, else_

    def call(self, x, training=False):
        found = self.inner(x, training=training)
        if add := self.add[0] if training else self.add[1]:
            self.add_loss(0.1 * add(ops.square(found)))
        return found


def coupled(x):
    return ops.sqrt(ops.mean(x))


@pytest.mark.any_backend
@pytest.mark.parametrize("pair", [(ops.sum,), (ops.mean,), (ops.sum, ops.mean), (coupled,)], ids=str)
@pytest.mark.usefixtures("float64")
def test_what_is_added_in_training_alone(pair: Any) -> None:
    ours, plain = (fit(lambda: InTraining(mlp(), *pair), (X, TARGET), size, loss="mse") for size in (MICRO, None))
    assert is_exact(ours, plain) == (pair != (coupled,))
    assert [sentence.partition(" is neither")[0] for sentence in ours[2]] == (
        ["what in_training adds to the loss"] if pair == (coupled,) else []
    ) or ours[2][0].startswith("what in_training")


class Anneals(losses.Loss):
    def __init__(self) -> None:
        super().__init__()
        self.factor = keras.Variable(1.0, trainable=False, dtype="float64")

    def call(self, y_true, y_pred):
        self.factor.assign(0.9 * self.factor)
        return self.factor * squares(y_true, y_pred)


@pytest.mark.any_backend
@pytest.mark.usefixtures("float64")
def test_a_loss_that_changes_a_variable() -> None:
    *_, told = fit(mlp, (X, TARGET), MICRO, loss=Anneals())
    assert any("changes a variable of its own each time it is called" in sentence for sentence in told)


@pytest.mark.any_backend
@pytest.mark.usefixtures("float64")
def test_a_sum_is_not_said_to_be_taken_for_a_mean() -> None:
    ours, plain = (fit(mlp, (X, TARGET), size, loss=whole_sum) for size in (MICRO, None))
    assert is_exact(ours, plain)
    assert ours[2] == []


def whole_sum(y_true, y_pred):
    return ops.sum(squares(y_true, y_pred))


class Unsorted(Wrapped):
    """Its names are not in alphabetical order."""

    def call(self, x, training=False):
        found = self.inner(x)
        return {"b": found, "c": 2 * found, "a": found - 1}


@pytest.mark.usefixtures("float64")
def test_outputs_whose_names_are_not_sorted() -> None:
    options = {"loss": {"b": "mse", "c": "log_cosh", "a": "mae"}, "metrics": {"b": ["mae"], "c": ["mse"]}}
    data = X, {"b": TARGET, "c": TARGET, "a": 2 * TARGET}
    ours, plain = (fit(lambda: Unsorted(mlp()), data, size, **options) for size in (MICRO, None))
    assert ours[2] == []
    assert is_exact(ours, plain)


class WritesIntoItsInput(Wrapped):
    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.token = self.add_weight(shape=(), initializer="ones")

    def call(self, x, training=False):
        x[:, 1:] += 1
        x[:, 0] = self.token.value
        return self.inner(x)


if BACKEND == "tensorflow":
    import tensorflow as tf

    class InPython(Wrapped):
        """TensorFlow does not know the shape of its gradient."""

        def __init__(self, inner: Any) -> None:
            super().__init__(inner)
            self.kernel = self.add_weight(shape=(6, 6))

        def call(self, x, training=False):
            found = tf.py_function(lambda x, kernel: x @ kernel, [x, self.kernel.value], x.dtype)
            return self.inner(tf.ensure_shape(found, (None, 6)))

    @pytest.mark.compiled
    @pytest.mark.usefixtures("float64")
    def test_a_model_that_runs_python() -> None:
        ours, plain = (fit(lambda: InPython(mlp()), (X, TARGET), size, loss="mse") for size in (MICRO, None))
        assert is_exact(ours, plain)


if BACKEND == "torch":

    @pytest.mark.usefixtures("float64")
    def test_a_model_that_writes_into_its_input() -> None:
        """Neither the rows of other micro-batches are touched, nor those of the first batch before its step."""
        ours, plain = (
            fit(lambda: WritesIntoItsInput(mlp()), (X.copy(), TARGET), size, loss="mse", metrics=["mae"])
            for size in (MICRO, None)
        )
        assert is_exact(ours, plain)


@pytest.mark.usefixtures("float64")
@pytest.mark.any_backend
def test_one_of_several_outputs_is_named() -> None:
    def build() -> Any:
        x = layers.Input((6,))
        return keras.Model(x, {"right": layers.Dense(4, name="right")(x), "wrong": layers.Dense(4, name="wrong")(x)})

    data = X, {"right": TARGET, "wrong": TARGET}
    *_, told = fit(build, data, MICRO, loss={"right": "mse", "wrong": root}, loss_weights={"right": 1.0, "wrong": 0.3})
    assert [sentence.split(" is neither")[0] for sentence in told if "neither" in sentence] == ["the loss root"]


# --- no false alarms, no trace ---------------------------------------------------------------------------


def noisy() -> Any:
    return keras.Sequential(
        [
            layers.Input((6,)), layers.Dense(5, "tanh"), layers.BatchNormalization(),
            layers.Dropout(0.3), layers.GaussianNoise(0.2), layers.Dense(4),
        ]
    )  # fmt: skip


class Variational(keras.Model):
    """Draws numbers in every call, in training or not, and adds a loss of them."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = layers.Dense(6), layers.Dense(4)
        self.seed = keras.random.SeedGenerator(1)

    def call(self, x):
        mean, log = ops.split(self.encode(x), 2, -1)
        z = mean + ops.exp(log / 2) * keras.random.normal(ops.shape(mean), seed=self.seed, dtype=mean.dtype)
        self.add_loss(ops.cast(-0.05 * ops.mean(1 + log - mean * mean - ops.exp(log)), keras.config.floatx()))
        self.add_loss(ops.cast(0.01 * ops.mean(z * z), keras.config.floatx()))
        return self.decode(z)


@pytest.mark.each_value
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("build", [noisy, Variational, mlp], ids=lambda build: build.__name__)
def test_randomness_and_low_precision_are_no_alarm(build: Callable[[], Any], policy: str) -> None:
    keras.config.set_dtype_policy(policy)
    *_, told = fit(build, (X.astype("float32"), TARGET.astype("float32")), MICRO, loss="mse", metrics=["mae"])
    assert [sentence for sentence in told if "BatchNormalization" not in sentence] == []


@pytest.mark.filterwarnings("ignore::bigbatch.BigBatchWarning")
@pytest.mark.parametrize("build", [noisy, Variational], ids=lambda build: build.__name__)
def test_it_leaves_no_trace(build: Callable[[], Any]) -> None:
    """Seeds, the statistics of BatchNorm, and metrics are afterwards those of plain training on the one micro-batch."""

    def state(size: int | None) -> list[Any]:
        keras.utils.set_random_seed(3)
        model = build()
        if size is not None:
            accumulate(model, size)
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
        model.train_on_batch(X.astype("float32"), TARGET.astype("float32"))
        return [np.asarray(v) for v in [*model.variables, *model.metrics_variables]]

    for ours, plain in zip(state(SIZE), state(None), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-6)


def test_it_is_tried_once_for_each_compile() -> None:
    sizes: list[int] = []

    class Noting(layers.Layer):
        def call(self, x):
            if BACKEND != "tensorflow" or keras.src.backend.in_stateless_scope():
                sizes.append(x.shape[0])
            return x

    model = accumulate(keras.Sequential([layers.Input((6,)), Noting(), layers.Dense(4)]), MICRO)
    model.compile("sgd", "mse")
    model.fit(X, TARGET, batch_size=SIZE, epochs=1, verbose=0)
    assert sizes.count(1) == 2  # 5 = 1 + 1 + 3
    model.fit(X, TARGET, batch_size=SIZE, epochs=2, verbose=0)
    assert sizes.count(1) == 2
    model.compile("sgd", "mae")
    model.fit(X, TARGET, batch_size=SIZE, epochs=1, verbose=0)
    assert sizes.count(1) == 4


# --- outputs ---------------------------------------------------------------------------------------------


class Temperature(Wrapped):
    """One of its outputs has no batch axis."""

    def call(self, x, training=False):
        return {"a": self.inner(x), "b": ops.ones((1, 4), dtype=x.dtype)}


def test_an_output_without_a_batch_axis() -> None:
    model = accumulate(Temperature(mlp()), MICRO)
    model.compile("sgd", {"a": "mse"}, metrics={"a": ["mae"]})
    with pytest.raises(BatchError, match=r"shape \(1, 4\) for 5 samples and \(1, 4\) for 1 of them"):
        model.fit(X, {"a": TARGET, "b": TARGET}, batch_size=SIZE, verbose=0)


class PadsToLongest(keras.Model):
    """As TextVectorization does: to the longest of those that it is called with."""

    def __init__(self, is_pooled: bool) -> None:
        super().__init__()
        self.head = layers.Dense(4)
        self.is_pooled = is_pooled

    def call(self, x):
        longest = ops.max(x[:, 0])
        if BACKEND == "jax":
            longest = x.shape[0]  # JAX knows no shapes that depend on values
        else:
            longest = ops.cast(longest, "int32") if BACKEND == "tensorflow" else int(longest)
        rows = ops.ones((ops.shape(x)[0], longest, 3), dtype=x.dtype) * x[:, None, :1]
        rows = self.head(rows)
        return ops.sum(rows, 1) if self.is_pooled else rows


LENGTHS = np.array([[1.0], [2.0], [5.0], [2.0], [3.0], [1.0]], "float32")


@pytest.mark.parametrize("is_pooled", [False, True])
def test_what_pads_to_the_longest_is_told(is_pooled: bool) -> None:
    model = accumulate(PadsToLongest(is_pooled), 4)
    model.compile("sgd", "mse", run_eagerly=True)
    y = np.ones((6, 4) if is_pooled else (6, 6 if BACKEND == "jax" else 5, 4), "float32")
    if is_pooled:
        with pytest.warns(BigBatchWarning, match="depends on the other samples in its micro-batch"):
            model.fit(LENGTHS, y, batch_size=6, shuffle=False, verbose=0)
    else:
        with pytest.raises(BatchError, match="pad sequences to a fixed length"):
            model.fit(LENGTHS, y, batch_size=6, shuffle=False, verbose=0)


class LeavesOut(Wrapped):
    def call(self, x, training=False):
        return {"a": self.inner(x), "b": None}


@pytest.mark.parametrize("options", [{}, {"metrics": {"a": ["mae"]}}], ids=str)
@pytest.mark.usefixtures("float64")
def test_an_output_that_is_none(options: dict[str, Any]) -> None:
    data = X, {"a": TARGET, "b": None}
    pair = [fit(lambda: LeavesOut(mlp()), data, size, loss={"a": "mse"}, **options) for size in (MICRO, None)]
    assert is_exact(*pair)


class TracksWhatCallLeft(FromCall):
    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.tracker = keras.metrics.Mean(name="own")

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        self.tracker.update_state(ops.max(self.last))
        return super().compute_loss(x, y, y_pred, sample_weight, training)


@pytest.mark.usefixtures("float64")
def test_a_metric_of_what_call_left() -> None:
    *_, told = fit(lambda: TracksWhatCallLeft(mlp()), (X, TARGET), MICRO, loss="mse")
    assert len(told) == 1
    assert "uses what call() left on the model" in told[0]
    assert "own stays as it is" in told[0]


if BACKEND == "torch":

    def test_torchs_own_batch_norm_is_told() -> None:
        import torch

        def build() -> Any:
            wrapper = layers.TorchModuleWrapper(torch.nn.BatchNorm1d(6), name="wrapped")
            return keras.Sequential([layers.Input((6,)), wrapper, layers.Dense(4)])

        *_, told = fit(build, (X.astype("float32"), TARGET.astype("float32")), MICRO, loss="mse")
        assert [sentence for sentence in told if "(wrapped) normalises" in sentence] == told != []


if BACKEND == "tensorflow":

    @pytest.mark.parametrize("options", [{}, {"metrics": ["mae"]}], ids=str)
    @pytest.mark.usefixtures("float64")
    def test_reduction_none(options: dict[str, Any]) -> None:
        """The gradient is that of the sum, and the history the mean, as in Keras on tensorflow (the others refuse)."""

        def loss() -> Any:
            return losses.MeanSquaredError(reduction="none")

        pair = [fit(mlp, (X, TARGET), size, loss=loss(), **options) for size in (MICRO, None)]
        assert is_exact(*pair)

    @pytest.mark.compiled
    def test_text_vectorization() -> None:
        import tensorflow as tf

        text = layers.TextVectorization()
        words = ["a b c", "a", "b c d e f", "c", "d a", "e", "f f f f f f f", "a b"]
        text.adapt(words)

        def build() -> Any:
            return keras.Sequential(
                [
                    layers.Input((), dtype="string"), text, layers.Embedding(12, 3),
                    layers.GlobalAveragePooling1D(), layers.Dense(1),
                ]
            )  # fmt: skip

        *_, told = fit(build, (tf.constant(words), np.ones((8, 1))), 4, loss="mse")
        assert "the outputs of 4 samples change by" in told[0]
        assert "pad sequences to a fixed length" in told[0]

    @pytest.mark.compiled
    def test_the_step_is_traced_once() -> None:
        calls = []

        class Noting(layers.Layer):
            def call(self, x):
                if not tf_executes_eagerly():
                    calls.append(x.shape[0])
                return x

        model = accumulate(keras.Sequential([layers.Input((6,)), Noting(), layers.Dense(4)]), MICRO)
        calls.clear()
        model.compile("sgd", "mse")
        model.fit(X, TARGET, batch_size=SIZE, epochs=2, verbose=0)
        assert len(calls) == 2  # to look at its form, and the step

    def tf_executes_eagerly() -> bool:
        import tensorflow as tf

        return tf.executing_eagerly()
