"""multi_steps combined with transformations of JAX, optax and Flax, outside and inside of it."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from bigbatch import OptionError
from bigbatch.jax import multi_steps

from .feeding import apart, cut, feed, loss, make_params, seven, train_fed, train_full, value_and_grad, weight


def assert_same(ours: Any, full: Any, start: Any, tolerance: float = 1e-12) -> None:
    assert apart(ours, full, start) <= tolerance


def fed(optimizer: Any, params: Any, batch: Any, **extra: Any) -> tuple[Any, Any]:
    """Feeds one window of sizes 2, 2, 2, 1."""
    state, ended = optimizer.init(params), params
    update = jax.jit(lambda g, s, w, v: optimizer.update(g, s, params, weight=w, value=v, **extra))
    for micro_batch in cut(batch, 2):
        value, grads = value_and_grad(params, micro_batch)
        updates, state = update(grads, state, weight(micro_batch), value)
        ended = optax.apply_updates(ended, updates)
    return ended, state


# --- JAX -----------------------------------------------------------------------------------------------------


def test_it_is_an_optax_transformation() -> None:
    assert isinstance(multi_steps(optax.sgd(0.1), 2), optax.GradientTransformationExtraArgs)


def test_one_trace_serves_all_micro_batches_and_the_state_can_be_donated() -> None:
    params, num_traces = make_params(), 0
    optimizer = multi_steps(optax.adamw(0.1), lambda step: jnp.where(step < 1, 2, 3), non_finite="micro_batch")

    def update(grads: Any, state: Any, params: Any, weight: Any, flush: Any) -> Any:
        nonlocal num_traces
        num_traces += 1
        updates, state = optimizer.update(grads, state, params, weight=weight, value=1.0, flush=flush)
        return optax.apply_updates(params, updates), state

    compiled = jax.jit(update, donate_argnums=(1, 2))
    state = first = optimizer.init(params)
    grads = make_params()
    for number in range(9):
        params, state = compiled(grads, state, params, jnp.array(number), jnp.array(number == 7))
    assert num_traces == 1
    assert first.sums["in"].is_deleted()
    assert (state.step, state.micro_step) == (3, 1)
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(optimizer.init(params))]
    assert [leaf.dtype for leaf in jax.tree.leaves(state)] == dtypes


def test_nothing_is_compiled_twice_outside_jit() -> None:
    traces = []

    def scale(updates: Any, params: Any = None) -> Any:
        traces.append(1)
        return updates

    optimizer = multi_steps(optax.chain(optax.stateless(scale), optax.sgd(0.1)), 2)
    params = make_params()
    state = optimizer.init(params)
    grads = jax.tree.map(jnp.ones_like, params)
    for number in range(1, 6):
        _, state = optimizer.update(grads, state, params, weight=number)
    _, state = optimizer.flush(state, params)
    num = len(traces)
    for number in range(1, 6):
        _, state = optimizer.update(grads, state, params, weight=number)
    _, state = optimizer.flush(state, params)
    assert len(traces) == num
    assert int(state.step) == 6


def test_the_inner_optimizer_runs_only_at_the_boundary() -> None:
    """The inner optimizer counts its calls with a callback to Python."""
    calls = []

    def count(updates: Any, state: Any, params: Any = None) -> Any:
        jax.debug.callback(lambda: calls.append(1))
        return updates, state

    inner = optax.GradientTransformation(lambda params: optax.EmptyState(), count)
    _, state = feed(multi_steps(inner, 4), make_params(), [m for batch in seven(2) for m in cut(batch, 2)])
    jax.effects_barrier()
    assert len(calls) == state.step == 2


def test_scan_over_micro_batches() -> None:
    """Micro-batches of 2, 2, 2 and 1 samples, padded to equal shapes; the padding is ignored."""
    params, (batch,) = make_params(), seven(1)
    optimizer = multi_steps(optax.adam(0.1), 4)
    x = np.concatenate([batch["x"], batch["x"][:1]]).reshape(4, 2, 64)
    y = np.append(batch["y"], -100).reshape(4, 2)

    def one(carry: Any, micro_batch: Any) -> Any:
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params, micro_batch)
        updates, state = optimizer.update(grads, state, params, weight=jnp.sum(micro_batch["y"] >= 0), value=value)
        return (optax.apply_updates(params, updates), state), state.is_applied

    (ours, _), is_applied = jax.jit(lambda carry: jax.lax.scan(one, carry, {"x": x, "y": y}))(
        (params, optimizer.init(params))
    )
    assert is_applied.tolist() == [False, False, False, True]
    assert_same(ours, train_full(optax.adam(0.1), params, [batch]), params)


def test_vmap() -> None:
    """Two trainings in parallel: one is flushed after two micro-batches, the other continues."""
    params, (batch,) = make_params(), seven(1)
    optimizer = multi_steps(optax.adam(0.1), 4)
    both = jax.tree.map(lambda p: jnp.stack([p, p]), params)
    state, ended = jax.vmap(optimizer.init)(both), both
    gradients = jax.jit(jax.vmap(jax.grad(loss), in_axes=(0, None)))
    update = jax.jit(
        jax.vmap(lambda g, s, p, w, f: optimizer.update(g, s, p, weight=w, flush=f), in_axes=(0, 0, 0, None, 0))
    )
    for number, micro_batch in enumerate(cut(batch, 2)):
        flush = jnp.array([number == 1, False])
        updates, state = update(gradients(both, micro_batch), state, both, jnp.array(weight(micro_batch)), flush)
        ended = optax.apply_updates(ended, updates)
    for row, size in ((0, 4), (1, 7)):
        full = train_full(optax.adam(0.1), params, [{name: part[:size] for name, part in batch.items()}])
        assert_same(jax.tree.map(lambda p, row=row: p[row], ended), full, params)
    assert state.step.tolist() == [1, 1]
    assert state.micro_step.tolist() == [2, 0]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_parameters(kind: AxisType) -> None:
    """The sums are sharded like the parameters."""
    mesh = jax.make_mesh((2,), ("model",), axis_types=(kind,), devices=jax.devices()[:2])
    params, batch = make_params(), seven(1)[0]
    full = train_full(optax.adam(0.1), params, [batch])
    place = {"in": PartitionSpec(None, "model"), "bias": PartitionSpec("model"), "out": PartitionSpec("model")}
    placed = {name: jax.device_put(p, NamedSharding(mesh, place[name])) for name, p in params.items()}
    optimizer = multi_steps(optax.adam(0.1), 4)
    state, ended, update = optimizer.init(placed), placed, jax.jit(optimizer.update)
    for micro_batch in cut(batch, 2):
        grads = jax.tree.map(lambda g, p: jax.device_put(g, p.sharding), value_and_grad(params, micro_batch)[1], placed)
        updates, state = update(grads, state, placed, weight=weight(micro_batch))
        ended = optax.apply_updates(ended, updates)
    assert_same(ended, full, params)
    for name, p in placed.items():
        assert state.sums[name].sharding.is_equivalent_to(p.sharding, p.ndim)
        assert len(state.sums[name].addressable_shards) == 2
        assert state.sums[name].addressable_shards[0].data.size == p.size // 2


# --- dtypes and trees ----------------------------------------------------------------------------------------


def test_bfloat16_is_summed_in_float32() -> None:
    """The sum is rounded once, at the end. With optax.identity the update is the gradient itself."""
    draw = np.random.default_rng(0)
    gradients = [jnp.asarray(draw.normal(size=50) + 1, jnp.bfloat16) for _ in range(200)]
    weights = draw.integers(1, 9, 200)
    optimizer = multi_steps(optax.identity(), 200)
    state, update = optimizer.init(gradients[0]), jax.jit(optimizer.update)
    for gradient, w in zip(gradients, weights, strict=True):
        updates, state = update(gradient, state, weight=w)
    exact = np.average(np.stack([g.astype(np.float64) for g in gradients]), axis=0, weights=weights)
    assert state.sums.dtype == jnp.float32
    assert updates.dtype == jnp.bfloat16
    np.testing.assert_array_equal(updates, jnp.asarray(exact, jnp.bfloat16))
    naive = sum((g * jnp.bfloat16(w) for g, w in zip(gradients, weights, strict=True)), jnp.zeros(50, jnp.bfloat16))
    assert np.abs(naive / weights.sum() - exact).max() > 0.03  # the result of bfloat16 sums


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64])
def test_dtypes_do_not_change(dtype: Any) -> None:
    """This holds for updates, parameters and state, also after flush, which gives float32 without parameters."""
    params = make_params(dtype=dtype)
    optimizer = multi_steps(optax.adam(0.1), 4)
    ours, state = train_fed(optimizer, params, [{name: part[:5] for name, part in seven(1)[0].items()}], 2)
    assert state.step == 1
    assert {p.dtype for p in jax.tree.leaves(ours)} == {jnp.dtype(dtype)}
    assert state.inner_state[0].mu["in"].dtype == dtype
    assert state.sums["in"].dtype == jnp.promote_types(dtype, jnp.float32)
    _, state = optimizer.update(params, state, params, weight=1)
    _, state = optimizer.flush(state)
    assert state.is_applied
    assert state.inner_state[0].mu["in"].dtype == dtype


def test_complex_parameters() -> None:
    optimizer = multi_steps(optax.sgd(1.0), 2)
    params = jnp.array([1 + 2j, 3 - 1j])
    _, state = optimizer.update(params, optimizer.init(params), params, weight=3)
    updates, _ = optimizer.update(2 * params, state, params, weight=1)
    np.testing.assert_allclose(updates, -1.25 * params, rtol=1e-15)


def test_untrained_leaves() -> None:
    """They are None in equinox and MaskedNode in optax."""
    params, (batch,) = make_params(), seven(1)
    full = train_full(optax.adam(0.1), params, [batch])
    model = (params, eqx.filter({"n": jnp.arange(3), "f": jax.nn.relu}, eqx.is_inexact_array))
    optimizer = multi_steps(optax.adam(0.1), 4)
    state, ended = optimizer.init(model), model
    for micro_batch in cut(batch, 2):
        grads = (value_and_grad(params, micro_batch)[1], model[1])
        updates, state = optimizer.update(grads, state, model, weight=weight(micro_batch))
        ended = eqx.apply_updates(ended, updates)
    assert_same(ended[0], full, params)
    mask = {"in": True, "bias": False, "out": True}
    for masked in (optax.masked(optimizer, mask), multi_steps(optax.masked(optax.adam(0.1), mask), 4)):
        ours, _ = fed(masked, params, batch)
        for name in ("in", "out"):
            np.testing.assert_allclose(ours[name], full[name], rtol=1e-12, atol=1e-14)


# --- optax and flax ------------------------------------------------------------------------------------------


def test_in_a_chain() -> None:
    """A chain has no `flush`, but update() with zeros and flush=True does the same."""
    params, (batch,) = make_params(), seven(1)
    chain = optax.chain(multi_steps(optax.sgd(0.5), 100), optax.scale(2.0))
    same, state = fed(chain, params, batch)
    assert_same(same, params, jax.tree.map(jnp.zeros_like, params), 0)
    updates, state = chain.update(jax.tree.map(jnp.zeros_like, params), state, params, weight=0, flush=True)
    assert_same(optax.apply_updates(params, updates), train_full(optax.sgd(1.0), params, [batch]), params)
    assert optax.tree.get(state, "micro_step") == 0


def test_injected_hyperparameters() -> None:
    """A schedule inside counts steps."""
    params, batches = make_params(), seven(3)
    inner = optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(0.1, 0.02, 3))
    ours, state = train_fed(multi_steps(inner, 4), params, batches, 2)
    assert_same(ours, train_full(inner, params, batches), params)
    assert state.inner_state.count == 3
    outer = optax.inject_hyperparams(lambda rate: multi_steps(optax.adam(rate), 4))(rate=0.1)
    assert_same(fed(outer, params, batches[0])[0], train_full(optax.adam(0.1), params, batches[:1]), params)


@pytest.mark.each_value
@pytest.mark.parametrize("is_flushed", [False, True])
@pytest.mark.parametrize(
    "inner",
    [optax.lbfgs(), optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(20)), optax.polyak_sgd()],
    ids=["lbfgs", "backtracking", "polyak"],
)
def test_line_search(inner: Any, is_flushed: bool) -> None:
    """Value and gradient are those of the window; `value_fn` is that of the whole batch, which the user passes."""
    params, (batch,) = make_params(), seven(1)

    def whole(params: Any) -> jax.Array:
        return loss(params, batch)

    value, grads = value_and_grad(params, batch)
    given = {"value": value, "grad": grads, "value_fn": whole}
    updates, _ = inner.update(grads, inner.init(params), params, **given)
    full = optax.apply_updates(params, updates)
    optimizer = multi_steps(inner, 5 if is_flushed else 4)
    ours, state = fed(optimizer, params, batch, grad=grads, value_fn=whole)
    if is_flushed:
        updates, state = optimizer.flush(state, params, value_fn=whole)
        ours = optax.apply_updates(ours, updates)
    assert state.is_applied
    assert_same(ours, full, params)


def test_a_line_search_sees_no_micro_batch() -> None:
    """If the caller passes the `grad` of the last micro-batch, that of the window replaces it."""
    params, (batch,) = make_params(), seven(1)
    seen = []

    def note(updates: Any, state: Any, params: Any = None, *, grad: Any, **extra: Any) -> Any:
        jax.debug.callback(lambda g: seen.append(g), grad)
        return updates, state

    inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), note)
    fed(multi_steps(inner, 4), params, batch, grad=value_and_grad(params, cut(batch, 2)[-1])[1])
    jax.effects_barrier()
    assert_same(seen[0], value_and_grad(params, batch)[1], jax.tree.map(jnp.zeros_like, params))


def test_train_state_of_linen() -> None:
    """apply_gradients() passes no weight on, so it is fed with sums; the example calls tx.update() instead."""
    params, (batch,) = make_params(), seven(1)
    tx = multi_steps(optax.sgd(0.5 / 7), 4, reduction="sum")
    state = TrainState.create(apply_fn=loss, params=params, tx=tx)

    @jax.jit
    def train(state: TrainState, micro_batch: Any) -> TrainState:
        grads = jax.grad(lambda params: len(micro_batch["x"]) * state.apply_fn(params, micro_batch))(state.params)
        return state.apply_gradients(grads=grads)

    for micro_batch in cut(batch, 2):
        state = train(state, micro_batch)
    assert_same(state.params, train_full(optax.sgd(0.5), params, [batch]), params)


class PassesOn(TrainState):
    """The class of docs/jax.md."""

    def apply_gradients(self, *, grads: Any, **extra: Any) -> Any:
        updates, opt_state = self.tx.update(grads, self.opt_state, self.params, **extra)
        params = optax.apply_updates(self.params, updates)
        return self.replace(step=self.step + opt_state.is_applied, params=params, opt_state=opt_state)


@pytest.mark.parametrize("compiled", [False, True])
def test_train_state_of_flax_that_passes_the_weight_on(compiled: bool) -> None:
    params, batches = make_params(), seven(2)
    state = PassesOn.create(apply_fn=loss, params=params, tx=multi_steps(optax.adam(0.1), 5))

    def train(state: Any, micro_batch: Any, weight: Any) -> Any:
        return state.apply_gradients(grads=jax.grad(loss)(state.params, micro_batch), weight=weight)

    train = jax.jit(train) if compiled else train
    for batch in batches:  # windows of four, each ended by a flush
        for micro_batch in cut(batch, 2):
            state = train(state, micro_batch, weight(micro_batch))
        nothing = jax.tree.map(jnp.zeros_like, params)
        state = state.apply_gradients(grads=nothing, weight=0, flush=True)
    full = train_full(optax.adam(0.1), params, batches)
    assert_same(state.params, full, params)
    assert state.step == 2
    equal, naive = PassesOn.create(apply_fn=loss, params=params, tx=multi_steps(optax.adam(0.1), 4)), 1
    for micro_batch in (part for batch in batches for part in cut(batch, 2)):
        equal = train(equal, micro_batch, naive)
    assert apart(equal.params, full, params) > 1e-4


def test_error_without_a_weight_names_the_train_state_of_flax() -> None:
    params = make_params()
    state = TrainState.create(apply_fn=loss, params=params, tx=multi_steps(optax.adam(0.1), 4))
    with pytest.raises(OptionError, match=r"needs weight.*TrainState\.apply_gradients does not pass it on"):
        state.apply_gradients(grads=params, weight=8)


@pytest.mark.parametrize("is_flushed", [False, True])
def test_lookahead(is_flushed: bool) -> None:
    """Its gradients are those of the fast parameters; it also holds slow ones."""
    inner, batches = optax.lookahead(optax.adam(0.1), sync_period=2, slow_step_size=0.5), seven(3)
    start = optax.LookaheadParams.init_synced(make_params())

    def trained(tx: Any, num_micro_batches: int) -> Any:
        params, state = start, tx.init(start)
        for batch in batches:
            for part in cut(batch, num_micro_batches):
                extra = {"weight": weight(part)} if tx is not inner else {}
                updates, state = jax.jit(tx.update)(jax.grad(loss)(params.fast, part), state, params, **extra)
                params = optax.apply_updates(params, updates)
            if is_flushed and tx is not inner:
                updates, state = tx.flush(state, params)
                params = optax.apply_updates(params, updates)
        return params

    assert_same(trained(multi_steps(inner, 9 if is_flushed else 4), 2), trained(inner, 7), start)


def test_options_set_later_are_refused() -> None:
    optimizer = multi_steps(optax.sgd(0.1), 4)
    for name in ("accumulation_steps", "reduction", "non_finite"):
        with pytest.raises(OptionError, match=f"{name} cannot be changed"):
            setattr(optimizer, name, 2)


def test_optimizer_of_nnx() -> None:
    """nnx.Optimizer passes the weight on."""
    batch = seven(1)[0]

    def mean(model: Any, batch: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()

    def trained(tx: Any, batches: Any) -> Any:
        model = nnx.Linear(64, 10, rngs=nnx.Rngs(0), param_dtype=jnp.float64)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        for each in batches:
            optimizer.update(model, nnx.jit(nnx.grad(mean))(model, each), weight=len(each["x"]))
        return nnx.as_pure(nnx.state(model))

    start, full = trained(optax.identity(), []), trained(optax.adam(0.1), [batch])
    assert_same(trained(multi_steps(optax.adam(0.1), 4), cut(batch, 2)), full, start)
