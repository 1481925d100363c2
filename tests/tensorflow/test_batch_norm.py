"""BatchNormalization: moving statistics are updated once per step, with those of the whole batch."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from bigbatch import BigBatchWarning, OptionError, Window
from bigbatch.tensorflow import Accumulator, Checkpoints, recalibrate

from .test_distribute import on_replicas
from .training import mirrored

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings("ignore::bigbatch.BigBatchWarning"),
]
Batch = dict[str, Any]
MOMENTUM = 0.9


class Watched(keras.layers.Layer):
    """Keeps what it is given, to compute the statistics of it in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[np.ndarray] = []

    def call(self, x: Any) -> Any:
        if tf.executing_eagerly():  # not while it is traced
            self.seen.append(x.numpy())
        return x


def make_model(**options: Any) -> Any:
    """BatchNormalization first, so that its statistics are those of the data, however it is cut."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    norm = layers.BatchNormalization(momentum=MOMENTUM, **options)
    return keras.Sequential([keras.Input((3, 2)), norm, layers.Flatten(), layers.Dense(4)])


def make_batch(size: int = 13, seed: int = 0) -> Batch:
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(size, 3, 2)) * 3 + np.arange(size)[:, None, None]  # so that micro-batches differ
    return {"x": x, "y": draw.integers(0, 4, size)}


def loss(model: Any, batch: Batch) -> Any:
    logits = model(batch["x"], training=True)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(batch["y"], logits))


def make(size: int | None = 4, model: Any = None, **options: Any) -> Accumulator:
    return Accumulator(make_model() if model is None else model, keras.optimizers.SGD(0.01), loss, size, **options)


def statistics(model: Any) -> list[np.ndarray]:
    """The moving means and variances of every replica."""
    values = [getattr(v, "value", v) for v in model.non_trainable_variables]
    strategy = tf.distribute.get_strategy() if not hasattr(values[0], "values") else mirrored()
    return [part.numpy() for v in values for part in strategy.experimental_local_results(v)]


def after_plain_steps(*batches: Batch) -> list[np.ndarray]:
    model = make_model()
    for batch in batches:
        model(batch["x"], training=True)
    return statistics(model)


def assert_same(found: list[np.ndarray], expected: list[np.ndarray], num_replicas: int = 1) -> None:
    expected = [value for value in expected for _ in range(num_replicas)]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("eagerly")
@pytest.mark.parametrize("size", [1, 2, 3, 12, 13])
def test_statistics_are_those_of_the_full_batch(size: int) -> None:
    accumulator = make(size)
    for seed in (0, 1):
        accumulator.step(make_batch(seed=seed))
    assert_same(statistics(accumulator.model), after_plain_steps(make_batch(), make_batch(seed=1)))


@pytest.mark.parametrize("is_jit", [False, True])
def test_in_graphs(is_jit: bool) -> None:
    accumulator = make(jit_compile=is_jit)
    for size in (13, 8, 3):
        accumulator.step(make_batch(size))
    assert_same(statistics(accumulator.model), after_plain_steps(*map(make_batch, (13, 8, 3))))


def window(batch: Batch) -> Window[Batch]:
    return Window([{name: rows[k : k + 4] for name, rows in batch.items()} for k in range(0, len(batch["y"]), 4)])


def test_of_a_window() -> None:
    accumulator = make(None)
    accumulator.step(window(make_batch()))
    assert_same(statistics(accumulator.model), after_plain_steps(make_batch()))


@pytest.mark.parametrize("is_synchronized", [False, True])
def test_on_replicas(is_synchronized: bool) -> None:
    with mirrored().scope():
        accumulator = make(model=make_model(synchronized=is_synchronized))
    for split in ((9, 4), (5, 0)):
        accumulator.step(on_replicas(make_batch(sum(split)), split))
    assert_same(statistics(accumulator.model), after_plain_steps(make_batch(13), make_batch(5)), num_replicas=2)


def test_windows_on_replicas() -> None:
    with mirrored().scope():
        accumulator = make(None)
    accumulator.step(window(make_batch()))
    assert_same(statistics(accumulator.model), after_plain_steps(make_batch()), num_replicas=2)


@pytest.mark.usefixtures("eagerly")
def test_negative_control_each_micro_batch_updates() -> None:
    plain, own = make_model(), make(batch_norm="micro_batch")
    own.step(make_batch())
    for micro_batch in window(make_batch()):
        plain(micro_batch["x"], training=True)
    assert_same(statistics(own.model), statistics(plain))
    mean, variance = (abs(a - b).max() for a, b in zip(statistics(plain), after_plain_steps(make_batch()), strict=True))
    assert mean > 0.5
    assert variance > 0.5


@pytest.mark.usefixtures("eagerly")
def test_deep_layers_over_epochs_are_those_of_the_recorded_activations() -> None:
    keras.utils.set_random_seed(0)
    watched = Watched()
    norm = keras.layers.BatchNormalization(momentum=MOMENTUM)
    model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(5, "tanh"), watched, norm])
    model(make_batch()["x"])
    accumulator = make(model=model)
    mean, variance = np.zeros(5), np.ones(5)
    for seed in (0, 1, 2):
        watched.seen.clear()
        accumulator.step(make_batch(seed=seed))
        seen = np.concatenate(watched.seen)
        assert len(seen) == 13
        mean = MOMENTUM * mean + (1 - MOMENTUM) * seen.mean(0)
        variance = MOMENTUM * variance + (1 - MOMENTUM) * seen.var(0)
    assert_same(statistics(model), [mean, variance])


@pytest.mark.usefixtures("eagerly")
def test_frozen_uses_the_moving_statistics_and_is_exact() -> None:
    def full(model: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            logits = model(make_batch()["x"], training=False)
            value = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(make_batch()["y"], logits))
        return tape.gradient(value, model.trainable_variables)

    accumulator = make(batch_norm="frozen")
    before = statistics(accumulator.model)
    found, _ = accumulator.gradients(make_batch())
    for one, other in zip(found, full(make_model()), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-14)
    assert_same(statistics(accumulator.model), before)
    assert accumulator.verify(make_batch()).is_exact
    assert not make().verify(make_batch()).is_exact


@pytest.mark.parametrize("mode", ["batch", "frozen"])
def test_layers_of_tf_keras_do_their_own_update_or_are_frozen(mode: Any) -> None:
    def make_old() -> Any:
        keras.utils.set_random_seed(0)
        layers = tf_keras.layers
        norm = layers.BatchNormalization(momentum=MOMENTUM)
        return tf_keras.Sequential([layers.Input((3, 2)), norm, layers.Flatten(), layers.Dense(4)])

    with tf.device("CPU:0"):
        ours, plain = make_old(), make_old()
        Accumulator(ours, tf_keras.optimizers.SGD(0.1), loss, 4, batch_norm=mode).step(make_batch())
        for micro_batch in window(make_batch()) if mode == "batch" else ():
            plain(micro_batch["x"], training=True)
    for one, other in zip(ours.non_trainable_variables, plain.non_trainable_variables, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


class Compiled(keras.Model):
    """Runs its layers in a graph of its own, also in eager code."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model()
        self.run = tf.function(lambda x: self.inner(x, training=True), autograph=False)

    def call(self, x: Any, training: bool = False) -> Any:
        is_eager = tf.config.functions_run_eagerly()
        tf.config.run_functions_eagerly(False)
        try:
            return self.run(x)
        finally:
            tf.config.run_functions_eagerly(is_eager)


@pytest.mark.usefixtures("eagerly")
def test_a_layer_in_a_graph_of_its_own_does_its_own_update() -> None:
    ours, plain = make(model=Compiled()), make_model()
    before = statistics(ours.model.inner)
    for part in window(make_batch()):
        plain(part["x"], training=True)
    ours.step(make_batch())
    found = statistics(ours.model.inner)
    assert not np.allclose(found[0], before[0])
    assert_same(found, statistics(plain))


@pytest.mark.usefixtures("eagerly")
def test_masked_and_shared_layers() -> None:
    class Twice(keras.Model):
        """Masks its input and calls one layer twice."""

        def __init__(self) -> None:
            super().__init__()
            self.mask, self.norm = keras.layers.Masking(0.0), keras.layers.BatchNormalization(momentum=MOMENTUM)
            self.head = keras.layers.Dense(4)

        def call(self, x: Any, training: bool = False) -> Any:
            first = self.norm(self.mask(x), training=training)
            self.norm(2 * x, training=training)
            return tf.reduce_mean(self.head(first), 1)

    def make_it() -> Any:
        keras.utils.set_random_seed(0)
        model = Twice()
        model(np.ones((1, 3, 2)))
        return model

    batch = make_batch()
    batch["x"][::2, 1:] = 0.0
    plain, ours = make_it(), make_it()
    plain(batch["x"], training=True)
    make(model=ours).step(batch)
    for one, other in zip(statistics(ours), statistics(plain), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-7)  # with a mask, Keras divides by the count plus 1e-7


@pytest.mark.usefixtures("eagerly")
def test_statistics_that_are_not_finite_are_left_out() -> None:
    accumulator = make()
    before = statistics(accumulator.model)
    batch = make_batch()
    batch["x"][5] = np.nan
    assert not accumulator.step(batch).is_applied
    assert_same(statistics(accumulator.model), before)


@pytest.mark.usefixtures("eagerly")
@pytest.mark.parametrize("mode", ["batch", "micro_batch", "frozen"])
def test_the_warning_says_what_is_pooled(mode: Any) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make(batch_norm=mode)
    texts = [str(warning.message) for warning in caught if issubclass(warning.category, BigBatchWarning)]
    assert len(texts) == (mode != "frozen")
    assert all(("the moving statistics of the whole batch" in text) == (mode == "batch") for text in texts)


@contextmanager
def warned() -> Iterator[list[str]]:
    """The warnings of bigbatch inside."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(warning.message) for warning in caught if issubclass(warning.category, BigBatchWarning)]


def feed(accumulator: Accumulator, batch: Batch, way: str = "micro_batch") -> None:
    """The user's own loop over one batch, in micro-batches of 4."""
    for part in window(batch):
        if way == "micro_batch":
            with accumulator.micro_batch(weight=len(part["y"])) as micro:
                micro.backward(loss(accumulator.model, part))
        else:
            with tf.GradientTape() as tape:
                value = loss(accumulator.model, part)
            accumulator.add(tape.gradient(value, accumulator.model.trainable_variables), len(part["y"]), value)


class Branching(keras.Model):
    """Runs its layers in a tf.cond."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model()

    def call(self, x: Any, training: bool = False) -> Any:
        return tf.cond(tf.shape(x)[0] > 0, lambda: self.inner(x, training=True), lambda: tf.zeros([0, 4], tf.float64))


@pytest.mark.parametrize("make_it", [Compiled, Branching])
@pytest.mark.parametrize("has_run", [False, True])
def test_layers_that_step_cannot_pool_are_named_once(make_it: Any, has_run: bool) -> None:
    model = make_it()
    if has_run:  # so that its own graph is there already
        model(make_batch()["x"], training=True)
    accumulator = make(model=model)
    with warned() as texts:
        accumulator.step(make_batch())
        accumulator.step(make_batch(5))
    name = next(layer.name for layer in model.inner.layers if "batch_norm" in layer.name)
    (text,) = (text for text in texts if "every micro-batch" in text)
    assert f"1 BatchNormalization layer ({name}) update" in text
    assert "recalibrate(model, batches)" in text
    assert 'batch_norm="micro_batch"' in text
    with warned() as texts:
        make(model=make_it(), batch_norm="micro_batch").step(make_batch())
    assert not any("every micro-batch" in text for text in texts)


def test_layers_of_tf_keras_are_named() -> None:
    norm = tf_keras.layers.BatchNormalization(name="old")
    model = tf_keras.Sequential([tf_keras.layers.Input((3, 2)), norm, tf_keras.layers.Flatten()])
    accumulator = Accumulator(model, tf_keras.optimizers.SGD(0.1), loss, 4)
    with warned() as texts:
        accumulator.step(make_batch())
    assert sum("1 BatchNormalization layer (old) update" in text for text in texts) == 1


def test_layers_with_renorm_are_named() -> None:
    model = make_model(renorm=True)
    with warned() as texts:
        make(model=model).step(make_batch())
    assert sum(f"layer ({model.layers[0].name}) update" in text for text in texts) == 1


@pytest.mark.parametrize(
    ("mode", "match"), [("batch", "add() cannot pool"), ("micro_batch", None), ("frozen", "add() cannot freeze")]
)
def test_add_says_once_that_it_does_not_run_the_model(mode: Any, match: str | None) -> None:
    accumulator = make(None, accumulation_steps=4, batch_norm=mode)
    with warned() as texts:
        feed(accumulator, make_batch(), "add")
        feed(accumulator, make_batch(), "add")
    assert len(texts) == (match is not None)
    assert all(match in text for text in texts if match)
    with warned() as texts:
        feed(make(None, accumulation_steps=4, batch_norm=mode), make_batch())
    assert not any("add()" in text for text in texts)


def test_micro_batches_of_the_users_loop_are_pooled() -> None:
    accumulator = make(None, accumulation_steps=8)
    for seed in (0, 1):
        before = statistics(accumulator.model)
        parts = window(make_batch(seed=seed))
        for part in parts:
            assert_same(statistics(accumulator.model), before)
            with accumulator.micro_batch(weight=len(part["y"])) as micro:
                loss(accumulator.model, {"x": part["x"] + 9, "y": part["y"]})
                micro.skip()
            with accumulator.micro_batch(weight=0) as micro:  # labels that do not count
                micro.backward(loss(accumulator.model, {"x": part["x"] - 9, "y": part["y"]}))
            with accumulator.micro_batch(weight=len(part["y"])) as micro:
                micro.backward(loss(accumulator.model, part))
    assert_same(statistics(accumulator.model), after_plain_steps(make_batch(), make_batch(seed=1)))


def test_micro_batches_in_a_graph_of_the_users_are_pooled() -> None:
    accumulator = make(None, accumulation_steps=4)

    @tf.function(reduce_retracing=True, autograph=False)
    def train(x: Any, y: Any) -> None:
        with accumulator.micro_batch(weight=tf.shape(y)[0]) as micro:
            micro.backward(loss(accumulator.model, {"x": x, "y": y}))

    for seed in (0, 1):
        for part in window(make_batch(seed=seed)):
            train(part["x"], part["y"])
    assert_same(statistics(accumulator.model), after_plain_steps(make_batch(), make_batch(seed=1)))


@pytest.mark.parametrize("is_graph", [False, True])
def test_micro_batches_on_replicas_are_pooled(is_graph: bool, tmp_path: Path) -> None:
    strategy = mirrored()
    with strategy.scope():
        accumulator = make(None, accumulation_steps=2)

    def on_replica(part: Any) -> None:
        with accumulator.micro_batch(weight=tf.shape(part["y"])[0]) as micro:
            micro.backward(loss(accumulator.model, part))

    def train(part: Any) -> None:
        strategy.run(on_replica, args=(part,))

    call = tf.function(train, autograph=False) if is_graph else train
    batch = make_batch()
    for start, split in ((0, (4, 2)), (6, (6, 1))):
        rows = {name: values[start : start + sum(split)] for name, values in batch.items()}
        call(on_replicas(rows, split))
        if start == 0:  # it has the sum over replicas
            checkpoint = tf.train.Checkpoint(window=accumulator._window)
            path = checkpoint.write(str(tmp_path / "saved"))
            accumulator._window.clear()
            checkpoint.read(path)
    assert_same(statistics(accumulator.model), after_plain_steps(batch), num_replicas=2)


def test_a_window_that_is_saved_in_its_middle_has_the_statistics(tmp_path: Path) -> None:
    def make_it() -> tuple[Accumulator, Checkpoints]:
        accumulator = make(None, accumulation_steps=4)
        return accumulator, Checkpoints(tmp_path, accumulator, every=None)

    parts = window(make_batch())
    for number, part in enumerate(parts):
        accumulator, checkpoints = make_it()
        assert checkpoints.restore() == (number > 0)
        with accumulator.micro_batch(weight=len(part["y"])) as micro:
            micro.backward(loss(accumulator.model, part))
        checkpoints.save()
        checkpoints.close()
    assert_same(statistics(accumulator.model), after_plain_steps(make_batch()))


def test_a_layer_outside_of_the_model_does_its_own_update_and_is_named() -> None:
    teacher, plain = make_model(), make_model()
    accumulator = make(None, accumulation_steps=4)
    parts = window(make_batch())
    with warned() as texts:
        for part in parts:
            with accumulator.micro_batch(weight=len(part["y"])) as micro:
                teacher(part["x"], training=True)
                micro.backward(loss(accumulator.model, part))
            plain(part["x"], training=True)
    assert_same(statistics(teacher), statistics(plain))
    assert_same(statistics(accumulator.model), after_plain_steps(make_batch()))
    assert sum(teacher.layers[0].name in text for text in texts) == 1


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(OptionError, match="batch_norm='sync' is unknown"):
        make(batch_norm="sync")


@pytest.mark.usefixtures("eagerly")
@pytest.mark.parametrize("sizes", [(13,), (4, 4, 4, 1), (1, 12)])
def test_recalibrate_computes_the_statistics_of_the_population(sizes: tuple[int, ...]) -> None:
    model, x = make_model(), make_batch()["x"]
    parts = np.split(x, np.cumsum(sizes)[:-1])
    recalibrate(model, parts)
    assert_same(statistics(model), [x.mean((0, 1)), x.var((0, 1))])


@pytest.mark.usefixtures("eagerly")
def test_recalibrate_refuses_nothing_to_do() -> None:
    with pytest.raises(OptionError, match="no BatchNormalization"):
        recalibrate(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]), [np.ones((2, 2))])
    with pytest.raises(OptionError, match="no batch"):
        recalibrate(make_model(), [])
