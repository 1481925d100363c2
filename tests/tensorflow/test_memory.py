"""Micro-batches run one after the other."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from bigbatch.tensorflow import Accumulator


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
    Accumulator(ours, keras.optimizers.SGD(0.1), loss, 4).step(x)
    total = [tf.zeros(v.shape) for v in loop.trainable_variables]
    for start in range(0, 22, 4):
        part = x[start : start + 4]
        with tf.GradientTape() as tape:
            value = loss(loop, tf.constant(part)) * len(part) / 22
        total = [s + g for s, g in zip(total, tape.gradient(value, loop.trainable_variables), strict=True)]
    keras.optimizers.SGD(0.1).apply_gradients(zip(total, loop.trainable_variables, strict=True))
    for a, b in zip(ours.variables, loop.variables, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-5, atol=1e-6)
