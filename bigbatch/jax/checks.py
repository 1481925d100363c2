"""Checks of the gradients and the weights that the user passes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core.errors import GradientError, WeightError
from ..core.weight import as_plain, check_weight


def parameter_name(path: Any) -> str:
    """The name of a leaf in messages and files: dense.kernel."""
    return jax.tree_util.keystr(path, simple=True, separator=".") or "parameters"


def check_gradients(gradients: Any, parameters: Any, given: str, remedy: str) -> None:
    """Raises GradientError unless the gradients have the structure, shapes and kind of numbers of the parameters.

    The message begins with `given`, such as "step returned", and ends with the remedy.
    """
    ours, theirs = jax.tree.structure(parameters), jax.tree.structure(gradients)
    if ours != theirs:
        raise GradientError(f"{given} {theirs} but the parameters are {ours}: {remedy}")
    for (path, g), p in zip(jax.tree.leaves_with_path(gradients), jax.tree.leaves(parameters), strict=True):
        name, kind, own = parameter_name(path), jnp.result_type(g), jnp.result_type(p)
        if jnp.shape(g) != jnp.shape(p):
            raise GradientError(f"{given} the shape {jnp.shape(g)} for {name} of shape {jnp.shape(p)}: {remedy}")
        is_none = kind == jax.dtypes.float0  # the gradient of integers with allow_int=True
        if is_none or (jnp.iscomplexobj(g) and not jnp.iscomplexobj(p)):
            raise GradientError(
                f"{given} an array of {'float0' if is_none else kind.name} for {name}, whose gradient adds up in "
                f"{own.name}: {remedy}, and leave out what has no gradient"
            )


def is_finite(tree: Any) -> jax.Array:
    """Whether every number in a pytree is finite."""
    return jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)], bool).all()


def checked_weight(weight: Any, dtype: Any, *, of: str = "a micro-batch") -> Any:
    """The weight of a micro-batch, or of one term of its loss, as one number: the sum of an array, in this dtype.

    The values of a traced weight cannot be checked. If one is negative or not finite the weight becomes NaN, so that
    the result is not finite instead of wrong.
    """
    if not isinstance(weight, jax.Array | np.ndarray):
        return check_weight((as_plain(weight),), of=of)[0]
    if not any(jnp.issubdtype(weight.dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_)):
        raise WeightError(f"the weight of {of} is an array of {weight.dtype}: it must be an array of real numbers")
    if isinstance(weight, np.ndarray):
        check_weight(tuple(weight.ravel().tolist()), of=of)
    weight = jnp.asarray(weight)
    return jnp.where(jnp.all(jnp.isfinite(weight) & (weight >= 0)), jnp.sum(weight, dtype=dtype), jnp.nan)
