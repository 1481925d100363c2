"""The update is that of the whole batch, for all sizes and all ways of feeding it."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from bigbatch.tensorflow import Accumulator
from tests.problems import Problem, problems, samples, tokens

from .training import WAYS, MakeOptimizer, Run, adam, assert_same_update, cut, flat, momentum, sgd, update_error

pytestmark = pytest.mark.usefixtures("float64")

FOUR_MASKS = Problem("tokens 6 / 1 / 2 / 5", "tokens", (tokens(6, 1, 2, 5),), 1)
PROBLEMS = [*problems(), FOUR_MASKS]
BY_NAME = {problem.name: problem for problem in PROBLEMS}
HARD = [
    BY_NAME[name]
    for name in ("windows of 4 and 2", "a micro-batch without a token", "two terms, each by its own count")
]


def name(problem: Problem) -> str:
    return problem.name


def each_way(problems: list[Problem]) -> Any:
    """Each way to feed the problem; add() takes one gradient, so it has no terms."""
    cases = [(problem, way) for problem in problems for way in WAYS if way != "add" or problem.kind != "terms"]
    return pytest.mark.parametrize(("problem", "way"), cases, ids=lambda part: getattr(part, "name", part))


each_problem = pytest.mark.parametrize("problem", PROBLEMS, ids=name)
hard_problems = pytest.mark.parametrize("problem", HARD, ids=name)


@cache
def full_batch(problem_name: str, make_optimizer: MakeOptimizer, epochs: int = 1, **options: Any) -> Run:
    return Run(BY_NAME[problem_name], make_optimizer, epochs, **options).full()


RUNS: dict[Any, Run] = {}


def run(problem: Problem, way: str, make_optimizer: MakeOptimizer, epochs: int, **options: Any) -> Run:
    """Trains one problem. Problems share an accumulator if they can, because making graphs takes the most time."""
    if way == "add":  # it has the problem's accumulation_steps and no graph
        return Run(problem, make_optimizer, epochs, **options)
    size = problem.micro_batch_size if way == "batch" else None
    key = (problem.kind, way, make_optimizer, size, problem.clip_norm, tuple(options.items()))
    if key in RUNS:
        return RUNS[key].again(problem, epochs)
    RUNS[key] = Run(problem, make_optimizer, epochs, **options)
    return RUNS[key]


def assert_equals_the_full_batch(
    problem: Problem, way: str, make_optimizer: MakeOptimizer = sgd, epochs: int = 1, **options: Any
) -> Run:
    plain = {name: value for name, value in options.items() if name != "jit_compile"}
    full = full_batch(problem.name, make_optimizer, epochs, **plain)
    ours = run(problem, way, make_optimizer, epochs, **options).accumulated(way)
    tolerance = 1e-12 if epochs == 1 else 1e-9
    assert_same_update(ours, full, tolerance)
    assert ours.losses == pytest.approx(full.losses, rel=tolerance)
    assert ours.optimizer.iterations.numpy() == epochs * len(problem.batches)
    return ours


@pytest.mark.each_value
@each_way(PROBLEMS)
def test_one_sgd_step_equals_the_full_batch(problem: Problem, way: str) -> None:
    assert_equals_the_full_batch(problem, way)


@pytest.mark.each_value
@each_way([problem for problem in PROBLEMS if not problem.name.startswith("micro-batch size")])
def test_three_epochs_of_adam_with_a_schedule_and_clipping(problem: Problem, way: str) -> None:
    assert_equals_the_full_batch(problem, way, adam, epochs=3, clip_norm=0.5)


@each_way([BY_NAME["windows of 4 and 2"], FOUR_MASKS])
def test_three_epochs_of_momentum(problem: Problem, way: str) -> None:
    assert_equals_the_full_batch(problem, way, momentum, epochs=3)


@each_problem
def test_negative_control_the_naive_loop_fails_where_weights_differ(problem: Problem) -> None:
    error = update_error(Run(problem).naive(), full_batch(problem.name, sgd))
    if problem.is_uneven:
        assert error > 1e-2
    else:
        assert error < 1e-12


def test_the_clipped_case_is_clipped() -> None:
    clipped = next(p for p in problems() if p.clip_norm)
    step = run(clipped, "batch", sgd, 1).accumulated("batch").steps[0]
    assert step.grad_norm > 2 * clipped.clip_norm


# --- eager, in an own graph, compiled by XLA ----------------------------------------------------------


@pytest.mark.each_value
@pytest.mark.parametrize("way", ["batch", "window"])
@hard_problems
@pytest.mark.usefixtures("eagerly")
def test_eagerly(problem: Problem, way: str) -> None:
    assert_equals_the_full_batch(problem, way, adam, epochs=2)


@pytest.mark.each_value
@pytest.mark.parametrize("way", ["batch", "window"])
@hard_problems
def test_compiled_by_xla(problem: Problem, way: str) -> None:
    assert_equals_the_full_batch(problem, way, adam, epochs=2, jit_compile=True)


@pytest.mark.each_value
@pytest.mark.parametrize("flush", ["in a graph", "in eager code"])
@pytest.mark.parametrize("jit_compile", [False, True], ids=["plain", "xla"])
@pytest.mark.parametrize("problem", HARD[:2], ids=name)
def test_in_an_own_graph(problem: Problem, jit_compile: bool, flush: str) -> None:
    full = full_batch(problem.name, adam, 3)
    ours = Run(problem, adam, 3)
    accumulator = ours.accumulator(accumulation_steps=problem.accumulation_steps)
    signature = {name: tf.TensorSpec([None, *a.shape[1:]], a.dtype) for name, a in problem.batches[0].items()}
    gradients = tf.function(lambda batch: ours._gradients(batch, dense=False), jit_compile=jit_compile)

    @tf.function(input_signature=[signature])
    def micro_step(batch: Any) -> None:
        loss, found = gradients(batch)
        weight = accumulator.weight(batch) if accumulator.weight else tf.shape(batch["y"])[0]
        accumulator.add(found, weight=weight, loss=loss)

    end = tf.function(accumulator.flush) if flush == "in a graph" else accumulator.flush
    for _ in range(3):
        for batch in problem.batches:
            for micro_batch in cut(batch, problem.micro_batch_size):
                micro_step(micro_batch)
        end()
    assert_same_update(ours, full, 1e-9)
    assert accumulator.last_step.loss == pytest.approx(full.losses[-1], rel=1e-9)
    assert ours.optimizer.iterations.numpy() == 3 * len(problem.batches)


# --- weights ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_weights_per_sample(way: str) -> None:
    """Weights from 0 to 2, so that the first micro-batches count least and one counts zero."""
    (batch,) = samples(22)
    batch = {**batch, "s": np.maximum(0, np.linspace(-1, 2, 22))}
    problem = Problem("weighted", "samples", (batch,), 4)
    full, ours = Run(problem), Run(problem)

    def loss(model: Any, batch: Any) -> Any:
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(batch["y"], model(batch["x"]))
        return tf.reduce_sum(each * batch["s"]) / tf.reduce_sum(batch["s"])

    full.loss = ours.loss = loss
    full.full()
    ours._made = Accumulator(
        ours.model, ours.optimizer, loss, 4 if way == "batch" else None, weight=lambda b: b["s"], accumulation_steps=9
    )
    if way == "add":
        for micro_batch in cut(batch, 4):
            value, found = ours._gradients(micro_batch)
            ours._made.add(found, weight=micro_batch["s"], loss=value)
        step = ours._made.flush()
    else:
        step = ours.accumulated(way).steps[0]
    assert_same_update(ours, full, 1e-12)
    assert step.loss == pytest.approx(full.losses[0], rel=1e-12)
    assert step.weight == pytest.approx(batch["s"].sum(), rel=1e-12)


def test_the_reference_moves() -> None:
    """The reference run of all comparisons does change its variables."""
    run = full_batch("sizes 16, 16, 16, 5", sgd)
    assert np.linalg.norm(run.update) > 1e-2
    assert flat(run.model).dtype == np.float64
