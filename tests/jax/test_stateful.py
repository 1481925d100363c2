"""multi_steps fed in any order: weights, zeros, non-finite gradients, flushes, refused calls.

A plain reference in NumPy and float64 steps at the end of each window. hypothesis tries twenty examples, or
BIGBATCH_EXAMPLES.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from bigbatch import BigBatchError
from bigbatch.jax import multi_steps
from tests.examples import examples

STEPS, RATE = 3, 0.1
OPTIMIZER = multi_steps(optax.sgd(RATE), STEPS)
UPDATE, FLUSH = jax.jit(OPTIMIZER.update), jax.jit(OPTIMIZER.flush)
few = settings(
    max_examples=examples(20),
    stateful_step_count=20,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
weights = st.sampled_from([1, 2, 7, 0.5])
seeds = st.integers(0, 1000)


class Machine(RuleBasedStateMachine):
    @staticmethod
    def mean(gradients: list[np.ndarray], weights: list[float]) -> np.ndarray:
        return np.average(gradients, axis=0, weights=weights)

    def __init__(self) -> None:
        super().__init__()
        self.params: Any = {"w": jnp.zeros(4, jnp.float64)}
        self.state: Any = OPTIMIZER.init(self.params)
        self.plain = np.zeros(4)
        self.window: list[tuple[np.ndarray, float]] = []
        self.num_skipped = self.num_steps = 0

    def take(self, updates: Any, state: Any) -> None:
        self.params, self.state = optax.apply_updates(self.params, updates), state

    def close(self) -> None:
        counted = [(g, w) for g, w in self.window if w]
        self.window, self.num_steps = [], self.num_steps + 1
        if counted and all(np.isfinite(w) and np.isfinite(g).all() for g, w in counted):
            gradients, weights = zip(*counted, strict=True)
            self.plain = self.plain - RATE * self.mean(list(gradients), list(weights))
        else:
            self.num_skipped += 1

    def feed(self, gradient: np.ndarray, weight: float, compiled: bool) -> None:
        update = UPDATE if compiled else OPTIMIZER.update
        given = jnp.array(weight) if compiled else weight
        self.take(*update({"w": jnp.asarray(gradient)}, self.state, self.params, weight=given))
        self.window.append((gradient, weight if weight >= 0 else np.nan))
        if len(self.window) == STEPS:
            self.close()

    @rule(micro_batches=st.lists(st.tuples(seeds, weights), min_size=1, max_size=2 * STEPS), compiled=st.booleans())
    def good(self, micro_batches: list[tuple[int, float]], compiled: bool) -> None:
        for seed, weight in micro_batches:
            self.feed(np.random.default_rng(seed).normal(size=4), weight, compiled)

    @rule(seed=seeds, weight=weights, bad=st.sampled_from([np.nan, np.inf, -np.inf]), compiled=st.booleans())
    def not_finite(self, seed: int, weight: float, bad: float, compiled: bool) -> None:
        gradient = np.random.default_rng(seed).normal(size=4)
        gradient[seed % 4] = bad
        self.feed(gradient, weight, compiled)

    @rule(bad=st.sampled_from([0.0, np.nan]), compiled=st.booleans())
    def counts_nothing(self, bad: float, compiled: bool) -> None:
        self.feed(np.full(4, bad), 0, compiled)

    @rule(seed=seeds, weight=st.sampled_from([-1.0, float("nan"), float("inf")]))
    def bad_weight_that_cannot_be_read(self, seed: int, weight: float) -> None:
        self.feed(np.random.default_rng(seed).normal(size=4), weight, compiled=True)

    @rule(compiled=st.booleans())
    def flush(self, compiled: bool) -> None:
        self.take(*(FLUSH if compiled else OPTIMIZER.flush)(self.state, self.params))
        if self.window:
            self.close()

    @rule(
        bad=st.sampled_from(
            [
                {"weight": -1},
                {"weight": float("nan")},
                {"weight": "many"},
                {"weight": None},
                {"weight": 1, "value": np.ones(2)},
                {"weight": 1, "gradient": {"w": np.ones(3)}},
                {"weight": 1, "gradient": {}},
            ]
        )
    )
    def refused(self, bad: dict[str, Any]) -> None:
        more = {name: value for name, value in bad.items() if name != "gradient"}
        with pytest.raises(BigBatchError):
            OPTIMIZER.update(bad.get("gradient", {"w": np.ones(4)}), self.state, self.params, **more)

    @invariant()
    def same(self) -> None:
        np.testing.assert_allclose(self.params["w"], self.plain, rtol=1e-12, atol=1e-12)
        assert int(self.state.micro_step) == len(self.window)
        assert (int(self.state.step), int(self.state.num_skipped)) == (self.num_steps, self.num_skipped)


class MeanOfMeans(Machine):
    """A negative control that divides by the number of micro-batches."""

    @staticmethod
    def mean(gradients: list[np.ndarray], weights: list[float]) -> np.ndarray:
        return np.mean(gradients, axis=0)


def test_any_order_of_calls_is_right_or_refused() -> None:
    run_state_machine_as_test(Machine, settings=few)


def test_negative_control_mean_of_means() -> None:
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        run_state_machine_as_test(MeanOfMeans, settings=settings(few, phases=[Phase.generate]))
