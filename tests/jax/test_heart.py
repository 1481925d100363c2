"""core/weight.py with traced arrays: the same numbers as with plain ones, and no NaN in a gradient."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bigbatch.core.weight import Weights, counted, share, shares, totals

WINDOWS = [[(3.0,), (0.0,), (5.0,)], [(0.0,), (4.0,)], [(0.0,)], [(3.0, 1.0), (60.0, 0.0)], [(2.0, 0.0), (1.0, 0.0)]]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("weights", WINDOWS)
def test_traced_arrays_give_the_shares_of_plain_numbers(weights: Any, reduction: Any) -> None:
    @jax.jit
    def both_ways(weights: Any) -> Any:
        total = totals(weights)
        known = [shares(weight, total, reduction, jnp.where) for weight in weights]
        window = Weights(reduction, where=jnp.where)
        fed = []
        for weight in weights:
            fed.append(window.share(weight))
            window.add(weight)
        rest = window.rest(total)
        return known, [tuple(s * r for s, r in zip(each, rest, strict=True)) for each in fed]

    plain = [shares(weight, totals(weights), reduction) for weight in weights]
    for found in both_ways(weights):
        np.testing.assert_allclose(np.array(found, float), np.array(plain), rtol=1e-6)


def test_loss_with_weight_zero_leaves_no_nan_in_the_gradient() -> None:
    def loss(x: Any, weight: Any) -> Any:
        return counted(x / weight, share(weight, 4.0, jnp.where), jnp.where)

    value, gradient = jax.jit(jax.value_and_grad(loss))(1.0, 2.0)
    assert (value, gradient) == (0.25, 0.25)
    assert jax.jit(loss)(0.0, 0.0) == 0


def test_a_whole_window_in_one_scan() -> None:
    """The sum of gradients times w_k / reference, times reference / W, is that of the whole batch."""
    x, weights = jnp.arange(12.0).reshape(4, 3), jnp.array([3.0, 0.0, 1.0, 2.0])

    @jax.jit
    def gradient(w: Any) -> Any:
        def body(sums: Any, each: Any) -> Any:
            row, weight = each
            return sums + counted(jax.grad(lambda w: (w * row).mean())(w), share(weight, 1, jnp.where), jnp.where), None

        sums, _ = jax.lax.scan(body, jnp.zeros(3), (x, weights))
        return share(sums, weights.sum(), jnp.where)

    np.testing.assert_allclose(gradient(jnp.ones(3)), weights @ x / 6 / 3, rtol=1e-6)
