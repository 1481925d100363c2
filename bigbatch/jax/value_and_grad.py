"""`jax.value_and_grad` and `jax.grad` of a whole batch, in the memory of a micro-batch."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..core.errors import OptionError
from ..core.weight import Reduction, check_reduction
from ..core.window import positive
from .arguments import Arrays, Form, as_numbers, is_traced, num_rows, take_apart
from .keys import Rng, for_samples
from .mesh import Axes, Placement, Shard, axes_of, current_mesh, find_placement, spread, varying
from .outputs import Asked
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
    on explicit axes; else `sharding` says it, a NamedSharding, or names of axes of the mesh that is set. In a
    `shard_map` with `check_vma=False`, `axes` names those to reduce over.
    """
    micro_batch_size = positive("micro_batch_size", micro_batch_size)
    check_reduction(reduction)
    if rng not in ("per_micro_batch", "per_sample", None):
        raise OptionError(f'rng={rng!r} is unknown: pass "per_micro_batch", "per_sample" or None')
    window = Window(loss, micro_batch_size, weight, has_aux, reduction, Asked.of(aux), rng, accumulate_dtype)
    given = None if axes is None else axes_of(axes)
    numbers = as_numbers("argnums", argnums)
    cut_numbers = None if batch_argnums is None else as_numbers("batch_argnums", batch_argnums)

    @functools.wraps(loss)
    def value_and_gradient(*args: Any, **kwargs: Any) -> Any:
        form, parameters, arrays = take_apart(args, kwargs, numbers, cut_numbers)
        if given is not None or current_mesh().manual_axes:
            placement, inside = None, tuple(sorted(varying(arrays.rows))) if given is None else given
        else:
            placement, inside = find_placement(arrays.rows, sharding), ()
        is_compiled = not is_traced((parameters, arrays)) and is_hashable((window, form))
        function = compiled(window) if is_compiled else functools.partial(compute, window)
        found, gradient = function(form, placement, inside, parameters, arrays)
        return found, gradient if isinstance(argnums, tuple | list) else gradient[0]

    return value_and_gradient


def grad(loss: Loss, micro_batch_size: int = 8, *, has_aux: bool = False, **options: Any) -> Callable[..., Any]:
    """Stands where `jax.grad(loss)` stood: `value_and_grad` without the value, with the same options."""
    both = value_and_grad(loss, micro_batch_size, has_aux=has_aux, **options)

    @functools.wraps(loss)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        found, gradients = both(*args, **kwargs)
        return (gradients, found[1]) if has_aux else gradients

    return gradient


@functools.lru_cache(maxsize=256)
def compiled(window: Window) -> Callable[..., Any]:
    """For calls outside of `jit`; the same for equal windows, since many write `value_and_grad(loss)(…)` in a loop."""
    return jax.jit(functools.partial(compute, window), static_argnums=(0, 1, 2))


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

    if placement is None:
        result = on_device(window, axes, leaves, arrays)
    else:
        result = on_mesh(placement, window, on_device, leaves, arrays)
    gradient = jax.tree.unflatten(structure, result.gradient)
    if not window.has_aux:
        return result.value, gradient
    return (result.value, combined[-1].together(result.aux_rows, result.aux_added)), gradient


def on_mesh(placement: Placement, window: Window, on_device: Any, leaves: list[Any], arrays: Arrays) -> Result:
    """Every device runs a window of its own part of the batch, and the sums are reduced once after it."""
    axes = placement.axes
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
    )
    return mapped(leaves, arrays._replace(rows=spread(arrays.rows, placement)))


def is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
