"""All kinds of optimizers: Keras 3, tf_keras new and legacy, and TensorFlow 1 in eager code."""

from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from bigbatch import OptionError, Window
from bigbatch.tensorflow import Accumulator
from bigbatch.tensorflow.distributed.replicas import as_tf_variable

from .training import mirrored

v1 = tf.compat.v1.train
KERAS_3: dict[str, Callable[[], Any]] = {
    "SGD": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "Adam": lambda: keras.optimizers.Adam(0.01),
    "AdamW": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.01, momentum=0.5),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "Nadam": lambda: keras.optimizers.Nadam(0.01),
}
TF_KERAS: dict[str, Callable[[], Any]] = {
    "SGD": lambda: tf_keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.3),
    "Adam": lambda: tf_keras.optimizers.Adam(0.01),
    "AdamW": lambda: tf_keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "legacy SGD": lambda: tf_keras.optimizers.legacy.SGD(0.1, momentum=0.9, global_clipnorm=0.3),
    "legacy Adam": lambda: tf_keras.optimizers.legacy.Adam(0.01),
}
TENSORFLOW_1: dict[str, Callable[[], Any]] = {
    "GradientDescentOptimizer": lambda: v1.GradientDescentOptimizer(0.1),
    "MomentumOptimizer": lambda: v1.MomentumOptimizer(0.1, 0.9),
    "AdamOptimizer": lambda: v1.AdamOptimizer(0.01),
}


def make_model(library: Any) -> Any:
    library.utils.set_random_seed(0)
    layers = library.layers
    return library.Sequential([library.Input((5,)), layers.Dense(7, "tanh"), layers.Dense(3)])


def make_batch(size: int = 11) -> tuple[Any, Any]:
    generator = np.random.default_rng(5)
    return generator.normal(size=(11, 5)).astype(np.float32)[:size], generator.integers(0, 3, 11)[:size]


def loss(model: Any, batch: Any) -> Any:
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(batch[1], model(batch[0])))


def parts(batch: Any) -> list[Any]:
    return [(batch[0][k : k + 4], batch[1][k : k + 4]) for k in range(0, len(batch[1]), 4)]


def add(accumulator: Accumulator, part: Any) -> None:
    with tf.GradientTape() as tape:
        value = loss(accumulator.model, part)
    found = tape.gradient(value, accumulator.model.trainable_variables)
    accumulator.add(found, weight=tf.shape(part[1])[0], loss=value)


def assert_equals_the_full_batch(library: Any, make_optimizer: Callable[[], Any], in_graph: bool) -> None:
    """Makes steps in all ways, one after the other and twice, in float32."""
    full, optimizer = make_model(library), make_optimizer()
    is_v1 = isinstance(optimizer, v1.Optimizer)
    variables = [as_tf_variable(v) for v in full.trainable_variables] if is_v1 else full.trainable_variables
    ours = make_model(library)
    start = [v.numpy() for v in ours.trainable_variables]
    accumulator = Accumulator(ours, make_optimizer(), loss, 4, accumulation_steps=3)
    signature = [(tf.TensorSpec([None, 5]), tf.TensorSpec([None], tf.int64))]
    adding = tf.function(lambda part: add(accumulator, part), input_signature=signature)
    ways: list[Callable[[], Any]] = [
        lambda: accumulator.step(make_batch()),
        lambda: accumulator.step(Window(parts(make_batch()))),
        lambda: [add(accumulator, part) for part in parts(make_batch())],
        *([lambda: [adding(part) for part in parts(make_batch())]] if in_graph else []),
        lambda: accumulator.step(make_batch()),
        lambda: accumulator.step(Window(parts(make_batch()))),
        lambda: [*(add(accumulator, part) for part in parts(make_batch())[:2]), accumulator.flush()],
    ]
    for number, way in enumerate(ways, 1):
        batch = make_batch() if number < len(ways) else make_batch(8)
        with tf.GradientTape() as tape:
            value = loss(full, batch)
        found = tape.gradient(value, full.trainable_variables)
        optimizer.apply_gradients(zip(found, variables, strict=True))
        way()
        assert accumulator.num_steps.numpy() == number
    update = np.concatenate([np.ravel(v.numpy() - s) for v, s in zip(full.trainable_variables, start, strict=True)])
    error = np.concatenate(
        [
            np.ravel(a.numpy() - b.numpy())
            for a, b in zip(ours.trainable_variables, full.trainable_variables, strict=True)
        ]
    )
    assert np.linalg.norm(error) <= 1e-5 * np.linalg.norm(update)
    if hasattr(optimizer, "iterations"):
        assert accumulator.optimizer.iterations.numpy() == len(ways)


def some(names: Iterable[str], *quick: str) -> list[Any]:
    """Optimizers of one library are stepped in the same way, so the quick run has a few of them."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.compiled
@pytest.mark.parametrize("name", some(KERAS_3, "Adam", "Nadam"))
def test_keras_3(name: str) -> None:
    assert_equals_the_full_batch(keras, KERAS_3[name], in_graph=name == "Adam")


@pytest.mark.compiled
@pytest.mark.parametrize("name", some(TF_KERAS, "SGD", "AdamW", "legacy SGD"))
def test_tf_keras(name: str) -> None:
    assert_equals_the_full_batch(tf_keras, TF_KERAS[name], in_graph="Adam" in name)


@pytest.mark.compiled
@pytest.mark.each_value
@pytest.mark.parametrize("name", TENSORFLOW_1)
@pytest.mark.parametrize("library", [keras, tf_keras], ids=["keras", "tf_keras"])
def test_tensorflow_1_in_eager_code(name: str, library: Any) -> None:
    assert_equals_the_full_batch(library, TENSORFLOW_1[name], in_graph=False)


@pytest.mark.parametrize("legacy", [False, True], ids=["new", "legacy"])
@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "fixed"])
def test_loss_scale_of_tf_keras(legacy: bool, dynamic: bool, capfd: pytest.CaptureFixture[str]) -> None:
    optimizers = tf_keras.optimizers.legacy if legacy else tf_keras.optimizers
    scale = {"initial_scale": 1024.0, "dynamic": dynamic}
    optimizer = tf_keras.mixed_precision.LossScaleOptimizer(optimizers.SGD(0.5, momentum=0.9), **scale)
    model, full = make_model(tf_keras), make_model(tf_keras)
    accumulator = Accumulator(model, optimizer, loss, 4)
    plain = optimizers.SGD(0.5, momentum=0.9)
    for _ in range(2):
        with tf.GradientTape() as tape:
            value = loss(full, make_batch())
        plain.apply_gradients(
            zip(tape.gradient(value, full.trainable_variables), full.trainable_variables, strict=True)
        )
        assert accumulator.step(make_batch()).is_applied
    for a, b in zip(model.variables, full.variables, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-5, atol=1e-6)
    before = [v.numpy() for v in model.variables]
    x, y = make_batch()
    x[9] = np.inf
    assert not accumulator.step((x, y)).is_applied
    for now, then in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(now.numpy(), then)
    assert float(optimizer.loss_scale) == (512 if dynamic else 1024)
    assert ("a step was skipped" in capfd.readouterr().err) == (not dynamic)


def test_batches_that_reach_different_variables() -> None:
    """Two kinds of batches take turns and reach different variables; the optimizer steps outside graphs."""

    class Two(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (tf.Variable(1.0) for _ in range(3))

    def loss(model: Two, batch: dict[str, Any]) -> Any:
        return tf.reduce_mean(model.a * batch["x"] if "x" in batch else model.b * batch["y"])

    model = Two()
    accumulator = Accumulator(model, v1.GradientDescentOptimizer(1.0), loss, 2)
    for batch in ({"x": np.ones(3, np.float32)}, {"y": np.ones(3, np.float32)}) * 2:
        accumulator.step(batch)
    assert [v.numpy() for v in (model.a, model.b, model.c)] == [-1, -1, 1]


def test_accumulation_in_the_optimizer_is_refused() -> None:
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=4)
    for wrapped in (optimizer, keras.optimizers.LossScaleOptimizer(optimizer)):
        with pytest.raises(OptionError, match="gradient_accumulation_steps=4"):
            Accumulator(make_model(keras), wrapped, loss, 4)


@pytest.mark.compiled
def test_tensorflow_1_in_a_graph_is_refused() -> None:
    accumulator = Accumulator(make_model(keras), v1.AdamOptimizer(0.01), loss, accumulation_steps=3)
    for call in (lambda: add(accumulator, make_batch()), accumulator.flush):
        with pytest.raises(OptionError, match="AdamOptimizer steps in eager code only"):
            tf.function(call, autograph=False)()


def test_tensorflow_1_on_several_replicas_is_refused() -> None:
    with mirrored().scope():
        model = make_model(keras)
    with pytest.raises(OptionError, match=r"AdamOptimizer reduces gradients by itself.*2 replicas"):
        Accumulator(model, v1.AdamOptimizer(0.01), loss, 4)


@pytest.mark.parametrize("way", ["batch", "window", "add"])
def test_tensorflow_1_optimizers_advance_the_global_step(way: str) -> None:
    """The step advances once per step, and not if a step is skipped."""
    number = v1.get_or_create_global_step()
    number.assign(7)
    accumulator = Accumulator(make_model(keras), v1.GradientDescentOptimizer(0.1), loss, 4, accumulation_steps=3)
    x, y = make_batch()
    for batch in ((x, y), (x * np.inf, y), (x, y)):
        if way == "batch":
            accumulator.step(batch)
        elif way == "window":
            accumulator.step(Window(parts(batch)))
        else:
            for part in parts(batch):
                add(accumulator, part)
    assert number.numpy() == 9
