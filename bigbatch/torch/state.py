"""How the open window of each rank is saved, so that torch.distributed.checkpoint keeps all of them apart."""

from typing import Any

from ..core.checkpoint.serialize import from_bytes, to_bytes
from ..core.errors import StateError
from .arrays import from_array, to_array, with_sparse, without_sparse
from .distributed.ranks import Replicas

WindowState = dict[str, Any]


def packed(window: WindowState | None, replicas: Replicas) -> dict[str, Any]:
    """What goes into the state: where ranks share the model, each has an entry of its own, in one piece.

    torch.distributed.checkpoint writes what has the same name on several ranks only once, and fills in what it finds
    names for: so the name tells the rank, and the entry is there even if no window is open.
    """
    if not replicas.is_shared:
        return {"window": window}
    piece = None if window is None else to_bytes(without_sparse(window), to_array)
    return {"num_ranks": replicas.size, "window": {name(replicas.rank): piece}}


def unpacked(state: dict[str, Any], replicas: Replicas) -> WindowState | None:
    """The open window of this rank; refuses one that was saved by other ranks."""
    num_ranks = state.get("num_ranks", 1)
    windows = state["window"] if "num_ranks" in state else {name(0): state["window"]}
    is_open = {rank for rank, window in windows.items() if window is not None}
    if not is_open:
        return None
    if num_ranks != replicas.size:
        raise StateError(
            f"the state was saved in the middle of a window by {num_ranks} rank{'s' * (num_ranks != 1)} but "
            f"{replicas.size} load it: load it with as many, or save after a step"
        )
    own = name(replicas.rank)
    if own not in windows:
        raise StateError(f"the state is that of {min(is_open)} but this is {own}: save one for every rank, and load it")
    window: Any = windows[own]
    found: WindowState = with_sparse(from_bytes(window, from_array)) if isinstance(window, bytes) else window
    return found


def like_its_own(saved: Any, own: dict[str, Any]) -> dict[str, Any]:
    """What is saved under the names of a state of one's own; raises KeyError or TypeError if it is not of that kind."""
    return {key: type(value)() + saved[key] for key, value in own.items()}  # text to text, numbers to numbers


def name(rank: int) -> str:
    return f"rank {rank}"
