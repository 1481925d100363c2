"""Calls in any order: batches, windows, micro-batches, flushes, non-finite gradients, bad input.

A plain reference in NumPy and float64 trains on whole batches. hypothesis tries twelve examples, or
BIGBATCH_EXAMPLES.
"""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from bigbatch import BigBatchError, Window
from bigbatch.tensorflow import Accumulator
from tests.examples import examples

STEPS, RATE, WIDTH = 3, 0.0625, 3
few = settings(
    max_examples=examples(12),
    stateful_step_count=15,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
sizes = st.integers(1, 7)
seeds = st.integers(0, 1000)
Batch = tuple[np.ndarray, np.ndarray]


class Line(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = tf.Variable(np.zeros(WIDTH))


def loss(model: Line, batch: Any) -> Any:
    return tf.reduce_mean((tf.linalg.matvec(batch[0], model.w) - batch[1]) ** 2)


def make_batch(seed: int, size: int) -> Batch:
    draw = np.random.default_rng(seed)
    return draw.normal(size=(size, WIDTH)), draw.normal(size=size)


class Machine(RuleBasedStateMachine):
    accumulator: Accumulator  # one for all examples, so that its graphs are traced once

    @staticmethod
    def mean(gradients: list[np.ndarray], weights: list[float]) -> np.ndarray:
        return np.average(gradients, axis=0, weights=weights)

    def __init__(self) -> None:
        super().__init__()
        self.accumulator.flush()
        self.accumulator.model.w.assign(np.zeros(WIDTH))
        self.plain = np.zeros(WIDTH)
        self.window: list[tuple[np.ndarray, float]] = []
        self.num_steps = int(self.accumulator.num_steps.numpy())

    def gradient(self, batch: Batch) -> np.ndarray:
        x, y = batch
        return 2 * x.T @ (x @ self.plain - y) / len(y)

    def learn(self, window: list[tuple[np.ndarray, float]]) -> None:
        self.num_steps += 1
        counted = [(g, w) for g, w in window if w]
        if counted and all(np.isfinite(g).all() for g, _ in counted):
            gradients, weights = zip(*counted, strict=True)
            self.plain = self.plain - RATE * self.mean(list(gradients), list(weights))

    @rule(seed=seeds, size=sizes, is_bad=st.booleans())
    def step(self, seed: int, size: int, is_bad: bool) -> None:
        x, y = make_batch(seed, size)
        x[seed % size] = np.nan if is_bad else x[seed % size]
        if self.window:
            with pytest.raises(BigBatchError, match="is open"):
                self.accumulator.step((x, y))
            return
        assert self.accumulator.step((x, y)).is_applied != is_bad
        self.learn([(self.gradient((x, y)), size)])

    @rule(parts=st.lists(st.tuples(seeds, sizes), min_size=1, max_size=4))
    def step_a_window(self, parts: list[tuple[int, int]]) -> None:
        micro_batches = [make_batch(*part) for part in parts]
        if self.window:
            with pytest.raises(BigBatchError, match="is open"):
                self.accumulator.step(Window(micro_batches))
            return
        assert self.accumulator.step(Window(micro_batches)).is_applied
        self.learn([(self.gradient(each), len(each[1])) for each in micro_batches])

    @rule(parts=st.lists(st.tuples(seeds, sizes), min_size=1, max_size=2 * STEPS), zero=st.booleans())
    def add(self, parts: list[tuple[int, int]], zero: bool) -> None:
        for number, part in enumerate(parts):
            batch = make_batch(*part)
            weight = 0 if zero and not number else len(batch[1])
            with tf.GradientTape() as tape:
                value = loss(self.accumulator.model, batch)
            found = tape.gradient(value, [self.accumulator.model.w])
            self.accumulator.add(found, weight=weight, loss=value)
            self.window.append((self.gradient(batch), weight))
            if len(self.window) == STEPS:
                self.learn(self.window)
                self.window = []

    @rule(bad=st.sampled_from([np.nan, np.inf]))
    def add_what_is_not_finite(self, bad: float) -> None:
        self.accumulator.add([tf.fill([WIDTH], tf.constant(bad, tf.float64))], weight=2)
        self.window.append((np.full(WIDTH, bad), 2))
        if len(self.window) == STEPS:
            self.learn(self.window)
            self.window = []

    @rule()
    def flush(self) -> None:
        step = self.accumulator.flush()
        assert (step is not None) == bool(self.window)
        if self.window:
            self.learn(self.window)
            self.window = []

    @rule(
        bad=st.sampled_from(
            [
                lambda a: a.step((np.zeros((0, WIDTH)), np.zeros(0))),
                lambda a: a.step((np.zeros((4, WIDTH)), np.zeros(3))),
                lambda a: a.step(Window([])),
                lambda a: a.step("text"),
                lambda a: a.add([tf.zeros([WIDTH], tf.float64)], weight=-1),
                lambda a: a.add([tf.zeros([WIDTH], tf.float64)], weight=tf.constant([2.0, -1.0])),
                lambda a: a.add([tf.zeros([WIDTH], tf.float64)], weight=1, loss=tf.ones(2)),
                lambda a: a.add([tf.zeros([WIDTH + 1], tf.float64)], weight=1),
                lambda a: a.add([tf.zeros([WIDTH], tf.float32)], weight=1),
                lambda a: a.add([], weight=1),
                lambda a: a.add([tf.zeros([WIDTH], tf.float64)]),
            ]
        )
    )
    def refused(self, bad: Any) -> None:
        with pytest.raises(BigBatchError):
            bad(self.accumulator)

    @invariant()
    def same(self) -> None:
        np.testing.assert_allclose(self.accumulator.model.w.numpy(), self.plain, rtol=1e-10, atol=1e-10)
        assert int(self.accumulator.num_steps.numpy()) == self.num_steps
        assert self.accumulator._window.num_micro_batches() == len(self.window)


class MeanOfMeans(Machine):
    """A negative control that divides by the number of micro-batches."""

    @staticmethod
    def mean(gradients: list[np.ndarray], weights: list[float]) -> np.ndarray:
        return np.mean(gradients, axis=0)


@pytest.fixture(scope="module", autouse=True)
def made() -> None:
    Machine.accumulator = Accumulator(
        Line(), keras.optimizers.SGD(RATE), loss, 2, accumulation_steps=STEPS, max_skipped=None
    )


@pytest.mark.usefixtures("float64")
def test_any_order_of_calls_is_right_or_refused() -> None:
    run_state_machine_as_test(Machine, settings=few)


@pytest.mark.usefixtures("float64")
def test_negative_control_mean_of_means() -> None:
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        run_state_machine_as_test(MeanOfMeans, settings=settings(few, phases=[Phase.generate]))
