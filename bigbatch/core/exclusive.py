"""Only one call at a time may train a parameter; changes made by others are detected."""

import operator
import os
import threading
import weakref
from collections import ChainMap
from collections.abc import Callable, Sequence
from typing import Any

from .errors import OrderError

_guard = threading.RLock()  # reentrant: a signal handler may run at any time
_live: "weakref.WeakSet[Exclusive]" = weakref.WeakSet()


class _Lock:
    """The lock of parameters that are trained together."""

    def __init__(self) -> None:
        self.holders: dict[int, Callable[[], _Hold | None]] = {}
        """Weak references to the call that holds it, by replica: a call that Ctrl-C ended holds nothing."""
        self.num_changes = 0
        """How often the parameters were stepped: fused and captured optimizers leave no trace on them (torch 2.13)."""
        self.is_orphaned = False
        """Whether a fork left its holder behind."""


class _Hold:
    """A call that holds locks inside its block: all of them, or it is refused."""

    def __init__(self, locks: list[_Lock], call: str, replicas: Sequence[int]) -> None:
        self._locks = locks
        self._call = call
        self._replicas = replicas
        self._thread = threading.get_ident()

    def is_of_this_thread(self) -> bool:
        return self._thread == threading.get_ident()

    def __enter__(self) -> None:
        reference = weakref.ref(self)
        with _guard:
            for lock in self._locks:
                for replica in self._replicas:
                    holder = lock.holders.get(replica, _nobody)()
                    if lock.is_orphaned or holder is not None:
                        raise OrderError(_refusal(self._call, lock.is_orphaned, holder))
            for lock in self._locks:
                for replica in self._replicas:
                    lock.holders[replica] = reference

    def __exit__(self, *_: Any) -> None:
        for lock in self._locks:
            for replica in self._replicas:
                lock.holders.pop(replica, None)


class Exclusive:
    """The locks of one accumulator's parameters: one as a rule, more if it shares some with another accumulator.

        with exclusive.hold("step()"):   # OrderError if another call is training one of the parameters
            …

    Args:
        parameters: Returns what is trained now; an optimizer may be given more parameters while it trains.
        key: What identifies a parameter.
    """

    def __init__(self, parameters: Callable[[], Sequence[Any]], key: Callable[[Any], Any] = id) -> None:
        self.__setstate__((parameters, key))
        self._assign(parameters())

    def __getstate__(self) -> Any:
        """A copy trains parameters of its own."""
        return self._parameters, self._key

    def __setstate__(self, state: Any) -> None:
        self._parameters, self._key = state
        self._held: Sequence[Any] = ()  # while they live, no other object gets their ids
        self._locks: list[_Lock] = []
        self._lock_of: dict[Any, _Lock] = {}

    def _assign(self, parameters: Sequence[Any]) -> None:
        """Gives every parameter the lock it has, here or in another accumulator; those without one share a new one."""
        with _guard:
            known = ChainMap(self._lock_of, *(other._lock_of for other in _live))
            new = _Lock()
            self._held = parameters
            self._lock_of = {key: known.get(key, new) for key in map(self._key, parameters)}
            self._locks = list(dict.fromkeys(self._lock_of.values()))
            _live.add(self)

    def hold(self, call: str, replicas: Sequence[int] = (0,)) -> _Hold:
        """Refuses other calls inside a block; they do not wait.

        Args:
            call: What error messages call this call.
            replicas: The replicas whose copies of the parameters it trains.
        """
        now = self._parameters()
        if len(now) != len(self._held) or any(map(operator.is_not, now, self._held)):
            self._assign(now)
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


def _nobody() -> None:
    """The holder of a lock that is free."""


def _refusal(call: str, is_orphaned: bool, holder: _Hold | None) -> str:
    if is_orphaned:
        return (
            f"{call} was called in a process that was forked while another thread was in the middle of a step, so its "
            "copy of the parameters may be half updated: load them and call forget(), or fork between steps"
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
    global _guard
    _guard = threading.RLock()
    for lock in {lock for exclusive in _live for lock in exclusive._lock_of.values()}:
        for replica, holder_of in list(lock.holders.items()):
            holder = holder_of()
            if holder is not None and not holder.is_of_this_thread():
                del lock.holders[replica]
                lock.is_orphaned = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free_in_child)
