"""Steps that are skipped because something is not finite, as `bigbatch train` asks for. `fit` skips none."""

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, losses

from bigbatch.keras import accumulate
from bigbatch.keras.backends.step import FitStep

from .cases import sgd

X = np.random.default_rng(0).normal(size=(7, 2)).astype("float32")
Y = X.sum(1, keepdims=True)


def model(optimizer: Any, *, loss: bool = False, gradient: bool = True) -> Any:
    """A compiled model that skips a step if these are not finite."""
    keras.utils.set_random_seed(0)
    found = keras.Sequential([layers.Input((2,)), layers.Dense(1)])
    found.compile(optimizer, losses.MeanAbsoluteError())
    step = FitStep.of(accumulate(found, 3))
    assert step is not None
    step.needs_finite_gradient, step.needs_finite_loss = gradient, loss
    return found


def state(model: Any) -> list[np.ndarray]:
    return [keras.ops.convert_to_numpy(v).copy() for v in (*model.variables, *model.optimizer.variables)]


def with_one(value: float) -> np.ndarray:
    bad = X.copy()
    bad[4, 1] = value
    return bad


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    ours, good = (model(keras.optimizers.Adam(0.1, weight_decay=0.1, use_ema=True)) for _ in range(2))
    for x in (X, with_one(bad), X):
        loss = ours.train_on_batch(x, Y)
        assert np.isfinite(loss) == (x is X)
    for _ in range(2):
        good.train_on_batch(X, Y)
    assert ours.optimizer.iterations == 2
    assert all(map(np.array_equal, state(ours), state(good)))


def test_fit_applies_it_as_without_accumulate() -> None:
    """The control: the same step without the policy."""
    ours = model(sgd(), gradient=False)
    ours.train_on_batch(with_one(np.nan), Y)
    assert ours.optimizer.iterations == 1
    assert np.isnan(ours.get_weights()[0]).any()


@pytest.mark.parametrize("needs_finite_loss", [False, True])
@pytest.mark.parametrize("is_scaled", [False, True])
def test_a_loss_that_is_not_finite_with_a_finite_gradient(needs_finite_loss: bool, is_scaled: bool) -> None:
    """The absolute error of an infinite target has a gradient of one."""
    optimizer = keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=4.0) if is_scaled else sgd()
    ours = model(optimizer, loss=needs_finite_loss)
    y = Y.copy()
    y[1] = np.inf
    assert ours.train_on_batch(X, y) == np.inf
    assert ours.optimizer.iterations == (0 if needs_finite_loss else 1)
    assert np.isfinite(ours.get_weights()[0]).all()


def test_a_loss_scale_is_lowered() -> None:
    ours = model(keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=4.0))
    for x in (X, with_one(np.nan)):
        ours.train_on_batch(x, Y)
    assert ours.optimizer.iterations == 1
    assert ours.optimizer.dynamic_scale == 2.0


def test_large_numbers_are_finite() -> None:
    """Each number of the gradient is about 2e38, and their sum is not finite in float32."""
    ours = model(sgd(0.0))
    ours.layers[-1].kernel.assign(np.zeros((2, 1)))
    ours.train_on_batch(np.full_like(X, 2e38), np.ones_like(Y))
    assert ours.optimizer.iterations == 1
