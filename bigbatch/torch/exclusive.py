"""Two users at once: who trains parameters has them to himself until the call is done; what changed is noticed."""

import functools
import itertools
import operator
import os
import threading
import weakref
from typing import Any

from torch import Tensor, nn

from ..core.errors import OrderError
from .gradients import Gradients


class Turn:
    """Whose turn it is to train the parameters that have this one."""

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.held_by: dict[None, weakref.ref[Taken]] = {}
        """The call that has it, if any: a dict, since `setdefault` asks and takes in one go."""
        self.num_changes = 0
        """How often the parameters were stepped: fused and captured optimizers leave no trace on them (torch 2.13)."""
        self.is_torn = False
        """Whether a fork left its holder behind."""

    def start_anew_in_child(self) -> None:
        """A fork takes only its own thread along: what any other was doing is never finished here."""
        if (mark := self.held_by.get(None)) and not is_of_this_thread(mark):
            self.held_by, self.is_torn = {}, True


class Taken:
    """One call that wants these turns; it has all of them inside of its block, or is refused.

    Turns know it by a weak reference: if Ctrl-C comes just before they are given back, they are free all the same.
    """

    def __init__(self, turns: list[Turn], call: str) -> None:
        self._turns = turns
        self._call = call
        self._mark: Any = weakref.ref(self, functools.partial(give_back, turns))
        self.thread = threading.get_ident()

    def __enter__(self) -> None:
        for turn in self._turns:
            mark = turn.held_by.setdefault(None, self._mark)
            if turn.is_torn or mark is not self._mark:
                self.__exit__()
                raise OrderError(refusal(self._call, is_torn=turn.is_torn, is_own=is_of_this_thread(mark)))

    def __exit__(self, *_: Any) -> None:
        give_back(self._turns, self._mark)
        self._mark = None


def give_back(turns: list[Turn], mark: "weakref.ref[Taken]") -> None:
    for turn in turns:
        if turn.held_by.get(None) is mark:
            del turn.held_by[None]


def is_of_this_thread(mark: "weakref.ref[Taken]") -> bool:
    holder = mark()
    return holder is not None and holder.thread == threading.get_ident()


_handing_out = threading.Lock()
_numbers = itertools.count()
version_of = operator.attrgetter("_version")


class Turns:
    """Those of the parameters of one accumulator: one as a rule, more if it shares some of them with another.

    with turns.take("step()"):   # OrderError if anybody else is at it
        …
    """

    def __init__(self, gradients: Gradients) -> None:
        self.__setstate__(gradients)
        self._hand_out()

    def __getstate__(self) -> Any:
        """A copy trains parameters of its own."""
        return self._gradients

    def __setstate__(self, gradients: Gradients) -> None:
        self._gradients = gradients
        self.by_parameter: dict[Tensor, Turn] = {}
        self._turns: list[Turn] = []
        self._plain: list[Tensor] = []
        """Those whose memory has one place: shards may be moved about."""

    def _hand_out(self) -> None:
        """A parameter keeps its turn, or has that of others who train it; those that have none get one in common."""
        parameters = self._gradients.parameters
        with _handing_out:
            fresh = Turn()
            known = [self.by_parameter, *(others.by_parameter for others in _live)]
            _live.add(self)
            self._plain = [p for p in parameters if type(p) is nn.Parameter and not p.is_sparse]
            # In the order in which they were made: of two who want several, one gets them
            handed = {p: next((turns[p] for turns in known if p in turns), fresh) for p in parameters}
            self._turns = sorted(set(handed.values()), key=lambda turn: turn.number)
            self.by_parameter = handed  # last: from here on nobody waits for this

    def take(self, call: str) -> Taken:
        if self._has_others():
            self._hand_out()
        return Taken(self._turns, call)

    def _has_others(self) -> bool:
        """Whether the optimizer holds other parameters by now."""
        now = self._gradients.parameters
        return len(now) != len(self.by_parameter) or any(map(operator.is_not, now, self.by_parameter))

    def changed(self) -> None:
        """Says to all who share the parameters that they are not what they were."""
        for turn in self._turns:
            turn.num_changes += 1

    def mend(self) -> None:
        """After a fork in the middle of somebody's step: the caller has seen to the parameters."""
        for turn in self._turns:
            turn.is_torn = False

    def seen(self) -> list[int]:
        """Differs from what it was before if the parameters do: others stepped, or something was loaded.

        How many there are comes first.
        """
        marks = [len(self.by_parameter), *map(version_of, self.by_parameter), *map(Tensor.data_ptr, self._plain)]
        for turn in self._turns:
            marks.append(turn.num_changes)
        return marks + self._gradients.steps_seen() if self._gradients.is_fused else marks


_live: "weakref.WeakSet[Turns]" = weakref.WeakSet()


def refusal(call: str, *, is_torn: bool, is_own: bool) -> str:
    if is_torn:
        return (
            f"{call} was called in a process that was forked while another thread was in the middle of a step, so its "
            "copy of the parameters may be half updated: load them and call forget(), or fork between steps"
        )
    if is_own:
        return (
            f"{call} was called inside of a micro_batch() block, or of another step of the same parameters: "
            "call it after that"
        )
    return (
        f"{call} was called while another thread is in a step of the same parameters: "
        "let one thread train them, or have the others wait"
    )


def _start_anew_in_child() -> None:
    global _handing_out
    _handing_out = threading.Lock()
    for turns in list(_live):
        for turn in turns.by_parameter.values():
            turn.start_anew_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew_in_child)
