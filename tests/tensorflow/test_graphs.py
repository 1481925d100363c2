"""Few graphs are made, however the shapes of the batches vary, and every step is exact."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from bigbatch import Window
from bigbatch.tensorflow import Accumulator
from tests.problems import IGNORED, VOCABULARY

from .training import Language, flat, mirrored

Batch = dict[str, Any]
pytestmark = pytest.mark.usefixtures("float64")
LENGTHS = (7, 12, 5, 30, 1, 19)


def text(length: int, num: int = 5, seed: int = 0) -> Batch:
    rng = np.random.default_rng([seed, length, num])
    y = rng.integers(0, VOCABULARY, (num, length))
    y[:, 1:] = np.where(rng.random((num, length - 1)) < 0.4, IGNORED, y[:, 1:])
    return {"x": rng.integers(0, VOCABULARY, (num, length)), "y": y}


def num_tokens(batch: Batch) -> Any:
    return tf.math.count_nonzero(batch["y"] != IGNORED)


def loss(model: Any, batch: Batch) -> Any:
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.maximum(batch["y"], 0), model(batch["x"])[0])
    kept = tf.cast(batch["y"] != IGNORED, losses.dtype)
    return tf.reduce_sum(losses * kept) / tf.reduce_sum(kept)


def language() -> Any:
    keras.utils.set_random_seed(0)
    model = Language()
    model(np.zeros((1, 1), np.int64))
    return model


def step_plainly(model: Any, loss: Any, batch: Any) -> None:
    with tf.GradientTape() as tape:
        value = loss(model, batch)
    found = tape.gradient(value, model.trainable_variables)
    for v, g in zip(model.trainable_variables, found, strict=True):
        if g is not None:
            v.assign_sub(0.1 * tf.convert_to_tensor(g))


def assert_same(model: Any, full: Any) -> None:
    np.testing.assert_allclose(flat(model), flat(full), rtol=1e-10, atol=1e-13)


def num_graphs(accumulator: Accumulator, name: str) -> int:
    """The number of graphs whose name starts like this."""
    every = [*accumulator._graphs.made.items(), *accumulator._window.prepare_sums(1).graphs.made.items()]
    return len({id(made[0]) for ((kind, *_), _), made in every if name in str(kind)})


@pytest.mark.parametrize("options", [{}, {"jit_compile": True}], ids=["plain", "xla"])
def test_varying_lengths_take_two_graphs(options: dict[str, bool]) -> None:
    model, full = language(), language()
    accumulator = Accumulator(model, keras.optimizers.SGD(0.1), loss, 2, weight=num_tokens, **options)
    for length in LENGTHS[: 3 if options else None]:
        accumulator.step(text(length))
        step_plainly(full, loss, text(length))
        assert_same(model, full)
    assert accumulator.num_traces == 2
    assert num_graphs(accumulator, "batch") == 2


def test_one_length_takes_one_graph() -> None:
    accumulator = Accumulator(language(), keras.optimizers.SGD(0.1), loss, 2, weight=num_tokens)
    for num in (5, 3, 8):
        accumulator.step(text(7, num))
    assert accumulator.num_traces == 1


def test_windows_of_varying_lengths() -> None:
    """Each micro-batch is padded to its own length."""
    model, full = language(), language()
    accumulator = Accumulator(model, keras.optimizers.SGD(0.1), loss, weight=num_tokens)
    for lengths in (LENGTHS[:3], LENGTHS[3:]):
        micro_batches = [text(length, 2) for length in lengths]
        accumulator.step(Window(micro_batches))
        padded = [
            {
                name: np.pad(a, ((0, 0), (0, max(lengths) - a.shape[1])), constant_values=IGNORED * (name == "y"))
                for name, a in each.items()
            }
            for each in micro_batches
        ]
        step_plainly(full, loss, {name: np.concatenate([each[name] for each in padded]) for name in padded[0]})
        assert_same(model, full)
    assert num_graphs(accumulator, "add") == 2
    assert num_graphs(accumulator, "weigh") == 2


def test_replicas_with_different_lengths() -> None:
    with mirrored().scope():
        model = language()
        accumulator = Accumulator(model, keras.optimizers.SGD(0.1), loss, 2, weight=num_tokens)
    full = language()
    for one, other in ((7, 4), (3, 9), (9, 3), (11, 11)):
        parts = [text(one, 3), text(other, 2)]

        def own(context: Any, parts: list[Batch] = parts) -> Batch:
            return {name: tf.constant(a) for name, a in parts[context.replica_id_in_sync_group].items()}

        accumulator.step(mirrored().experimental_distribute_values_from_function(own))
        weights = [float(num_tokens(part)) for part in parts]

        def union(model: Any, _: Any, parts: list[Batch] = parts, weights: list[float] = weights) -> Any:
            return sum(w * loss(model, part) for w, part in zip(weights, parts, strict=True)) / sum(weights)

        step_plainly(full, union, None)
        assert_same(model, full)
    assert accumulator.num_traces <= 3


def images(model: Any, batch: Any) -> Any:
    return tf.reduce_mean((model(batch) - tf.reduce_mean(batch, [1, 2, 3])[:, None]) ** 2)


def test_two_varying_axes_take_three_graphs() -> None:
    def convolution() -> Any:
        keras.utils.set_random_seed(0)
        layers = keras.layers
        return keras.Sequential(
            [keras.Input((None, None, 2)), layers.Conv2D(3, 2), layers.GlobalMaxPooling2D(), layers.Dense(1)]
        )

    model, full = convolution(), convolution()
    accumulator = Accumulator(model, keras.optimizers.SGD(0.1), images, 2)
    rng = np.random.default_rng(0)
    for height, width in ((4, 4), (5, 4), (7, 4), (4, 6), (9, 8), (3, 3)):
        batch = rng.normal(size=(5, height, width, 2))
        accumulator.step(batch)
        step_plainly(full, images, batch)
        assert_same(model, full)
    assert accumulator.num_traces == 3


def test_loss_that_needs_a_static_size_gets_a_graph_per_size() -> None:
    """range(None) raises a TypeError, so each size needs its own graph."""

    def sizes(model: Any, batch: Any) -> Any:
        return tf.reduce_mean(sum(model(batch[:, t]) ** 2 for t in range(batch.shape[1])))

    def dense() -> Any:
        keras.utils.set_random_seed(0)
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, "tanh")])

    model, full = dense(), dense()
    accumulator = Accumulator(model, keras.optimizers.SGD(0.1), sizes, 2)
    for length in (4, 2, 5, 4, 2):
        batch = np.random.default_rng(length).normal(size=(5, length, 3))
        accumulator.step(batch)
        step_plainly(full, sizes, batch)
        assert_same(model, full)
    assert num_graphs(accumulator, "batch") == 3


def test_shape_that_the_model_refuses_changes_nothing() -> None:
    """TensorFlow finds the error when the graph for all shapes runs, as with reduce_retracing."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    accumulator = Accumulator(model, keras.optimizers.SGD(0.1), lambda model, x: tf.reduce_mean(model(x)), 2)
    accumulator.step(np.ones((5, 3)))
    before = flat(model)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"size-incompatible: In\[0\]: \[2,4\], In\[1\]: \[3,2\]"):
        accumulator.step(np.ones((5, 4)))
    np.testing.assert_array_equal(flat(model), before)
    assert accumulator.step(np.ones((4, 3))).is_applied
