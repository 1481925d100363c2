"""What happens when a gradient or a loss is not finite: one policy and its messages for all frameworks."""

import math
from typing import Any, Literal, get_args

from .errors import NonFiniteError, OrderError, warn
from .options import Option, check_choice, check_size
from .weight import Terms

OnNonFinite = Literal["skip", "raise", "stop"]
_REMEDY = "look at the data of that step, lower the learning rate, or clip the gradient"
_REMEDY_OF_LOSS = (
    "if it is a mean over labels that are all ignored, which is 0/0, pass weight=… so that such a micro-batch does not "
    f"count; else {_REMEDY}"
)


class NonFinite:
    """Keeps non-finite gradients away from the parameters, and reacts as the user chose.

    "skip":  warn, and start the next window clean; too many skipped steps in a row are an error
    "raise": raise NonFiniteError at once
    "stop":  skip the step, and take no more

    A GradScaler finds its scale by overflowing: such a step is skipped and counted without a warning.

    Args:
        on_nonfinite: "skip", "raise" or "stop".
        max_skipped: After how many skipped steps in a row to raise NonFiniteError; None for never.
        warns: Whether to warn of a skipped step; False if the framework prints it from its graph.
        resume: How to continue after "stop".
    """

    on_nonfinite = Option(lambda name, value: check_choice(name, value, get_args(OnNonFinite)))
    max_skipped = Option(check_size)

    def __init__(
        self,
        on_nonfinite: OnNonFinite = "skip",
        max_skipped: int | None = 32,
        *,
        warns: bool = True,
        resume: str = "load an earlier state with load_state_dict(), or make a new accumulator",
    ) -> None:
        self.on_nonfinite = on_nonfinite
        self.max_skipped = max_skipped
        self._warns = warns
        self._resume = resume
        self.is_stopped = False
        self.num_skipped = 0
        """How many steps in a row have been skipped."""
        self._first_step = 0
        self._first_place = ""
        self._due: dict[int, str] = {}
        """The errors that `check` will raise, by the step that was one too many."""

    @property
    def needs_finite_loss(self) -> bool:
        """Whether a step needs a finite loss too. "skip" needs only a finite gradient, as any loop does."""
        return bool(self.on_nonfinite != "skip")

    @property
    def raises(self) -> bool:
        """Whether a skipped step is an error at once."""
        return bool(self.on_nonfinite == "raise")

    def applied(self) -> None:
        """Records a step that was applied."""
        self.num_skipped = 0

    def skipped(self, step: int, place: str, *, is_overflow: bool, is_step: bool = True) -> None:
        """Records a step that was not applied; raises, warns or stops as the user chose.

        Args:
            step: Its number, from 1.
            place: What is not finite: "the loss", "the gradient of weight".
            is_overflow: Whether a GradScaler handles it.
            is_step: False for a gradient alone, which the user wanted for the step with this number.
        """
        if self.raises and not is_overflow:
            what = f"in step {step}, so it was not taken" if is_step else "in backward(), so .grad has no gradient"
            remedy = f'{_REMEDY}, or pass on_nonfinite="skip" to skip such steps'
            if place.endswith("the loss"):  # with "skip" only the gradient decides
                remedy = _REMEDY_OF_LOSS
            raise NonFiniteError(f"{place} is not finite {what}: {remedy}")
        if not self.num_skipped:
            self._first_step, self._first_place = step, place
        self.num_skipped += 1
        is_too_many = self.max_skipped is not None and self.num_skipped >= self.max_skipped
        if self.on_nonfinite == "stop":
            self.is_stopped = is_too_many or not is_overflow
            return
        if is_too_many:
            self._due[step] = (
                f"the last {self.num_skipped} steps were skipped, starting at step {self._first_step}, where "
                f"{self._first_place} was not finite: {_REMEDY}, "
                f"or pass a max_skipped above {self.max_skipped}"
            )
        if self._warns and not is_overflow:
            warn(
                f"step {step} was skipped: {place} is not finite; "
                "the parameters are unchanged and the next window starts clean"
                if is_step
                else f"backward() left no gradient in .grad: {place} is not finite; the next call starts clean"
            )

    def check(self, until: int) -> None:
        """Raises NonFiniteError if too many steps in a row were skipped, the last of them in step `until` or before.

        Later steps may be known already, but not on all ranks, and all ranks must do the same.
        """
        if self._due and (due := [step for step in self._due if step <= until]):
            messages = [self._due.pop(step) for step in due]
            raise NonFiniteError(messages[-1])

    def check_not_stopped(self) -> None:
        """Raises OrderError if a step was skipped with `on_nonfinite="stop"`."""
        if self.is_stopped:
            raise OrderError(
                f"training was stopped because {self._first_place} was not finite in step {self._first_step}: "
                f"{self._resume}"
            )

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint saves."""
        return {"num_steps": self.num_skipped, "first_step": self._first_step, "first_place": self._first_place}

    @staticmethod
    def read(state: dict[str, Any]) -> dict[str, Any]:
        """Returns a saved state after checking it; raises TypeError if a value is of another type."""
        default = NonFinite().state_dict()
        state = {**default, **state}
        return {name: type(value)() + state[name] for name, value in default.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from what `read` returned."""
        self.num_skipped, self._first_step = state["num_steps"], state["first_step"]
        self._first_place = state["first_place"]
        self._due.clear()
        self.is_stopped = False


def place_of(name: str | None) -> str:
    """What messages call the gradient of this parameter; None if another rank has it."""
    return f"the gradient of {name}" if name is not None else "a part of the gradient that another rank has"


def place_in(losses: Terms) -> str | None:
    """What messages call the first term that is not finite; None if all are finite."""
    for number, loss in enumerate(losses, 1):
        if not math.isfinite(loss):
            return "the loss" if len(losses) == 1 else f"term {number} of the loss"
    return None
