"""Checkpoints of a training loop, so that it can continue as if it had never been stopped."""

import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core.checkpoint.loop import Resumable
from ..core.checkpoint.serialize import Array, as_array
from ..core.errors import OptionError, OrderError, StateError
from ..core.history import History
from .arguments import is_typed_key


class Checkpoints(Resumable):
    """Saves pytrees at intervals, and restores them.

        checkpoints = Checkpoints("checkpoints", every="10min")
        state = checkpoints.restore({"params": params, "opt_state": opt_state, "key": key})
        for batch in checkpoints.batches(loader, epochs=10):
            state = step(state, batch)
            checkpoints.update(state)

    If the process is killed, start it again with the same lines: it ends with the same parameters, bit for bit on a
    CPU. The random state of Python and NumPy and the position in the data are saved as well. A checkpoint is JSON and
    safetensors, so loading one from somebody else runs no code.

    Args:
        folder: Where to keep checkpoints.
        every: How often to save: a number of batches, a time such as "10min", or None for `save()` alone.
        keep: How many checkpoints to keep.
        history: A History to save and to restore as well.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        every: int | str | None = "10min",
        keep: int = 2,
        history: History | None = None,
    ) -> None:
        self._tree: Any = None
        self._num_updates = 0
        super().__init__(folder, every=every, keep=keep, history=history)

    def restore(self, state: Any) -> Any:
        """Returns the newest intact checkpoint, or `state` itself if there is none.

        A damaged checkpoint is named in a warning and never used.

        Args:
            state: A pytree with the structure, shapes, dtypes and sharding of what was saved.
        """
        self.update(state)
        self._restore()
        return self._tree

    def update(self, state: Any) -> None:
        """Sets the pytree to save from now on. Nothing is copied until a checkpoint is due.

        Args:
            state: A pytree with the structure of the one passed to `restore`.
        """
        self._tree, self._num_updates = state, self._num_updates + 1

    def _progress(self) -> int:
        return self._num_updates

    def _state(self) -> tuple[Any, Mapping[str, bytes]]:
        self._check_restored("there is nothing to save")
        leaves = {name: _on_host(leaf, name) for name, leaf in by_path(self._tree).items()}
        return {"leaves": leaves, "types": types_of(self._tree)}, {}

    def _load(self, state: Any, files: Mapping[str, bytes]) -> None:
        self._check_restored("there is a checkpoint but no state to restore")
        check_types(state["types"], self._tree)
        self._tree = tree_of(state["leaves"], self._tree)

    def _check_restored(self, what: str) -> None:
        if not self._num_updates:
            raise OrderError(f"{what}: call restore(state) before the loop")


def tree_of(arrays: Mapping[str, np.ndarray], like: Any) -> Any:
    """The pytree whose leaves `arrays_of` returned; raises StateError if names, shapes or dtypes differ from `like`.

    The result has the structure, the kinds of leaves and the sharding of `like`.
    """
    wanted = by_path(like)
    if other := sorted(arrays.keys() ^ wanted.keys()):
        where = "the checkpoint" if other[0] in arrays else "the state"
        raise StateError(f"only {where} has {other[0]}: continue with the state that was saved")
    for name, leaf in wanted.items():
        ours, theirs = _shape_and_dtype(leaf), arrays[name]
        if ours != (theirs.shape, theirs.dtype):
            raise StateError(
                f"{name} is {theirs.dtype}{list(theirs.shape)} in the checkpoint but {ours[1]}{list(ours[0])} here: "
                "continue with the state that was saved"
            )
    return jax.tree.unflatten(jax.tree.structure(like), [_as_leaf(arrays[name], leaf) for name, leaf in wanted.items()])


def types_of(tree: Any) -> dict[str, str]:
    """The class of each named tuple in a pytree, by path. Leaves alone do not tell Adam's state from AdaBelief's."""

    def is_node(node: Any) -> bool:
        return isinstance(node, tuple) and hasattr(node, "_fields")

    found: dict[str, str] = {}

    def search(tree: Any, path: str) -> None:
        if is_node(tree):
            found[path] = type(tree).__qualname__
        leaves = jax.tree.leaves_with_path(tree, is_leaf=lambda node: node is not tree and is_node(node))
        for inner, leaf in leaves:
            if inner and is_node(leaf):
                search(leaf, path + jax.tree_util.keystr(inner))

    search(tree, "")
    return found


def check_types(types: Mapping[str, str], tree: Any) -> None:
    """Raises StateError unless `types_of(tree)` are the types that were saved."""
    own = types_of(tree)
    for path in sorted(types.keys() | own.keys()):
        if types.get(path) != own.get(path):
            raise StateError(
                f"{path or 'the state'} is {types.get(path, 'missing')} in the checkpoint but "
                f"{own.get(path, 'missing')} here: continue with the optimizer that was saved"
            )


def arrays_of(tree: Any) -> dict[str, np.ndarray]:
    """The leaves of a pytree as NumPy arrays on the host, by path; the opposite of `tree_of`."""
    return {name: _on_host(leaf, name).numpy() for name, leaf in by_path(tree).items()}


def by_path(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by path, in order."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def _as_leaf(array: np.ndarray, like: Any) -> Any:
    """A copy of the array as a leaf of the same kind as `like`: a PRNG key, an array on its devices, a plain number.

    A weakly typed number stays one: as float32 it would turn bfloat16 parameters into float32.
    """
    if _is_key(like):
        return jax.random.wrap_key_data(jnp.array(array), impl=jax.random.key_impl(like))
    if isinstance(like, jax.Array):
        is_weak = like.weak_type and not array.ndim
        return jax.device_put(jnp.asarray(array.item()) if is_weak else jnp.array(array), like.sharding)
    return array.copy() if isinstance(like, np.ndarray) else type(like)(array.item())


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and is_typed_key(leaf)


def _shape_and_dtype(leaf: Any) -> tuple[tuple[int, ...], Any]:
    data = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
    return np.shape(data), np.dtype(getattr(data, "dtype", None) or np.asarray(data).dtype)


def _on_host(leaf: Any, name: str) -> Array:
    """A copy on the host, since the next step may donate the buffers of the leaf."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        raise OptionError(f"{name} is spread over the devices of several processes: save it with orbax instead")
    array = as_array(np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf))
    assert array is not None
    return array
