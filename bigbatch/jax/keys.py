"""PRNG keys: each micro-batch, or each sample, gets its own."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from .arguments import ArgumentLayout, Arrays, is_typed_key, num_rows
from .distributed import Axes

Rng = Literal["per_micro_batch", "per_sample"] | None


def for_micro_batch(keys: list[Any], rng: Rng, number: Any, axes: Axes) -> list[Any]:
    """The keys of a micro-batch, which differ from device to device."""
    if rng is None:
        return keys

    def folded(key: Any) -> Any:
        key = jax.random.fold_in(key, number)
        return jax.random.fold_in(key, lax.axis_index(axes)) if axes else key

    return [_for_each(folded, key) for key in keys]


def for_samples(layout: ArgumentLayout, arrays: Arrays, axes: Axes) -> tuple[ArgumentLayout, Arrays]:
    """Splits every key into one for each sample, which are cut like the samples.

    A sample gets the same key however the batch is cut and however many devices there are.
    """
    num_samples = num_rows(arrays)
    rows, keys = iter(arrays.rows), iter(arrays.keys)

    def split(key: Any) -> Any:
        if not axes:
            return jax.random.split(key, num_samples)
        of_all = jax.random.split(key, num_samples * lax.axis_size(axes))
        return lax.dynamic_slice_in_dim(of_all, lax.axis_index(axes) * num_samples, num_samples)

    def by_sample(key: Any) -> Any:
        of_samples = _for_each(split, key)
        return jnp.moveaxis(of_samples, key.ndim, 0) if is_typed_key(key) else of_samples

    cut = [by_sample(next(keys)) if role == "key" else next(rows) for role in layout.roles if role in ("rows", "key")]
    roles = tuple("rows" if role == "key" else role for role in layout.roles)
    return replace(layout, roles=roles), Arrays(cut, [], arrays.whole)


def _for_each(function: Callable[[Any], Any], keys: Any) -> Any:
    """Applies the function to a key, or to each in an array of keys."""
    for _ in range(keys.ndim if is_typed_key(keys) else 0):
        function = jax.vmap(function)
    return function(keys)
