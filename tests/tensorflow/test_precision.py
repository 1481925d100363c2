"""Mixed precision with the loss scale of the optimizer: unscale once, check once, step once."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from bigbatch import Step, Window
from bigbatch.tensorflow import Accumulator

WAYS = ("batch", "window", "add", "add in a graph")
Batch = tuple[np.ndarray, np.ndarray]


def make_model(policy: str) -> Any:
    keras.utils.set_random_seed(0)
    layers = keras.layers
    return keras.Sequential([keras.Input((16,)), layers.Dense(32, "tanh", dtype=policy), layers.Dense(4, dtype=policy)])


def make_optimizer(policy: str) -> Any:
    inner = keras.optimizers.SGD(0.5, momentum=0.9)
    return keras.optimizers.LossScaleOptimizer(inner) if policy == "mixed_float16" else inner


def data(size: int = 22) -> Batch:
    generator = np.random.default_rng(1)
    return generator.normal(size=(size, 16)).astype(np.float32), generator.integers(0, 4, size)


def overflowing() -> Batch:
    x, y = data()
    x[9] = 1e6  # in the third micro-batch, more than float16 holds
    return x, y


def loss(model: Any, batch: Batch) -> Any:
    logits = tf.cast(model(batch[0]), tf.float32)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(batch[1], logits))


def low_precision_loss(model: Any, batch: Batch) -> Any:
    return tf.reduce_mean((model(batch[0]) - tf.cast(tf.one_hot(batch[1], 4), model.layers[-1].compute_dtype)) ** 2)


def parts(batch: Batch) -> list[Batch]:
    return [(batch[0][k : k + 4], batch[1][k : k + 4]) for k in range(0, len(batch[1]), 4)]


class Feeder:
    def __init__(self, policy: str, way: str, loss: Any = loss, **options: Any) -> None:
        self.model, self.optimizer, self.way, self.loss = make_model(policy), make_optimizer(policy), way, loss
        self.accumulator = Accumulator(
            self.model, self.optimizer, loss, 4 if way == "batch" else None, accumulation_steps=100, **options
        )
        signature = [tf.TensorSpec([None, 16]), tf.TensorSpec([None], tf.int64)]
        self.add = tf.function(self._add, input_signature=signature) if way == "add in a graph" else self._add

    def _add(self, x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            value = self.loss(self.model, (x, y))
            scaled = self.optimizer.scale_loss(value)
        self.accumulator.add(tape.gradient(scaled, self.model.trainable_variables), weight=tf.shape(y)[0], loss=value)

    def step(self, batch: Batch) -> Step:
        if self.way == "batch":
            return self.accumulator.step(batch)
        if self.way == "window":
            return self.accumulator.step(Window(parts(batch)))
        for part in parts(batch):
            self.add(*part)
        return self.accumulator.flush()


def full_batch(policy: str, loss: Any = loss, clip_norm: float | None = None) -> tuple[Any, float, float]:
    """Makes two steps; returns the model, and the loss and the norm of the first step."""
    model, optimizer = make_model(policy), make_optimizer(policy)
    optimizer.build(model.trainable_variables)
    told = []
    for _ in range(2):
        with tf.GradientTape() as tape:
            value = loss(model, data())
            scaled = optimizer.scale_loss(value)
        found = tape.gradient(scaled, model.trainable_variables)
        scale = float(scaled) / float(value) if policy == "mixed_float16" else 1.0
        told.append((float(value), float(tf.linalg.global_norm(found)) / scale))
        if clip_norm is not None:
            found, _ = tf.clip_by_global_norm(found, clip_norm * scale)
        optimizer.apply_gradients(zip(found, model.trainable_variables, strict=True))
    return model, *told[0]


def assert_same_update(ours: Any, full: Any, policy: str, tolerance: float) -> None:
    for a, b, start in zip(ours.variables, full.variables, make_model(policy).variables, strict=True):
        update = np.linalg.norm(b.numpy() - start.numpy())
        assert np.linalg.norm(a.numpy() - b.numpy()) <= tolerance * update


EPS = {"mixed_float16": 2.0**-10, "mixed_bfloat16": 2.0**-7}


@pytest.mark.compiled
@pytest.mark.each_value
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("policy", EPS)
def test_the_update_is_that_of_the_full_batch_in_the_same_precision(policy: str, way: str) -> None:
    full, value, norm = full_batch(policy)
    feeder = Feeder(policy, way)
    steps = [feeder.step(data()) for _ in range(2)]
    assert all(step.is_applied for step in steps)
    assert steps[0].loss == pytest.approx(value, rel=EPS[policy])
    assert steps[0].grad_norm == pytest.approx(norm, rel=2 * EPS[policy])
    assert feeder.optimizer.iterations.numpy() == 2
    assert_same_update(feeder.model, full, policy, 4 * EPS[policy])


@pytest.mark.parametrize("policy", EPS)
def test_a_loss_in_low_precision(policy: str) -> None:
    full, value, _ = full_batch(policy, low_precision_loss)
    feeder = Feeder(policy, "batch", low_precision_loss)
    assert feeder.step(data()).loss == pytest.approx(value, rel=2 * EPS[policy])
    assert feeder.step(data()).is_applied
    assert_same_update(feeder.model, full, policy, 8 * EPS[policy])


@pytest.mark.parametrize("way", ["batch", "add"])
def test_clip_norm_acts_on_the_unscaled_gradient(way: str) -> None:
    full, _, norm = full_batch("mixed_float16", clip_norm=0.1)
    assert norm > 0.2
    feeder = Feeder("mixed_float16", way, clip_norm=0.1)
    assert feeder.step(data()).grad_norm == pytest.approx(norm, rel=2e-3)
    feeder.step(data())
    assert_same_update(feeder.model, full, "mixed_float16", 4e-3)


def test_clip_value_acts_on_the_unscaled_gradient() -> None:
    feeder = Feeder("mixed_float16", "batch", clip_value=0.01)
    feeder.step(data())
    moved = [
        np.abs(a.numpy() - b.numpy()).max()
        for a, b in zip(feeder.model.variables, make_model("mixed_float16").variables, strict=True)
    ]
    assert max(moved) == pytest.approx(0.5 * 0.01, rel=1e-4)


@pytest.mark.parametrize(
    ("way", "options"), [*((way, {}) for way in WAYS), ("batch", {"clip_norm": 0.3}), ("batch", {"clip_value": 0.3})]
)
def test_an_overflow_in_any_micro_batch_skips_the_whole_step(way: str, options: dict[str, float]) -> None:
    feeder = Feeder("mixed_float16", way, **options)
    assert feeder.step(data()).is_applied
    scale = feeder.optimizer.dynamic_scale.numpy()
    before = [v.numpy() for v in (*feeder.model.variables, *feeder.optimizer.inner_optimizer.variables)]

    step = feeder.step(overflowing())
    assert not step.is_applied
    for now, then in zip((*feeder.model.variables, *feeder.optimizer.inner_optimizer.variables), before, strict=True):
        np.testing.assert_array_equal(now.numpy(), then)
    assert feeder.optimizer.dynamic_scale.numpy() == scale / 2
    assert feeder.optimizer.iterations.numpy() == 1

    clean = Feeder("mixed_float16", way, **options)
    for _ in range(2):
        clean.step(data())
    assert feeder.step(data()).is_applied
    assert feeder.optimizer.iterations.numpy() == 2
    assert_same_update(feeder.model, clean.model, "mixed_float16", 4e-3)


def test_scale_grows_after_a_number_of_steps() -> None:
    model = make_model("mixed_float16")
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), 8.0, dynamic_growth_steps=2)
    accumulator = Accumulator(model, optimizer, loss, 4)
    scales = []
    for _ in range(5):
        accumulator.step(data())
        scales.append(float(optimizer.dynamic_scale.numpy()))
    assert scales == [8, 16, 16, 32, 32]


def test_large_weights_do_not_overflow() -> None:
    feeder = Feeder("mixed_float16", "batch")
    feeder.accumulator.weight = lambda batch: 5000 * tf.shape(batch[1])[0]
    assert feeder.step(data()).is_applied
    other = Feeder("mixed_float16", "batch")
    other.step(data())
    assert_same_update(feeder.model, other.model, "mixed_float16", 2e-3)
