"""Gradients that bigbatch is given: their names, and whether they fit the parameters."""

from typing import Any

import jax
import jax.numpy as jnp

from ..core.errors import GradientError


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
