"""Only one call at a time may train a parameter; changes made by others are detected."""

import functools
import itertools
import operator
import os
import threading
import weakref
from collections import ChainMap
from collections.abc import Callable, Sequence
from typing import Any

from .errors import OrderError

_assigning = threading.RLock()  # reentrant: a signal handler may run at any time
_numbers = itertools.count()
_live: "weakref.WeakSet[Exclusive]" = weakref.WeakSet()


class _Lock:
    """The lock of parameters that are trained together."""

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.holders: dict[int, weakref.ref[_Hold]] = {}
        """The call that holds it, by replica. A dict, because `setdefault` tests and takes in one atomic step."""
        self.num_changes = 0
        """How often the parameters were stepped: fused and captured optimizers leave no trace on them (torch 2.13)."""
        self.is_orphaned = False
        """Whether a fork left its holder behind."""


class _Hold:
    """A call that holds locks inside its block, or is refused.

    The locks have a weak reference to it, which frees them when it dies: Ctrl-C may come just before `__exit__`.
    """

    def __init__(self, locks: list[_Lock], call: str, replicas: Sequence[int]) -> None:
        self._locks = locks
        self._call = call
        self._replicas = replicas
        self._thread = threading.get_ident()
        self._reference: Any = weakref.ref(self, functools.partial(_free, locks, replicas))

    def is_of_this_thread(self) -> bool:
        return self._thread == threading.get_ident()

    def __enter__(self) -> None:
        for lock in self._locks:
            for replica in self._replicas:
                holder = lock.holders.setdefault(replica, self._reference)
                if lock.is_orphaned or holder is not self._reference:
                    self.__exit__()  # it may hold others already
                    raise OrderError(_refusal(self._call, lock.is_orphaned, holder()))

    def __exit__(self, *_: Any) -> None:
        _free(self._locks, self._replicas, self._reference)
        self._reference = None


class Exclusive:
    """The locks of one accumulator's parameters: one as a rule, more if it shares some with another accumulator.

        with exclusive.hold("step()"):   # OrderError if another call is training one of the parameters
            …

    Args:
        parameters: Returns what is trained now; an optimizer may be given more parameters while it trains.

    Attributes:
        held: The parameters as of the last `hold`. While they are in this list, no other object gets their ids. It is a
            new list if they have changed.
    """

    def __init__(self, parameters: Callable[[], Sequence[Any]]) -> None:
        self.__setstate__(parameters)
        self._assign(parameters())

    def __getstate__(self) -> Any:
        """A copy trains parameters of its own."""
        return self._parameters

    def __setstate__(self, parameters: Callable[[], Sequence[Any]]) -> None:
        self._parameters = parameters
        self.held: Sequence[Any] = ()
        self._locks: list[_Lock] = []
        self._lock_of: dict[int, _Lock] = {}  # by the id of the parameter

    def _assign(self, parameters: Sequence[Any]) -> None:
        """Gives every parameter the lock it has, here or in another accumulator; those without one share a new one."""
        with _assigning:
            known = ChainMap(self._lock_of, *(other._lock_of for other in _live))
            new = _Lock()
            self.held = parameters
            self._lock_of = {key: known.get(key, new) for key in map(id, parameters)}
            # in one order for all: of two calls that want the same locks, one gets them all
            self._locks = sorted(set(self._lock_of.values()), key=lambda lock: lock.number)
            _live.add(self)

    def hold(self, call: str, replicas: Sequence[int] = (0,)) -> _Hold:
        """Refuses other calls inside a block; they do not wait.

        Args:
            call: What error messages call this call.
            replicas: The replicas whose copies of the parameters it trains.
        """
        now = self._parameters()
        if len(now) != len(self.held) or any(map(operator.is_not, now, self.held)):
            self._assign(now)
        return _Hold(self._locks, call, replicas)

    def changed(self) -> None:
        """Records, for everyone who shares the parameters, that they have changed."""
        for lock in self._locks:
            lock.num_changes += 1

    def num_changes(self) -> list[int]:
        """How many parameters there are, and how often each lock's were changed."""
        return [len(self.held), *[lock.num_changes for lock in self._locks]]

    def recover(self) -> None:
        """After a fork in the middle of another thread's step: the caller has restored the parameters."""
        for lock in self._locks:
            lock.is_orphaned = False


def _free(locks: list[_Lock], replicas: Sequence[int], reference: "weakref.ref[_Hold]") -> None:
    for lock in locks:
        for replica in replicas:
            if lock.holders.get(replica) is reference:
                del lock.holders[replica]


def _refusal(call: str, is_orphaned: bool, holder: _Hold | None) -> str:
    if is_orphaned:
        return (
            f"{call} was called in a process that was forked while another thread was in the middle of a step, so its "
            "copy of the parameters may be half updated: fork between steps (in PyTorch, you can also load the "
            "parameters and call forget())"
        )
    if holder is not None and holder.is_of_this_thread():
        return (
            f"{call} was called inside a micro_batch() block, or inside another step of the same parameters: "
            "call it after that"
        )
    return (
        f"{call} was called while another thread is in a step of the same parameters: "
        "let one thread train them, or have the others wait"
    )


def _free_in_child() -> None:
    """Only the forking thread exists in the child: calls of other threads never end there."""
    global _assigning
    _assigning = threading.RLock()
    for lock in {lock for exclusive in _live for lock in exclusive._lock_of.values()}:
        for replica, holder_of in list(lock.holders.items()):
            holder = holder_of()
            if holder is not None and not holder.is_of_this_thread():
                del lock.holders[replica]
                lock.is_orphaned = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free_in_child)
