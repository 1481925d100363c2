"""PRNG keys: each micro-batch, or each sample, draws numbers of its own."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from .batch import Arrays, Form, is_typed_key, num_rows
from .distributed import Axes

Rng = Literal["per_micro_batch", "per_sample"] | None


def for_micro_batch(keys: list[Any], rng: Rng, number: Any, axes: Axes) -> list[Any]:
    """The keys of the micro-batch of this number: other ones on every device."""
    if rng is None:
        return keys

    def folded(key: Any) -> Any:
        key = jax.random.fold_in(key, number)
        return jax.random.fold_in(key, lax.axis_index(axes)) if axes else key

    return [for_each(folded, key) for key in keys]


def for_samples(form: Form, arrays: Arrays, axes: Axes) -> tuple[Form, Arrays]:
    """Every key as one key for each sample, to be cut like the samples.

    A sample has the same key however the batch is cut and however many devices there are.
    """
    num_samples = num_rows(arrays)
    rows, keys = iter(arrays.rows), iter(arrays.keys)

    def split(key: Any) -> Any:
        if not axes:
            return jax.random.split(key, num_samples)
        of_all = jax.random.split(key, num_samples * lax.axis_size(axes))
        return lax.dynamic_slice_in_dim(of_all, lax.axis_index(axes) * num_samples, num_samples)

    def by_sample(key: Any) -> Any:
        found = for_each(split, key)
        return jnp.moveaxis(found, key.ndim, 0) if is_typed_key(key) else found

    found = [by_sample(next(keys)) if role == "key" else next(rows) for role in form.roles if role in ("rows", "key")]
    roles = tuple("rows" if role == "key" else role for role in form.roles)
    return replace(form, roles=roles), Arrays(found, [], arrays.whole)


def for_each(function: Callable[[Any], Any], keys: Any) -> Any:
    """What the function makes of a key, or of each in an array of them."""
    for _ in range(keys.ndim if is_typed_key(keys) else 0):
        function = jax.vmap(function)
    return function(keys)
