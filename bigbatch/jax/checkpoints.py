"""Checkpoints of a loop: everything that it needs to go on as if it had never been stopped."""

import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core.checkpoint.loop import Resumable
from ..core.checkpoint.serialize import Array
from ..core.checkpoint.serialize import as_array as of_numpy
from ..core.errors import OptionError, OrderError, StateError
from ..core.history import History
from .batch import is_typed_key


class Checkpoints(Resumable):
    """Saves pytrees, and gives them back.

        checkpoints = Checkpoints("checkpoints", every="10min")
        state = checkpoints.restore({"params": params, "opt_state": opt_state, "key": key})
        for batch in checkpoints.batches(loader, epochs=10):
            state = step(state, batch)
            checkpoints.update(state)

    A process that was killed is started again with the same lines, and ends with the same parameters, bit for bit on a
    CPU. The random numbers of Python and NumPy and the place in the data are saved along. A checkpoint is JSON and
    safetensors: reading one that a stranger made runs no code.
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
        """The newest checkpoint that is whole, in the form of this state; the state itself if there is none.

        What is damaged is named in a warning and never used.
        """
        self.update(state)
        self._restore()
        return self._tree

    def update(self, state: Any) -> None:
        """Says what is to be saved from now on. Nothing is copied until a checkpoint is due."""
        self._tree, self._num_updates = state, self._num_updates + 1

    def _progress(self) -> int:
        return self._num_updates

    def _state(self) -> tuple[Any, Mapping[str, bytes]]:
        if not self._num_updates:
            raise OrderError("nobody has said what is to be saved: call restore(state) before the loop")
        return {name: host_array(leaf, name) for name, leaf in by_path(self._tree).items()}, {}

    def _load(self, state: Any, files: Mapping[str, bytes]) -> None:
        if not self._num_updates:
            raise OrderError("there is a checkpoint but nobody to take it: call restore(state) before the loop")
        self._tree = put_back(state, self._tree)


def put_back(found: Mapping[str, np.ndarray], like: Any) -> Any:
    """The tree that was saved, if it is like this one: in its form, and where it lies."""
    wanted = by_path(like)
    if other := sorted(found.keys() ^ wanted.keys()):
        where = "the checkpoint" if other[0] in found else "the state"
        raise StateError(f"only {where} has {other[0]}: go on with the state that it was saved with")
    for name, leaf in wanted.items():
        ours, theirs = abstract(leaf), found[name]
        if ours != (theirs.shape, theirs.dtype):
            raise StateError(
                f"{name} is {theirs.dtype}{list(theirs.shape)} in the checkpoint but {ours[1]}{list(ours[0])} here: "
                "go on with the state that it was saved with"
            )
    return jax.tree.unflatten(jax.tree.structure(like), [as_leaf(found[name], leaf) for name, leaf in wanted.items()])


def by_path(tree: Any) -> dict[str, Any]:
    """The leaves of a tree, in order, by where they are in it."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and is_typed_key(leaf)


def abstract(leaf: Any) -> tuple[tuple[int, ...], Any]:
    data = jax.eval_shape(jax.random.key_data, leaf) if is_key(leaf) else leaf
    return np.shape(data), np.dtype(getattr(data, "dtype", None) or np.asarray(data).dtype)


def host_array(leaf: Any, name: str) -> Array:
    """A copy on the host: the buffers of the leaf may be given up in the next step."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        raise OptionError(f"{name} lies on the devices of several processes: save it with orbax, which knows them all")
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    found = of_numpy(array)
    assert found is not None
    return found


def as_leaf(array: np.ndarray, like: Any) -> Any:
    """In memory of its own, where the other lies."""
    if is_key(like):
        return jax.random.wrap_key_data(jnp.array(array), impl=jax.random.key_impl(like))
    if isinstance(like, jax.Array):
        is_weak = like.weak_type and not array.ndim  # a plain number, which takes the type of what it meets
        return jax.device_put(jnp.asarray(array.item()) if is_weak else jnp.array(array), like.sharding)
    return array.copy() if isinstance(like, np.ndarray) else type(like)(array.item())
