"""`gradients(batch)`: the gradient of the whole batch, without a step."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from bigbatch import OrderError, Window
from bigbatch.tensorflow import Accumulator

from .test_distribute import loss, make, make_batch, make_model, on_replicas
from .training import cut, flat

pytestmark = pytest.mark.usefixtures("float64")


def full(model: Any, batch: Any) -> list[Any]:
    with tf.GradientTape() as tape:
        value = loss(model, batch)
    return tape.gradient(value, model.trainable_variables)


def assert_same(found: list[Any], expected: list[Any], tolerance: float = 1e-12) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(tf.convert_to_tensor(one), tf.convert_to_tensor(other), rtol=tolerance, atol=1e-14)


@pytest.mark.parametrize("is_eager", [True, False])
def test_it_is_that_of_the_full_batch_and_nothing_is_stepped(is_eager: bool) -> None:
    tf.config.run_functions_eagerly(is_eager)
    try:
        accumulator = Accumulator(make_model(), keras.optimizers.Adam(0.1), loss, 4)
        before, batch = flat(accumulator.model), make_batch(13)
        found, step = accumulator.gradients(batch)
    finally:
        tf.config.run_functions_eagerly(False)
    expected = full(make_model(), batch)
    assert_same(found, expected)
    assert step.grad_norm == pytest.approx(float(tf.linalg.global_norm(expected)), rel=1e-12)
    assert step.loss == pytest.approx(float(loss(make_model(), batch)), rel=1e-12)
    assert (step.is_applied, step.num_micro_batches, step.weight) == (False, 4, 13)
    np.testing.assert_array_equal(flat(accumulator.model), before)
    assert accumulator.num_steps.numpy() == accumulator.optimizer.iterations.numpy() == 0
    assert accumulator.step(batch).is_applied


@pytest.mark.usefixtures("eagerly")
def test_of_a_window_and_clipped() -> None:
    batch = make_batch(13)
    accumulator = Accumulator(make_model(), keras.optimizers.SGD(0.1), loss, clip_norm=0.1)
    found, step = accumulator.gradients(Window(cut(batch, 4)))
    expected, norm = tf.clip_by_global_norm(full(make_model(), batch), 0.1)
    assert_same(found, expected)
    assert step.grad_norm == pytest.approx(float(norm), rel=1e-12)
    assert accumulator.gradients(Window(cut(batch, 4)))[1].loss == step.loss


@pytest.mark.parametrize("way", ["batch", "window"])
def test_on_replicas_it_is_reduced(way: str) -> None:
    accumulator, batch = make(4 if way == "batch" else None), make_batch(13)
    whole = on_replicas(batch, (11, 2)) if way == "batch" else Window(cut(batch, 4))
    assert_same(accumulator.gradients(whole)[0], full(make_model(), batch))


@pytest.mark.usefixtures("eagerly")
def test_the_loss_scale_is_taken_out() -> None:
    keras.config.set_floatx("float32")
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=2.0**20)
    accumulator, batch = Accumulator(make_model(), optimizer, loss, 4), make_batch(13)
    assert_same(accumulator.gradients(batch)[0], full(make_model(), batch), 1e-4)
    assert float(optimizer.dynamic_scale) == 2.0**20


@pytest.mark.usefixtures("eagerly")
def test_sharpness_aware_minimisation_as_in_a_plain_loop() -> None:
    def sam(model: Any, optimizer: Any, gradients_of: Any) -> Any:
        for batch in (make_batch(13), make_batch(9)):
            first = gradients_of(batch)
            by = [0.05 * g / tf.linalg.global_norm(first) for g in first]
            for variable, move in zip(model.trainable_variables, by, strict=True):
                variable.assign_add(move)
            second = gradients_of(batch)
            for variable, move in zip(model.trainable_variables, by, strict=True):
                variable.assign_sub(move)
            optimizer.apply_gradients(zip(second, model.trainable_variables, strict=True))
        return flat(model)

    accumulator = Accumulator(make_model(), keras.optimizers.SGD(0.1), loss, 4)
    ours = sam(accumulator.model, accumulator.optimizer, lambda batch: accumulator.gradients(batch)[0])
    model = make_model()
    np.testing.assert_allclose(ours, sam(model, keras.optimizers.SGD(0.1), lambda b: full(model, b)), rtol=1e-12)


@pytest.mark.usefixtures("eagerly")
def test_none_sparse_and_not_finite() -> None:
    class Model(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.unused = tf.Variable(tf.ones([20_000, 2], tf.float64)), tf.Variable(1.0)

    def of_rows(model: Model, ids: Any) -> Any:
        return tf.reduce_mean(tf.reduce_sum(tf.gather(model.table, ids[:, 0]), 1) / tf.cast(ids[:, 1], tf.float64))

    accumulator = Accumulator(Model(), tf_keras.optimizers.SGD(0.1), of_rows, 2)
    (table, unused), step = accumulator.gradients(np.array([[3, 1], [3, 1], [5, 1]]))
    assert unused is None
    assert isinstance(table, tf.IndexedSlices)
    rows = dict(zip(table.indices.numpy(), table.values.numpy()[:, 0], strict=True))
    assert rows == pytest.approx({3: 2 / 3, 5: 1 / 3}, rel=1e-12)
    _, step = accumulator.gradients(np.array([[3, 0]]))
    assert not np.isfinite(step.grad_norm)


@pytest.mark.usefixtures("eagerly")
def test_refused_in_the_middle_of_a_window() -> None:
    accumulator = Accumulator(make_model(), keras.optimizers.SGD(0.1), loss, 4, accumulation_steps=3)
    accumulator.add(full(accumulator.model, make_batch(4)), weight=4)
    with pytest.raises(OrderError, match=r"call flush\(\) before gradients\(\)"):
        accumulator.gradients(make_batch(13))
