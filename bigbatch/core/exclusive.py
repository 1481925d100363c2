"""Only one call at a time may train a parameter; changes made by others are detected."""

import functools
import itertools
import operator
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from .errors import OrderError


class _Lock:
    """The lock of some parameters. Parameters that are trained together share one."""

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.held_by: dict[int, weakref.ref[_Hold]] = {}
        """The call that holds it, by replica. It is a dict because `setdefault` tests and takes in one operation."""
        self.num_changes = 0
        """How often the parameters were stepped: fused and captured optimizers leave no trace on them (torch 2.13)."""
        self.is_orphaned = False
        """Whether a fork left its holder behind."""

    def free_in_child(self) -> None:
        """Only the forking thread exists in the child: calls of other threads never end there."""
        for replica, mark in list(self.held_by.items()):
            if not _is_of_this_thread(mark):
                del self.held_by[replica]
                self.is_orphaned = True


class _Hold:
    """A call that holds locks inside its block, or is refused.

    Locks refer to it weakly: if Ctrl-C arrives just before they are released, they are free all the same. For the same
    reason nothing here waits for another lock, which an interrupted call could leave behind.
    """

    def __init__(self, locks: list[_Lock], call: str, replicas: Sequence[int]) -> None:
        self._locks = locks
        self._call = call
        self._replicas = replicas
        self._mark: Any = weakref.ref(self, functools.partial(_release, locks, replicas))
        self.thread = threading.get_ident()

    def __enter__(self) -> None:
        for lock in self._locks:
            for replica in self._replicas:
                mark = lock.held_by.setdefault(replica, self._mark)
                if lock.is_orphaned or mark is not self._mark:
                    self.__exit__()
                    raise OrderError(
                        _refusal(self._call, is_orphaned=lock.is_orphaned, is_own=_is_of_this_thread(mark))
                    )

    def __exit__(self, *_: Any) -> None:
        _release(self._locks, self._replicas, self._mark)
        self._mark = None


class Exclusive:
    """The locks of one accumulator's parameters: one as a rule, more if it shares some with another accumulator.

        with exclusive.hold("step()"):   # OrderError if another call is training one of the parameters
            …

    Args:
        parameters: Returns what is trained now; an optimizer may be given more parameters while it trains.
    """

    def __init__(self, parameters: Callable[[], Sequence[Any]]) -> None:
        self.__setstate__(parameters)
        self._assign()

    def __getstate__(self) -> Any:
        """A copy trains parameters of its own."""
        return self._parameters

    def __setstate__(self, parameters: Callable[[], Sequence[Any]]) -> None:
        self._parameters = parameters
        self._held: Sequence[Any] = ()  # while they live, nothing else gets their ids
        self._locks: list[_Lock] = []
        self.locks: dict[int, _Lock] = {}
        """By the id of the parameter."""

    def _assign(self) -> None:
        """Gives every parameter the lock it has, here or in another accumulator; those without one share a new one."""
        held = self._parameters()
        with _assigning:
            new = _Lock()
            known = [self.locks, *(other.locks for other in _live)]
            _live.add(self)
            # In the order in which they were made: of two calls that want several, one gets them all
            found = {key: next((locks[key] for locks in known if key in locks), new) for key in map(id, held)}
            self._locks = sorted(set(found.values()), key=lambda lock: lock.number)
            self._held = held
            self.locks = found  # last: from here on nobody waits for this

    def hold(self, call: str, replicas: Sequence[int] = (0,)) -> _Hold:
        """Refuses other calls inside a block; they do not wait.

        Args:
            call: What error messages call this call.
            replicas: The replicas whose copies of the parameters it trains.
        """
        now = self._parameters()
        if len(now) != len(self._held) or any(map(operator.is_not, now, self._held)):
            self._assign()
        return _Hold(self._locks, call, replicas)

    def changed(self) -> None:
        """Records, for everyone who shares the parameters, that they have changed."""
        for lock in self._locks:
            lock.num_changes += 1

    def num_changes(self) -> list[int]:
        """How many parameters there are, and how often each lock's were changed."""
        return [len(self._held), *[lock.num_changes for lock in self._locks]]

    def recover(self) -> None:
        """After a fork in the middle of another thread's step: the caller has restored the parameters."""
        for lock in self._locks:
            lock.is_orphaned = False


_assigning = threading.Lock()
_numbers = itertools.count()
_live: "weakref.WeakSet[Exclusive]" = weakref.WeakSet()


def _release(locks: list[_Lock], replicas: Sequence[int], mark: "weakref.ref[_Hold]") -> None:
    for lock in locks:
        for replica in replicas:
            if lock.held_by.get(replica) is mark:
                del lock.held_by[replica]


def _is_of_this_thread(mark: "weakref.ref[_Hold]") -> bool:
    holder = mark()
    return holder is not None and holder.thread == threading.get_ident()


def _refusal(call: str, *, is_orphaned: bool, is_own: bool) -> str:
    if is_orphaned:
        return (
            f"{call} was called in a process that was forked while another thread was in the middle of a step, so its "
            "copy of the parameters may be half updated: fork between steps (in PyTorch, you can also load the "
            "parameters and call forget())"
        )
    if is_own:
        return (
            f"{call} was called inside a micro_batch() block, or inside another step of the same parameters: "
            "call it after that"
        )
    return (
        f"{call} was called while another thread is in a step of the same parameters: "
        "let one thread train them, or have the others wait"
    )


def _free_in_child() -> None:
    global _assigning
    _assigning = threading.Lock()
    for lock in {lock for exclusive in list(_live) for lock in exclusive.locks.values()}:
        lock.free_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free_in_child)
