"""Whether a saved state fits the task that should go on with it."""

from collections.abc import Iterable
from typing import Any

from ...core.errors import StateError

REMEDY = "go on with the task as it was, or start anew without --resume"


def check_names(ours: Iterable[str], saved: Iterable[str]) -> None:
    own, saved = set(ours), set(saved)
    if other := sorted(own ^ saved):
        where = "the saved state" if other[0] in saved else "the task"
        raise StateError(f"only {where} has {other[0]}: {REMEDY}")


def check_number(of: str, ours: int, saved: int) -> None:
    if ours != saved:
        raise StateError(f"the saved state has {saved} {of} but the task {ours}: {REMEDY}")


def check_array(name: str, ours: Any, saved: Any) -> None:
    """Arrays of any framework."""
    if kind(ours) != kind(saved):
        raise StateError(f"{name} is {kind(saved)} in the saved state but {kind(ours)} in the task: {REMEDY}")


def kind(array: Any) -> str:
    if not hasattr(array, "shape"):
        return f"a {type(array).__name__}"
    return f"{str(array.dtype).removeprefix('torch.')}{list(array.shape)}"
