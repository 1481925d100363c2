"""The arrays of a pytree by name, and back."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...jax.batch import is_typed_key
from ...jax.verify.trial import name_of
from ..run.compatible import check_array, check_names


def arrays_of(tree: Any) -> dict[str, np.ndarray]:
    return {name: as_array(leaf) for name, leaf in by_path(tree).items()}


def tree_of(arrays: Mapping[str, np.ndarray], like: Any) -> Any:
    """The tree that the arrays are of, if it is like this one."""
    wanted = by_path(like)
    check_names(wanted, arrays)
    for name, leaf in wanted.items():
        check_array(name, as_array(leaf), arrays[name])
    leaves = [as_leaf(arrays[name], leaf) for name, leaf in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def as_array(leaf: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(leaf) if is_typed_key(leaf) else leaf, order="C")


def as_leaf(array: np.ndarray, like: Any) -> Any:
    if is_typed_key(like):
        return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(like))
    return jnp.array(array, copy=True)


def by_path(tree: Any) -> dict[str, Any]:
    """The leaves of a tree, in order, by where they are in it."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def named(tree: Any) -> dict[str, Any]:
    """The leaves by short names such as dense.kernel; in full where short ones would be the same."""
    paths = jax.tree.leaves_with_path(tree)
    names = [name_of(path) for path, _ in paths]
    if len(set(names)) < len(names):
        return by_path(tree)
    return {name: leaf for name, (_, leaf) in zip(names, paths, strict=True)}
