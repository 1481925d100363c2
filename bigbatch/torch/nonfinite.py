"""What is done about a gradient or a loss that is not finite, and how often that happened in a row."""

import math
import warnings
from typing import Any, Literal

from ..core.errors import BigBatchWarning, NonFiniteError, OrderError
from ..core.options import Option, check_on_nonfinite
from ..core.weight import Terms
from ..core.window import positive
from .state import like_its_own

OnNonFinite = Literal["skip", "raise", "stop"]
REMEDY = "look at the data of that step, lower the learning rate, or clip the gradient"


class NonFinite:
    """No such gradient reaches the parameters; the caller chooses how to hear of it.

    "skip":  a warning, and the next window starts clean; too many in a row are an error all the same
    "raise": an error, at once
    "stop":  the step is skipped like any other, and no further one is made

    With a GradScaler a gradient that overflows is how it finds its scale: that is skipped and counted, nothing more.
    """

    on_nonfinite = Option(check_on_nonfinite)
    max_skipped = Option(positive)

    def __init__(self, on_nonfinite: OnNonFinite = "skip", max_skipped: int = 32) -> None:
        self.on_nonfinite = on_nonfinite
        self.max_skipped = max_skipped
        self.is_stopped = False
        self.num_skipped = 0
        """How many steps in a row were skipped until now."""
        self._first_step = 0
        self._first_place = ""
        self._due: dict[int, str] = {}
        """What is to be raised, by the step that was one too many."""

    @property
    def minds_losses(self) -> bool:
        """Whether a loss that is not finite matters if its gradient is: "skip" applies it, as any loop would."""
        return bool(self.on_nonfinite != "skip")

    def applied(self) -> None:
        """A good step: the next one that is skipped is the first again."""
        self.num_skipped = 0

    def skipped(self, step: int, place: str, *, is_overflow: bool) -> None:
        """A step that is not applied, because of what is at this place; `is_overflow` if a scaler deals with it."""
        if self.on_nonfinite == "raise" and not is_overflow:
            raise NonFiniteError(
                f"{place} is not finite in step {step}, which was not made: {REMEDY}, "
                'or pass on_nonfinite="skip" to leave such steps out'
            )
        if not self.num_skipped:
            self._first_step, self._first_place = step, place
        self.num_skipped += 1
        is_too_many = self.num_skipped >= self.max_skipped
        if self.on_nonfinite == "stop":
            self.is_stopped = is_too_many or not is_overflow
            return
        if is_too_many:
            self._due[step] = (
                f"{self.num_skipped} steps in a row were skipped since the last one that was applied, the first in "
                f"step {self._first_step}, where {self._first_place} was first not finite: {REMEDY}, "
                f"or pass a max_skipped above {self.max_skipped}"
            )
        if not is_overflow:
            warnings.warn(
                f"step {step} was skipped: {place} is not finite; "
                "the parameters are unchanged and the next window starts clean",
                BigBatchWarning,
                stacklevel=7,
            )

    def check(self, until: int) -> None:
        """Refuses to go on if too many steps in a row were skipped, the last of them in step `until` or before.

        Later ones may be known already, but not on all ranks, and they must all do the same.
        """
        if due := [step for step in self._due if step <= until]:
            messages = [self._due.pop(step) for step in due]
            raise NonFiniteError(messages[-1])

    def refuse_stopped(self) -> None:
        if self.is_stopped:
            raise OrderError(
                f"training was stopped, since {self._first_place} was not finite in step {self._first_step}: "
                "take up a state from before with load_state_dict(), or make a new accumulator"
            )

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_skipped, "first_step": self._first_step, "first_place": self._first_place}

    @staticmethod
    def read(state: dict[str, Any]) -> dict[str, Any]:
        """States from before there was a count have none."""
        return like_its_own({**NonFinite().state_dict(), **state}, NonFinite().state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_skipped, self._first_step = state["num_steps"], state["first_step"]
        self._first_place = state["first_place"]
        self._due.clear()
        self.is_stopped = False


def place_of(name: str | None) -> str:
    return f"the gradient of {name}" if name is not None else "a part of the gradient that another rank has"


def place_in(losses: Terms) -> str | None:
    """The first loss that is not finite, if there is one."""
    for number, loss in enumerate(losses, 1):
        if not math.isfinite(loss):
            return "the loss" if len(losses) == 1 else f"term {number} of the loss"
    return None
