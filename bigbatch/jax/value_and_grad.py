"""`jax.value_and_grad` and `jax.grad` of a whole batch, in the memory of a micro-batch."""

import functools
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ..core.errors import OptionError
from ..core.options import positive
from ..core.weight import Reduction, check_reduction
from .aux import Asked
from .batch import Arrays, Form, as_numbers, is_traced, num_rows, take_apart
from .distributed import (
    Axes,
    Placement,
    Shard,
    axes_of,
    current_mesh,
    find_placement,
    gathered,
    is_spread_both_ways,
    names_axes,
    spread,
    varying,
)
from .keys import Rng, for_samples
from .window import Loss, Result, Run, Window

__all__ = ["grad", "value_and_grad"]


def value_and_grad(
    loss: Loss,
    micro_batch_size: int = 8,
    *,
    weight: Callable[..., Any] | None = None,
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    reduction: Reduction = "mean",
    aux: Any = "auto",
    rng: Rng = "per_micro_batch",
    batch_argnums: int | tuple[int, ...] | None = None,
    sharding: Any = None,
    axes: str | tuple[str, ...] | None = None,
    accumulate_dtype: Any = None,
) -> Callable[..., Any]:
    """Stands where `jax.value_and_grad(loss)` stood, and gives what it gave in the memory of a micro-batch.

        @jax.jit
        def step(params, state, batch):
            value, grads = value_and_grad(loss, micro_batch_size=8)(params, batch)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

    `loss(params, batch)` returns the mean over what it is given, or a tuple of means. `weight(batch)` says over how
    many that is (samples unless told otherwise), with a tuple of the same length for a tuple. The value is the sum of
    the terms.

    Positional arguments beside `argnums` are the batch, or those that `batch_argnums` names: they are cut along their
    leading axis. Keyword arguments go whole to every micro-batch. A PRNG key among either is folded with the number of
    the micro-batch, or with `rng="per_sample"` split so that the loss gets one key for each sample.

    With `has_aux` the loss returns `(loss, aux)`; `aux` says how what micro-batches return is put together:
    "concatenate", "sum", "mean" (by weight), or a nest of these; "auto" sees which of it has a row for each sample.

    A batch that devices share is accumulated on each and reduced once. How it is shared is seen outside of `jit` and
    on explicit axes, and guessed from the mesh on others; `sharding` says it, a NamedSharding, or names of axes of the
    mesh that is set. In a `shard_map`, `axes` names those to reduce over where that cannot be seen.
    """
    micro_batch_size = positive("micro_batch_size", micro_batch_size)
    check_reduction(reduction)
    for name, function in (("loss", loss), ("weight", weight)):
        if function is not None and not callable(function):
            raise OptionError(f"{name} is {function!r}: pass a function")
    if rng not in ("per_micro_batch", "per_sample", None):
        raise OptionError(f'rng={rng!r} is unknown: pass "per_micro_batch", "per_sample" or None')
    check_dtype(accumulate_dtype)
    window = Window(loss, micro_batch_size, weight, has_aux, reduction, Asked.of(aux), rng, accumulate_dtype)
    given = None if axes is None else axes_of(axes)
    compiled = kept(window) if is_bare(loss) and is_bare(weight) else compile_window(window)
    numbers = as_numbers("argnums", argnums)
    cut_numbers = None if batch_argnums is None else as_numbers("batch_argnums", batch_argnums)

    @functools.wraps(loss)
    def value_and_gradient(*args: Any, **kwargs: Any) -> Any:
        form, parameters, arrays = take_apart(args, kwargs, numbers, cut_numbers)
        check_parameters(parameters)
        placement, inside = None, given
        if current_mesh().manual_axes:
            inside = axes_inside(parameters, arrays.rows) if given is None else given
        elif given is None:
            placement = find_placement(arrays.rows, sharding, micro_batch_size)
        is_kept = not is_traced((parameters, arrays)) and is_hashable(form)
        function = compiled if is_kept else functools.partial(compute, window)
        found, gradient = function(form, placement, inside or (), parameters, arrays)
        return found, gradient if isinstance(argnums, tuple | list) else gradient[0]

    return value_and_gradient


def check_dtype(dtype: Any) -> None:
    try:
        is_wide = dtype is None or jnp.promote_types(dtype, jnp.float32) == jnp.dtype(dtype)
    except TypeError as error:
        raise OptionError(
            f"accumulate_dtype={dtype!r} is no dtype: pass jnp.float32 or jnp.float64, or None"
        ) from error
    if not is_wide:
        raise OptionError(
            f"accumulate_dtype={jnp.dtype(dtype).name} is narrower than float32 and would lose low bits: "
            "pass jnp.float32 or jnp.float64, or None"
        )


def grad(loss: Loss, micro_batch_size: int = 8, *, has_aux: bool = False, **options: Any) -> Callable[..., Any]:
    """Stands where `jax.grad(loss)` stood: `value_and_grad` without the value, with the same options."""
    both = value_and_grad(loss, micro_batch_size, has_aux=has_aux, **options)

    @functools.wraps(loss)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        found, gradients = both(*args, **kwargs)
        return (gradients, found[1]) if has_aux else gradients

    return gradient


def compile_window(window: Window) -> Callable[..., Any]:
    """For calls outside of `jit`."""
    return jax.jit(functools.partial(compute, window), static_argnums=(0, 1, 2))


kept = functools.lru_cache(maxsize=256)(compile_window)
"""The same for equal windows, since many write `value_and_grad(loss)(…)` in a loop."""


def is_bare(function: Any) -> bool:
    """Whether a function holds nothing that could change, or that would be kept alive with it."""
    if not isinstance(function, types.FunctionType):
        return function is None
    return not (function.__closure__ or function.__defaults__ or function.__kwdefaults__)


def axes_inside(parameters: Any, rows: list[Any]) -> Axes:
    """In a `shard_map` of the user's: the axes over which devices share a batch."""
    axes = varying(rows)
    if own := sorted(axes & varying(parameters)):
        raise OptionError(
            f"parameters differ over {own[0]!r} as the batch does, so it cannot be seen whether devices train one "
            "model: pass axes=…, those over which one model's batch is shared, or axes=() if there are none"
        )
    return tuple(sorted(axes))


def check_parameters(parameters: Any) -> None:
    for leaf in jax.tree.leaves(parameters):
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic | complex | float):
            raise OptionError(
                f"the parameters hold a {type(leaf).__name__}, by which nobody can differentiate: leave out what is no "
                "floating-point array, as eqx.partition and nnx.split do"
            )
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            raise OptionError(
                f"the parameters hold an array of {jnp.result_type(leaf)}, by which nobody can differentiate: leave it "
                "out, or pass it by keyword"
            )


def compute(
    window: Window, form: Form, placement: Placement | None, axes: Axes, parameters: Any, arrays: Arrays
) -> tuple[Any, Any]:
    """What the returned function returns; compiled if it is called outside of `jit`."""
    leaves, structure = jax.tree.flatten(parameters)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    arrays = jax.tree.map(jnp.asarray, arrays)
    if window.rng == "per_sample":
        form, arrays = for_samples(form, arrays, axes)
    combined = []

    def on_device(window: Window, axes: Axes, leaves: list[Any], arrays: Arrays, shards: Any = None) -> Result:
        run = Run(window, form, arrays, axes)
        result = run.result(jax.tree.unflatten(structure, leaves), shards)
        combined.append(run.combine)
        return result

    if placement is not None and placement.is_guess:
        traced = jax.make_jaxpr(lambda leaves: call_loss(window, form, jax.tree.unflatten(structure, leaves), arrays))
        placement = None if names_axes(traced(leaves).jaxpr) else placement
    if placement is None:
        result = on_device(window, axes, leaves, arrays)
    else:
        result = on_mesh(placement, window, on_device, leaves, arrays)
    gradient = jax.tree.unflatten(structure, result.gradient)
    if not window.has_aux:
        return result.value, gradient
    return (result.value, combined[-1].together(result.aux_rows, result.aux_added)), gradient


def call_loss(window: Window, form: Form, parameters: Any, arrays: Arrays) -> Any:
    args, kwargs = form.bind(parameters, arrays)
    return window.loss(*args, **kwargs)


def on_mesh(placement: Placement, window: Window, on_device: Any, leaves: list[Any], arrays: Arrays) -> Result:
    """Every device runs a window of its own part of the batch, and the sums are reduced once after it."""
    axes = placement.axes
    before = [jax.typeof(leaf).sharding for leaf in leaves]
    is_moved = [is_spread_both_ways(leaf, placement) for leaf in leaves]
    leaves = [gathered(leaf, placement) if moved else leaf for leaf, moved in zip(leaves, is_moved, strict=True)]
    shards = [Shard.of(leaf, axes) for leaf in leaves]
    specs = [shard.spec for shard in shards]
    part = replace(window, micro_batch_size=placement.share(window.micro_batch_size, num_rows(arrays)))

    def local(leaves: list[Any], arrays: Arrays) -> Result:
        return on_device(part, axes, [s.gather(leaf) for s, leaf in zip(shards, leaves, strict=True)], arrays, shards)

    rows = PartitionSpec(axes)
    whole = PartitionSpec()
    mapped = jax.shard_map(
        local,
        mesh=placement.mesh,
        in_specs=(specs, Arrays(rows, whole, whole)),
        out_specs=Result(whole, specs, rows, whole),
        axis_names=set(axes),
        check_vma=False,  # or a loop in the loss that begins with zeros, as in every RNN, would be refused
    )
    keys, others = jax.tree.map(lambda leaf: gathered(leaf, placement), arrays[1:])
    result = mapped(leaves, Arrays([spread(row, placement) for row in arrays.rows], keys, others))
    gradient = [
        jax.reshard(g, sharding) if moved else g
        for g, sharding, moved in zip(result.gradient, before, is_moved, strict=True)
    ]
    return result._replace(gradient=gradient)


def is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
