"""What a task of JAX needs to go on, in one file."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ..core.errors import StateError
from ..jax.arguments import is_typed_key
from ..jax.trial import name_of

STATE_FILE, NUM_STEPS = "state.safetensors", "num_steps"


def write_state(folder: Path, tree: Any, num_steps: int) -> None:
    arrays = {name: as_array(leaf) for name, leaf in by_path(tree).items()}
    (folder / STATE_FILE).write_bytes(save(arrays, metadata={NUM_STEPS: str(num_steps)}))


def read_state(folder: Path, like: Any) -> tuple[Any, int]:
    """The tree that was written, if it is like this one; and the number of steps."""
    path = folder / STATE_FILE
    try:
        with safe_open(path, "numpy") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            num_steps = int(file.metadata()[NUM_STEPS])
    except (SafetensorError, TypeError) as error:
        raise StateError(f"{path} is no state of a run: {error}") from error
    wanted = by_path(like)
    if other := sorted(found.keys() ^ wanted.keys()):
        where = "the saved state" if other[0] in found else "the task"
        raise StateError(f"only {where} has {other[0]}: go on with the task as it was, or start anew without --resume")
    for name, leaf in wanted.items():
        ours, theirs = as_array(leaf), found[name]
        if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            raise StateError(
                f"{name} is {theirs.dtype}{list(theirs.shape)} in the saved state but {ours.dtype}{list(ours.shape)} "
                "in the task: go on with the task as it was, or start anew without --resume"
            )
    leaves = [as_leaf(found[name], leaf) for name, leaf in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves), num_steps


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
