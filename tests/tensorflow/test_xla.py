"""add() in the user's own graph that XLA compiles, which neither prints nor raises."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from bigbatch.tensorflow import Accumulator

from .training import flat

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(11, 3)), rng.normal(size=(11, 2))
pytestmark = pytest.mark.usefixtures("float64")


def make_model() -> Any:
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, "tanh")])


def loss(model: Any, x: Any, y: Any) -> Any:
    return tf.reduce_mean((model(x) - y) ** 2)


def make(**options: Any) -> tuple[Accumulator, Any]:
    optimizer = options.pop("optimizer", keras.optimizers.SGD(0.1))
    accumulator = Accumulator(make_model(), optimizer, accumulation_steps=2, **options)

    @tf.function(jit_compile=True, reduce_retracing=True)
    def add(x: Any, y: Any, weight: Any) -> None:
        with tf.GradientTape() as tape:
            value = loss(accumulator.model, x, y)
        found = tape.gradient(value, accumulator.model.trainable_variables)
        accumulator.add(found, weight=weight, loss=value)

    return accumulator, lambda x, y, weight: add(tf.constant(x), tf.constant(y), tf.constant(weight, tf.float64))


def full_batch(x: Any = X, y: Any = Y, clip_norm: float = 1e9) -> Any:
    model = make_model()
    with tf.GradientTape() as tape:
        value = loss(model, x, y)
    found, _ = tf.clip_by_global_norm(tape.gradient(value, model.trainable_variables), clip_norm)
    for v, g in zip(model.trainable_variables, found, strict=True):
        v.assign_sub(0.1 * g)
    return model


def test_windows_are_the_full_batch() -> None:
    options = {"clip_norm": 0.01}
    accumulator, add = make(**options)
    add(X[:5], Y[:5], 5)
    add(X[5:], Y[5:], 6)
    assert accumulator.last_step.is_applied
    assert accumulator.last_step.weight == 11
    np.testing.assert_allclose(flat(accumulator.model), flat(full_batch(**options)), rtol=1e-12)
    add(X[:5], Y[:5], 5)
    assert accumulator.flush().weight == 5


@pytest.mark.parametrize("bad", ["weight", "gradient"])
def test_bad_input_is_not_applied(bad: str) -> None:
    """The next window starts clean."""
    accumulator, add = make()
    before = flat(accumulator.model)
    add(X[:5] * (np.inf if bad == "gradient" else 1), Y[:5], -5 if bad == "weight" else 5)
    add(X[5:], Y[5:], 6)
    assert not accumulator.last_step.is_applied
    np.testing.assert_array_equal(flat(accumulator.model), before)
    add(X[:5], Y[:5], 5)
    add(X[5:], Y[5:], 6)
    np.testing.assert_allclose(flat(accumulator.model), flat(full_batch()), rtol=1e-12)


def test_a_weight_of_zero_and_an_optimizer_that_scales() -> None:
    accumulator, add = make(optimizer=keras.optimizers.SGD(0.1, loss_scale_factor=1.0))
    add(X[:5] * np.nan, Y[:5], 0)
    add(X[5:], Y[5:], 6)
    np.testing.assert_allclose(flat(accumulator.model), flat(full_batch(X[5:], Y[5:])), rtol=1e-12)
