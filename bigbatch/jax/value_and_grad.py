"""`jax.value_and_grad` and `jax.grad` of a whole batch, in the memory of a micro-batch."""

import functools
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Never

import jax
import jax.numpy as jnp
import numpy as np

from ..core.errors import OptionError
from ..core.options import check_callable, check_choice, check_known, positive
from ..core.weight import Reduction, check_reduction
from .arguments import ArgumentLayout, Arrays, as_numbers, num_rows, split_arguments
from .auxiliary import AuxSpec
from .distributed import Axes, Placement, axes_of, find_placement, on_mesh, spreads
from .internals import is_traced, varying
from .keys import Rng, for_samples
from .window import Loss, Result, Spec, WindowTrace

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
    **unknown: Never,
) -> Callable[..., Any]:
    """Returns a function that returns what `jax.value_and_grad(loss)` does, in the memory of a micro-batch.

        @jax.jit
        def step(params, state, batch):
            value, grads = value_and_grad(loss, micro_batch_size=8)(params, batch)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

    The second line stands for

        sums = total = 0
        for micro_batch in micro_batches(batch):
            sums += weight(micro_batch) * jax.grad(loss)(params, micro_batch)
            total += weight(micro_batch)
        grads = sums / total

    Positional arguments other than `argnums` are the batch and are cut along their leading axis. Keyword arguments,
    scalars, and values that are not arrays are passed whole to every micro-batch.

    If devices share the batch, each accumulates its own part, and the gradient is reduced once.

    Args:
        loss: `loss(params, batch)` returns the mean over the batch it is given, or a tuple of means, whose sum is the
            value.
        micro_batch_size: The number of samples in a micro-batch, on all devices together.
        weight: `weight(batch)` returns how many samples or tokens the loss averages over: a number, or an array to add
            up; for a tuple of means, a tuple of the same length. None: the number of samples.
        argnums: The number of the argument to differentiate by, or several as a tuple, as in JAX.
        has_aux: Whether the loss returns `(loss, aux)`. The value is then `(loss, aux)` too, as in JAX.
        reduction: "mean", or "sum" to add losses up undivided.
        aux: How to combine what micro-batches return as aux: "concatenate", "sum", "mean" (weighted like the first term
            of the loss), or a pytree of these. "auto" concatenates arrays with a row for each sample, adds up integers
            and takes the mean of the rest.
        rng: What happens to PRNG keys among the arguments. "per_micro_batch" folds in the number of the micro-batch;
            "per_sample" passes the loss one key for each sample; None passes keys as they are.
        batch_argnums: The numbers of the arguments to cut, if not all are cut.
        sharding: How devices share the batch: a NamedSharding, or the names of axes of the mesh that `jax.set_mesh`
            sets. None: as the arrays are spread. Inside of `jit`, arrays on automatic axes do not show that, so it is
            guessed from the mesh.
        axes: In your own `shard_map`, the axes over which devices share the batch. None: read from the arrays.
        accumulate_dtype: The dtype in which gradients are added up. None: that of the parameter, but at least float32.

    Returns:
        A function of the loss's arguments that returns `(value, gradient)`. It works inside and outside of `jit`.
    """
    check_known(unknown, value_and_grad)
    check_reduction(reduction)
    check_callable("loss", loss)
    check_callable("weight", weight)
    check_choice("rng", rng, ("per_micro_batch", "per_sample", None))
    _check_dtype(accumulate_dtype)
    size = positive("micro_batch_size", micro_batch_size)
    spec = Spec(loss, size, weight, has_aux, reduction, AuxSpec.of(aux), rng, accumulate_dtype)
    numbers = as_numbers("argnums", argnums)
    cut_numbers = None if batch_argnums is None else as_numbers("batch_argnums", batch_argnums)
    given = None if axes is None else axes_of(axes)
    compiled = _compile_cached(spec) if _can_be_cached(loss) and _can_be_cached(weight) else _compile(spec)

    @functools.wraps(loss)
    def value_and_gradient(*args: Any, **kwargs: Any) -> Any:
        layout, parameters, arrays = split_arguments(args, kwargs, numbers, cut_numbers)
        _check_parameters(parameters)
        placement, inside = None, given
        if jax.sharding.get_abstract_mesh().manual_axes:
            inside = _axes_inside(parameters, arrays.rows) if given is None else given
        elif given is None:
            placement = find_placement(arrays.rows, sharding, size)
        is_compiled = layout.is_hashable and not is_traced((parameters, arrays))
        function = compiled if is_compiled else functools.partial(_compute, spec)
        value, gradient = function(layout, placement, inside or (), parameters, arrays)
        return value, gradient if isinstance(argnums, tuple | list) else gradient[0]

    return value_and_gradient


def grad(loss: Loss, micro_batch_size: int = 8, *, has_aux: bool = False, **options: Any) -> Callable[..., Any]:
    """Returns a function that returns what `jax.grad(loss)` does, in the memory of a micro-batch.

        grads = grad(loss, micro_batch_size=8)(params, batch)     # as jax.grad(loss)(params, batch)

    Args:
        loss: `loss(params, batch)` returns the mean over the batch it is given, or a tuple of means.
        micro_batch_size: The number of samples in a micro-batch, on all devices together.
        has_aux: Whether the loss returns `(loss, aux)`. The function then returns `(gradient, aux)`, as in JAX.
        options: The other options of `value_and_grad`.
    """
    both = value_and_grad(loss, micro_batch_size, has_aux=has_aux, **options)

    @functools.wraps(loss)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        value, gradients = both(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return gradient


def _compile(spec: Spec) -> Callable[..., Any]:
    """For calls outside of `jit`."""
    return jax.jit(functools.partial(_compute, spec), static_argnums=(0, 1, 2))


_compile_cached = functools.lru_cache(maxsize=256)(_compile)
"""`_compile`, once for equal options, since many people write `value_and_grad(loss)(…)` in a loop."""


def _compute(
    spec: Spec, layout: ArgumentLayout, placement: Placement | None, axes: Axes, parameters: Any, arrays: Arrays
) -> tuple[Any, Any]:
    """The value and the gradient, on one device or on all that share the batch."""
    leaves, structure = jax.tree.flatten(parameters)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    arrays = jax.tree.map(jnp.asarray, arrays)
    if spec.rng == "per_sample":
        layout, arrays = for_samples(layout, arrays, axes)
    combines = []

    def on_device(spec: Spec, axes: Axes, leaves: list[Any], arrays: Arrays, shards: Any = None) -> Result:
        window = WindowTrace(spec, layout, arrays, jax.tree.unflatten(structure, leaves), axes, shards)
        combines.append(window.combine)
        return window.result()

    def call_loss(leaves: list[Any]) -> Any:
        args, kwargs = layout.bind(arrays, jax.tree.unflatten(structure, leaves))
        return spec.loss(*args, **kwargs)

    if placement is not None and placement.is_guess and spreads(jax.make_jaxpr(call_loss)(leaves).jaxpr):
        placement = None
    if placement is None:
        result = on_device(spec, axes, leaves, arrays)
    else:
        own = replace(spec, micro_batch_size=placement.local_size(spec.micro_batch_size, num_rows(arrays)))
        result = Result(*on_mesh(placement, functools.partial(on_device, own, placement.axes), leaves, arrays))
    gradient = jax.tree.unflatten(structure, result.gradient)
    if not spec.has_aux:
        return result.value, gradient
    return (result.value, combines[-1].join(result.aux_rows, result.aux_added)), gradient


def _axes_inside(parameters: Any, rows: list[Any]) -> Axes:
    """In the user's own `shard_map`: the axes over which devices share a batch."""
    axes = varying(rows)
    if own := sorted(axes & varying(parameters)):
        raise OptionError(
            f"parameters differ over {own[0]!r} as the batch does, so bigbatch cannot tell whether the devices "
            "train one model: pass axes=…, those over which one model's batch is shared, or axes=() if there are none"
        )
    return tuple(sorted(axes))


# --- checks --------------------------------------------------------------------------------------------------


def _check_dtype(dtype: Any) -> None:
    remedy = "pass jnp.float32 or jnp.float64, or None"
    try:
        is_wide = dtype is None or jnp.promote_types(dtype, jnp.float32) == jnp.dtype(dtype)
    except TypeError as error:
        raise OptionError(f"accumulate_dtype={dtype!r} is not a dtype: {remedy}") from error
    if not is_wide:
        raise OptionError(
            f"accumulate_dtype={jnp.dtype(dtype).name} is narrower than float32 and would lose low bits: {remedy}"
        )


def _check_parameters(parameters: Any) -> None:
    for leaf in jax.tree.leaves(parameters):
        is_array = isinstance(leaf, jax.Array | np.ndarray | np.generic | complex | float)
        if not (is_array and jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)):
            kind = f"an array of {jnp.result_type(leaf)}" if is_array else f"a {type(leaf).__name__}"
            raise OptionError(
                f"the parameters have {kind} in them, which has no gradient: pass it by keyword, or leave out what is "
                "not a floating-point array, as eqx.partition and nnx.split do"
            )


def _can_be_cached(function: Any) -> bool:
    """Whether a function has no closure and no defaults, which could change or hold memory."""
    if not isinstance(function, types.FunctionType):
        return function is None
    return not (function.__closure__ or function.__defaults__ or function.__kwdefaults__)
