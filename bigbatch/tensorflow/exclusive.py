"""Who uses which variables: two steps at once are refused, and so is a window whose variables somebody else changed."""

import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..core.errors import OrderError


class Use:
    """What is known of one variable, or of one model."""

    def __init__(self) -> None:
        self.busy: set[int] = set()
        """The replicas on which a call is under way."""
        self.num_changes = 0
        """How many steps accumulators made with it."""


class Held:
    """The variables that a call keeps others away from; Keras takes its time to list them."""

    def __init__(self) -> None:
        self.variables: list[Any] = []


_guard = threading.Lock()
_uses: dict[int, Use] = {}  # by id, since a tf.Variable cannot be hashed; gone with the variable


def use_of(variable: Any) -> Use:
    found = _uses.get(id(variable))
    if found is None:
        found = _uses[id(variable)] = Use()
        weakref.finalize(variable, _uses.pop, id(variable), None).atexit = False
    return found


@contextmanager
def alone(variables: Iterable[Any], replicas: Iterable[int]) -> Iterator[None]:
    """Keeps others away from these variables, and does not wait for them: an error if somebody is there already."""
    numbers = set(replicas)
    with _guard:
        uses = [use_of(v) for v in variables]
        if any(use.busy & numbers for use in uses):
            raise OrderError(
                "another thread, or another accumulator, is in the middle of a step with these variables, and nothing "
                "was done: let one thread at a time call step(), add() and flush()"
            )
        for use in uses:
            use.busy |= numbers
    try:
        yield
    finally:
        with _guard:
            for use in uses:
                use.busy -= numbers


def num_changes(variables: Sequence[Any]) -> list[int]:
    return [use_of(v).num_changes for v in variables]


def changed(variables: Sequence[Any]) -> None:
    """An accumulator stepped."""
    for variable in variables:
        use_of(variable).num_changes += 1


def _begin_anew() -> None:
    """In the child of a fork, where the threads that were in the middle of something are not."""
    global _guard
    _guard = threading.Lock()
    for use in _uses.values():
        use.busy.clear()


os.register_at_fork(after_in_child=_begin_anew)
