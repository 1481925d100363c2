"""Bad input, inside of jit and outside: one sentence, or what is not finite where nothing can be read; never wrong."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bigbatch import BatchError, GradientError, LossError, OptionError, StateError, WeightError
from bigbatch.jax import multi_steps, value_and_grad, verify

draw = np.random.default_rng(0)
BATCH = (draw.normal(size=(11, 5)), draw.normal(size=11))


def make_params() -> dict[str, Any]:
    return {"w": jnp.ones(5), "b": jnp.zeros(())}


def loss(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((batch[0] @ params["w"] + params["b"] - batch[1]) ** 2)


def call(compiled: bool, loss: Any = loss, batch: Any = BATCH, params: Any = None, **options: Any) -> Any:
    function = value_and_grad(loss, 4, **options)
    return (jax.jit(function) if compiled else function)(make_params() if params is None else params, batch)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batch": (BATCH[0][:0], BATCH[1][:0])}, BatchError, "has 0 samples"),
        ({"batch": (BATCH[0], BATCH[1][:5])}, BatchError, "has 11 samples but .* has 5"),
        ({"weight": lambda b: None}, WeightError, "is None"),
        ({"weight": lambda b: "4"}, WeightError, "is '4'"),
        ({"weight": lambda b: [1, 2]}, WeightError, r"is \[1, 2\]"),
        ({"weight": lambda b: ()}, LossError, "1 term but the weight has 0"),
        ({"weight": lambda b: jnp.array(1j)}, WeightError, "array of complex"),
        ({"weight": lambda b: np.array([3.0, -1.0])}, WeightError, "is -1.0"),
        ({"weight": lambda b: -1}, WeightError, "is -1"),
        ({"loss": lambda p, b: (loss(p, b), {"a": "b"}), "has_aux": True}, LossError, "only numbers"),
        (
            {"loss": lambda p, b: (loss(p, b), jax.random.key(0)), "has_aux": True},
            OptionError,
            "the PRNG key of one",
        ),
        ({"accumulate_dtype": "nonsense"}, OptionError, "'nonsense' is not a dtype"),
        ({"accumulate_dtype": jnp.bfloat16}, OptionError, "bfloat16 is narrower than float32"),
        ({"loss": lambda p, b: ()}, LossError, "0 terms"),
        ({"loss": lambda p, b: "low"}, LossError, "the loss returned 'low'"),
        (
            {"loss": lambda p, b: (loss(p, b), {"name": "low"}), "has_aux": True},
            LossError,
            "return only numbers",
        ),
        ({"params": {"w": jnp.ones(5, int), "b": jnp.zeros(())}}, OptionError, "an array of int"),
    ],
)
def test_one_sentence(options: dict[str, Any], error: type[Exception], message: str, compiled: bool) -> None:
    with pytest.raises(error, match=message) as caught:
        call(compiled, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "weight",
    [
        lambda b: jnp.array(-1.0),
        lambda b: jnp.where(b[1] > 1, -0.5, 1.0),
        lambda b: jnp.where(b[1] > 1, jnp.nan, 1.0),
        lambda b: jnp.where(b[1] > 1, jnp.inf, 1.0),
    ],
)
def test_a_bad_weight_that_nobody_can_read_gives_nothing_finite(weight: Any, compiled: bool) -> None:
    """Divided by a negative total, negative weights would look like good ones."""
    assert any(BATCH[1] > 1)
    value, gradient = call(compiled, weight=weight)
    assert not np.isfinite(value)
    assert not any(np.isfinite(leaf).any() for leaf in jax.tree.leaves(gradient))
    guarded = optax.apply_if_finite(optax.sgd(0.1), max_consecutive_errors=3)
    updates, _ = guarded.update(gradient, guarded.init(make_params()), make_params())
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(updates))


@pytest.mark.parametrize("name", ["loss", "weight"])
def test_what_is_no_function(name: str) -> None:
    with pytest.raises(OptionError, match=f"{name} is 3: pass a function"):
        value_and_grad(**{"loss": loss, name: 3})


def test_multi_steps() -> None:
    with pytest.raises(OptionError, match="the optimizer is a NoneType"):
        multi_steps(None, 3)
    optimizer, params = multi_steps(optax.sgd(0.1), 3), make_params()
    with pytest.raises(StateError, match="the state is a tuple"):
        optimizer.update(params, optax.sgd(0.1).init(params), params, weight=3)
    with pytest.raises(WeightError, match="array of complex"):
        jax.jit(lambda w: optimizer.update(params, optimizer.init(params), params, weight=w))(1j)


@pytest.mark.parametrize(
    ("gradient", "message"),
    [
        (np.ones(5) * 1j, "of complex128 for w, whose gradient adds up in float64"),
        (np.zeros(5, jax.dtypes.float0), "of float0 for w, whose gradient adds up in float64"),
    ],
)
def test_gradients_of_another_kind(gradient: Any, message: str) -> None:
    """The imaginary part would be lost without a word."""
    optimizer, params = multi_steps(optax.sgd(0.1), 3), make_params()
    with pytest.raises(GradientError, match=message):
        optimizer.update({**params, "w": gradient}, optimizer.init(params), params, weight=3)


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_that_are_whole_numbers(compiled: bool) -> None:
    """Their mean is none."""
    optimizer, params = multi_steps(optax.sgd(1.0), 2), {"w": jnp.zeros(2)}
    update, state = jax.jit(optimizer.update) if compiled else optimizer.update, optimizer.init(params)
    for gradient, weight in (([1, 2], 1), ([2, 3], 2)):
        updates, state = update({"w": np.array(gradient)}, state, params, weight=weight)
    np.testing.assert_allclose(updates["w"], [-5 / 3, -8 / 3], rtol=1e-12)


def test_a_list_beside_micro_batches_of_one() -> None:
    """It would be broadcast without a word."""

    def listed(params: Any, batch: Any) -> jax.Array:
        return loss(params, (batch[0], jnp.asarray(batch[1])))

    x, y = BATCH
    with pytest.raises(BatchError, match="a list of 11 numbers is passed whole to every micro-batch"):
        value_and_grad(listed, 1)(make_params(), (x, y.tolist()))
    assert value_and_grad(lambda p, b: loss(p, b[:2]), 1)(make_params(), (x, y, [0.5, 0.7]))[0] > 0


def test_what_multi_steps_is_given() -> None:
    params = make_params()
    for options, extra, error, message in (
        ({"accumulation_steps": lambda step: None}, {}, OptionError, r"accumulation_steps\(step\)"),
        ({"accumulation_steps": 2}, {"value": "low"}, LossError, "value is 'low'"),
    ):
        optimizer = multi_steps(optax.sgd(0.1), **options)
        with pytest.raises(error, match=message):
            optimizer.update(params, optimizer.init(params), params, weight=3, **extra)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("accumulation_steps", "pass micro_batch_size, the number of samples"),
        (
            "gradient_accumulation_steps",
            "pass micro_batch_size, the number of samples in a micro-batch, if batches are",
        ),
        ("every_k_schedule", "pass micro_batch_size"),
        ("microbatch_size", r"did you mean micro_batch_size\?"),
        ("axis_name", "its options are loss, micro_batch_size, .*, accumulate_dtype$"),
    ],
)
def test_an_option_of_another_library_is_answered_with_ours(name, told):
    with pytest.raises(OptionError, match=f"value_and_grad has no option {name}: .*{told}"):
        value_and_grad(lambda params, batch: 0.0, **{name: 4})
    with pytest.raises(OptionError, match=f"verify has no option {name}: "):
        verify(jnp.ones(2), jnp.ones((4, 2)), lambda params, batch: (batch @ params).mean(), 2, **{name: 4})
