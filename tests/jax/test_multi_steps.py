"""Micro-batches fed one at a time give the result of the full batch, whatever their sizes, and a NaN does not stay."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bigbatch import windows
from bigbatch.core.errors import GradientError, LossError, OptionError, WeightError
from bigbatch.jax import multi_steps
from tests.problems import Problem, problems

from .feeding import apart, cut, feed, loss, make_params, seven, train_fed, train_full, value_and_grad

OPTIMIZERS = {
    "sgd": optax.sgd(0.5),
    "momentum": optax.sgd(0.2, momentum=0.9, nesterov=True),
    "adam": optax.adam(1e-2),
    "adamw": optax.adamw(1e-2, weight_decay=0.1),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.5)),
    "schedule": optax.sgd(optax.linear_schedule(0.5, 0.1, 4)),
    "plateau": optax.chain(optax.sgd(5.0), optax.contrib.reduce_on_plateau(patience=1, factor=0.3)),
}
TAKEN = [p for p in problems() if p.kind != "terms"]  # a gradient already mixes the terms


def assert_same(ours: Any, full: Any, start: Any, tolerance: float = 1e-12) -> None:
    assert apart(ours, full, start) <= tolerance


@pytest.mark.parametrize("problem", TAKEN, ids=lambda problem: problem.name)
def test_every_problem(problem: Problem) -> None:
    params = make_params(problem)
    batches = [*problem.batches] * 3
    inner = optax.chain(optax.clip_by_global_norm(problem.clip_norm or 1e9), optax.sgd(0.5, momentum=0.9))
    ours, state = train_fed(multi_steps(inner, problem.accumulation_steps), params, batches, problem.micro_batch_size)
    assert_same(ours, train_full(inner, params, batches), params)
    assert state.step == len(batches)
    assert state.num_skipped == state.num_dropped == 0


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name: str) -> None:
    """Several windows of sizes 2, 2, 2, 1; the inner optimizer acts once per step."""
    params, batches = make_params(), seven(6)
    ours, state = train_fed(multi_steps(OPTIMIZERS[name], 4), params, batches, 2)
    assert_same(ours, train_full(OPTIMIZERS[name], params, batches), params)
    for count in optax.tree.get_all_with_path(state.inner_state, "count"):
        assert count[1] == (0 if name == "plateau" else 6)  # plateau counts the values that it averages


def test_plateau_is_reached() -> None:
    """Otherwise the case above would not detect a wrong loss."""
    _, state = train_fed(multi_steps(OPTIMIZERS["plateau"], 4), make_params(), seven(6), 2)
    assert optax.tree.get(state.inner_state, "scale") < 1


def test_negative_control_optax_multi_steps() -> None:
    """The same micro-batches in optax.MultiSteps, which averages over micro-batches."""
    params, (batch,) = make_params(), seven(1)
    theirs = optax.MultiSteps(optax.sgd(0.5), 4).gradient_transformation()
    state, ended = theirs.init(params), params
    for micro_batch in cut(batch, 2):
        updates, state = theirs.update(value_and_grad(params, micro_batch)[1], state, params)
        ended = optax.apply_updates(ended, updates)
    full = train_full(optax.sgd(0.5), params, [batch])
    assert apart(ended, full, params) > 0.05
    assert_same(train_fed(multi_steps(optax.sgd(0.5), 4), params, [batch], 2)[0], full, params)


def test_ramp() -> None:
    """The windows are those of bigbatch.windows; a skipped window also advances the step number."""
    steps = [1, 2, 3, 4]
    micro_batches = [m for batch in seven(3) for m in cut(batch, 2)][:10]
    micro_batches[1] = micro_batches[2] = {**micro_batches[1], "x": micro_batches[1]["x"] * np.nan}
    params = make_params()
    ours, state = feed(multi_steps(optax.sgd(0.5), lambda step: jnp.array(steps)[step]), params, micro_batches)
    grouped = list(windows(micro_batches, lambda step: steps[step]))
    batches = [{name: np.concatenate([m[name] for m in window]) for name in ("x", "y")} for window in grouped]
    assert [len(batch["x"]) for batch in batches] == [2, 4, 5, 7]
    assert_same(ours, train_full(optax.sgd(0.5), params, [batches[0], *batches[2:]]), params)
    assert (state.step, state.micro_step, state.num_skipped) == (4, 0, 1)


def test_sum() -> None:
    """Sums are not divided, so the weight is not needed."""
    params, (batch,) = make_params(), seven(1)
    optimizer = multi_steps(optax.sgd(0.1), 4, reduction="sum")
    state, ended = optimizer.init(params), params
    for micro_batch in cut(batch, 2):
        value, grads = value_and_grad(params, micro_batch)
        num = len(micro_batch["x"])
        grads = jax.tree.map(lambda g, num=num: g * num, grads)
        updates, state = optimizer.update(grads, state, params, value=value * num)
        ended = optax.apply_updates(ended, updates)
    assert_same(ended, train_full(optax.sgd(0.7), params, [batch]), params)
    assert state.value == pytest.approx(7 * float(loss(params, batch)), rel=1e-14)


@pytest.mark.parametrize("how", ["number", "numpy", "traced", "per sample", "mask"])
def test_kinds_of_weight(how: str) -> None:
    params, (batch,) = make_params(), seven(1)
    kinds = {
        "number": lambda n: n,
        "numpy": np.float32,
        "traced": jnp.array,
        "per sample": jnp.ones,
        "mask": lambda n: np.arange(9) < n,
    }
    optimizer = multi_steps(optax.sgd(0.5), 4)
    state, ended = optimizer.init(params), params
    for micro_batch in cut(batch, 2):
        grads, given = value_and_grad(params, micro_batch)[1], kinds[how](len(micro_batch["x"]))
        update = jax.jit(optimizer.update) if how == "traced" else optimizer.update
        updates, state = update(grads, state, params, weight=given)
        ended = optax.apply_updates(ended, updates)
    assert_same(ended, train_full(optax.sgd(0.5), params, [batch]), params)
    assert state.weight == 7


# --- the end of a window -------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_traced", [False, True])
def test_flush_with_the_last_micro_batch(is_traced: bool) -> None:
    params, (batch,) = make_params(), seven(1)
    optimizer = multi_steps(optax.adam(0.1), 100)
    state = optimizer.init(params)
    for micro_batch in cut(batch, 2):
        is_last = len(micro_batch["x"]) == 1
        value, grads = value_and_grad(params, micro_batch)
        is_last = jnp.array(is_last) if is_traced else is_last
        update = jax.jit(optimizer.update) if is_traced else optimizer.update
        updates, state = update(grads, state, params, weight=len(micro_batch["x"]), value=value, flush=is_last)
    assert_same(optax.apply_updates(params, updates), train_full(optax.adam(0.1), params, [batch]), params)
    assert (state.step, state.micro_step, state.weight) == (1, 0, 7)
    assert state.is_applied
    assert state.value == pytest.approx(float(loss(params, batch)), rel=1e-14)


@pytest.mark.parametrize("before", [0, 4])
def test_flush_without_a_window_changes_nothing(before: int) -> None:
    """The inner optimizer, which changes parameters even without a gradient, does not count it either."""
    params = make_params()
    optimizer = multi_steps(optax.adamw(0.1, weight_decay=0.5), 4)
    params, state = feed(optimizer, params, cut(seven(1)[0], 2)[:before])
    updates, flushed = optimizer.flush(state, params)
    assert all(not np.any(u) for u in jax.tree.leaves(updates))
    for a, b in zip(*map(jax.tree.leaves, (state._replace(is_applied=False), flushed)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_window_with_weight_zero() -> None:
    """0/0 is left out. The window changes nothing and says so, and the next one is exact."""
    params, (batch,) = make_params(), seven(1)
    optimizer = multi_steps(optax.adamw(0.1), 4)
    empty = {"x": batch["x"][:2], "y": np.full(2, -100)}
    assert np.isnan(loss(params, empty))
    same, state = feed(optimizer, params, [empty] * 4)
    assert apart(same, params, make_params(dtype=jnp.float32)) == 0
    assert (state.step, state.num_skipped, state.weight, state.value) == (1, 1, 0, 0)
    ours, state = feed(optimizer, params, cut(batch, 2), state)
    assert_same(ours, train_full(optax.adamw(0.1), params, [batch]), params)
    assert (state.step, state.num_skipped) == (2, 1)


# --- non-finite gradients --------------------------------------------------------------------------------------


def poisoned() -> tuple[list[Any], list[Any]]:
    """Three batches of seven and their micro-batches, one of which is NaN."""
    batches = seven(3)
    micro_batches = [m for batch in batches for m in cut(batch, 2)]
    micro_batches[5] = {**micro_batches[5], "x": micro_batches[5]["x"] * np.nan}
    return batches, micro_batches


def test_negative_control_optax_stays_nan() -> None:
    params, (_, micro_batches) = make_params(), poisoned()
    theirs = optax.MultiSteps(optax.adam(0.1), 4).gradient_transformation()
    state = theirs.init(params)
    for micro_batch in micro_batches:
        updates, state = theirs.update(value_and_grad(params, micro_batch)[1], state, params)
        params = optax.apply_updates(params, updates)
    assert np.isnan(params["bias"]).all()


def test_window_is_skipped() -> None:
    params, (batches, micro_batches) = make_params(), poisoned()
    ours, state = feed(multi_steps(optax.adam(0.1), 4), params, micro_batches)
    assert_same(ours, train_full(optax.adam(0.1), params, [batches[0], batches[2]]), params)
    assert (state.step, state.num_skipped, state.num_dropped) == (3, 1, 0)
    assert state.inner_state[0].count == 2


def test_micro_batch_is_left_out() -> None:
    params, (batches, micro_batches) = make_params(), poisoned()
    ours, state = feed(multi_steps(optax.adam(0.1), 4, non_finite="micro_batch"), params, micro_batches)
    rest = {name: np.delete(part, [2, 3], axis=0) for name, part in batches[1].items()}
    assert_same(ours, train_full(optax.adam(0.1), params, [batches[0], rest, batches[2]]), params)
    assert (state.step, state.num_skipped, state.num_dropped) == (3, 0, 1)


def test_all_micro_batches_are_left_out() -> None:
    params, (_, micro_batches) = make_params(), poisoned()
    optimizer = multi_steps(optax.adamw(0.1), 2, non_finite="micro_batch")
    empty = {**micro_batches[5], "y": np.full(2, -100)}  # counts zero, so there is nothing to leave out
    same, state = feed(optimizer, params, [micro_batches[5], empty, micro_batches[5], micro_batches[5]])
    assert apart(same, params, make_params(dtype=jnp.float32)) == 0
    assert (state.step, state.num_skipped, state.num_dropped) == (2, 2, 3)


def test_nonfinite_gradient_is_kept_on_request() -> None:
    params, (_, micro_batches) = make_params(), poisoned()
    params, state = feed(multi_steps(optax.adam(0.1), 4, non_finite="keep"), params, micro_batches)
    assert np.isnan(params["bias"]).all()
    assert (state.step, state.num_skipped, state.num_dropped) == (3, 0, 0)


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_bad_weight_inside_jit(bad: float, reduction: Any) -> None:
    """Inside jit nothing can be raised, but the window is skipped."""
    params = make_params()
    optimizer = multi_steps(optax.sgd(0.1), 2, reduction=reduction, non_finite="keep")
    update, state = jax.jit(optimizer.update), optimizer.init(params)
    for given in (3.0, bad):
        updates, state = update(params, state, params, weight=jnp.array([given, 1.0]))
    assert (state.is_applied, state.num_skipped) == (False, 1)
    assert not np.any(updates["bias"])


# --- refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"accumulation_steps": 0}, "accumulation_steps is 0: pass a whole number of at least 1"),
        ({"accumulation_steps": 2.5}, "accumulation_steps is 2.5"),
        ({"accumulation_steps": 2, "reduction": "max"}, 'reduction=\'max\' is unknown: pass "mean" or "sum"'),
        ({"accumulation_steps": 2, "non_finite": "raise"}, "non_finite='raise' is unknown"),
        ({}, "accumulation_steps is None: pass a whole number"),
        ({"every_k_schedule": 4}, r"multi_steps has no option every_k_schedule: did you mean accumulation_steps\?"),
    ],
)
def test_bad_options(options: dict[str, Any], told: str) -> None:
    with pytest.raises(OptionError, match=told):
        multi_steps(optax.sgd(0.1), **options)


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        ({}, OptionError, "update\\(\\) needs weight=….*; weight=1 if"),
        ({"weight": -1}, WeightError, "the weight of this micro-batch is -1"),
        ({"weight": float("nan")}, WeightError, "is nan"),
        ({"weight": np.array([1.0, -2.0])}, WeightError, "is -2.0"),
        (
            {"weight": (3, 4)},
            WeightError,
            "2 terms but the gradient is already their sum: pass one",
        ),
        ({"weight": "all"}, WeightError, "is 'all'"),
        ({"weight": 1, "value": jnp.ones(3)}, LossError, "value has the shape \\(3,\\): pass the micro-batch's mean"),
    ],
)
def test_bad_arguments(given: dict[str, Any], error: type[Exception], told: str) -> None:
    params, optimizer = make_params(), multi_steps(optax.sgd(0.1), 2)
    with pytest.raises(error, match=told):
        optimizer.update(params, optimizer.init(params), params, **given)


def test_invalid_ramp() -> None:
    params, optimizer = make_params(), multi_steps(optax.sgd(0.1), lambda step: 0)
    with pytest.raises(OptionError, match="accumulation_steps\\(step\\) is 0"):
        optimizer.update(params, optimizer.init(params), params, weight=1)


def test_gradients_that_do_not_fit_are_refused() -> None:
    params, optimizer = make_params(), multi_steps(optax.sgd(0.1), 2)
    state = optimizer.init(params)
    with pytest.raises(GradientError, match=r"was given the shape \(5, 12\) for bias of shape"):
        optimizer.update({**params, "bias": jnp.ones((5, 12))}, state, params, weight=1)
    with pytest.raises(GradientError, match=r"init\(\) was given"):
        optimizer.update({"bias": params["bias"]}, state, params, weight=1)


def test_debug_nans_finds_nothing() -> None:
    """This holds without `value` and with a weight of zero, where jax_debug_nans might stop."""
    params, optimizer = make_params(), multi_steps(optax.sgd(0.1), 2)
    with jax.debug_nans(True):
        state = optimizer.init(params)
        for _ in range(2):
            _, state = optimizer.update(params, state, params, weight=0)
        _, state = jax.jit(optimizer.update)(params, state, params, weight=1)
        _, state = optimizer.flush(state, params)
    assert (state.step, state.num_skipped) == (2, 1)
