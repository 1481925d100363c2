"""Small micro-batches run in parallel; large ones, and those whose order matters, one after the other."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from bigbatch.tensorflow import Accumulator
from bigbatch.tensorflow.loop import _MAX_PARALLEL as MAX_PARALLEL
from bigbatch.tensorflow.loop import _MAX_PARALLEL_BYTES as MAX_PARALLEL_BYTES
from bigbatch.tensorflow.loop import _num_parallel as num_parallel


def graph_of(loss: Any, *specs: tf.TypeSpec) -> tf.Graph:
    return tf.function(loss, autograph=False).get_concrete_function(*specs).graph


def rows(*sizes: int | None) -> tf.TensorSpec:
    return tf.TensorSpec(sizes, tf.float32)


def test_small_micro_batches_run_in_parallel() -> None:
    assert num_parallel(graph_of(lambda x: x * 2, rows(None, 8)), 4) == MAX_PARALLEL


@pytest.mark.parametrize("share", [1, 3])
def test_parallel_micro_batches_stay_below_the_limit(share: int) -> None:
    """Input, product and output are large tensors."""
    size = MAX_PARALLEL_BYTES // share // 3 // 4 // 1024
    graph = graph_of(lambda x: x * 2, rows(None, 1024))
    assert num_parallel(graph, size - 1) == share
    assert num_parallel(graph, 10 * size) == 1


def test_unknown_sizes_run_one_by_one() -> None:
    assert num_parallel(graph_of(lambda x: x * 2, rows(None, None)), 4) == 1
    assert num_parallel(graph_of(lambda x: x * 2, tf.TensorSpec(None)), 4) == 1


def test_stateful_operations_run_one_by_one() -> None:
    variable = tf.Variable(1.0)
    assert num_parallel(graph_of(lambda x: x * variable, rows(None, 8)), 4) == MAX_PARALLEL
    assert num_parallel(graph_of(lambda x: x * variable.assign_add(1.0), rows(None, 8)), 4) == 1
    assert num_parallel(graph_of(lambda x: x * tf.random.uniform([]), rows(None, 8)), 4) == 1


@pytest.mark.parametrize("layer", [keras.layers.Dropout(0.5), keras.layers.BatchNormalization()], ids=["seed", "mean"])
@pytest.mark.filterwarnings("ignore:.*BatchNormalization:bigbatch.BigBatchWarning")
def test_layers_that_update_variables_run_in_order(layer: Any) -> None:
    """A step equals a plain loop over the micro-batches, including random numbers and running averages."""
    x = np.random.default_rng(0).normal(size=(22, 6)).astype("float32")

    def loss(model: Any, x: Any) -> Any:
        return tf.reduce_mean(tf.square(model(x, training=True)))

    def make() -> Any:
        keras.utils.set_random_seed(1)
        return keras.Sequential([keras.Input((6,)), type(layer).from_config(layer.get_config()), keras.layers.Dense(3)])

    ours, loop = make(), make()
    Accumulator(ours, keras.optimizers.SGD(0.1), loss, 4, batch_norm="micro_batch").step(x)
    total = [tf.zeros(v.shape) for v in loop.trainable_variables]
    for start in range(0, 22, 4):
        part = x[start : start + 4]
        with tf.GradientTape() as tape:
            value = loss(loop, tf.constant(part)) * len(part) / 22
        total = [s + g for s, g in zip(total, tape.gradient(value, loop.trainable_variables), strict=True)]
    keras.optimizers.SGD(0.1).apply_gradients(zip(total, loop.trainable_variables, strict=True))
    for a, b in zip(ours.variables, loop.variables, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-5, atol=1e-6)
