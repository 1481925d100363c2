"""What `verify` needs from a framework: a copy of the user's model, a batch, and the ways to take its gradient."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..weight import Reduction, Terms, shares, totals

Array = NDArray[np.float64]
Gradient = Mapping[str, Array]  # by the parameter's name; a parameter without a gradient is not in it
Loop = Callable[[Any, list[Any]], Any]
Rows = Sequence[int]


class Trial(Protocol):
    """A copy of the user's model, a batch, and the ways to take its gradient.

    Features that not every framework has, such as hooks, have neutral defaults.
    """

    reduction: Reduction
    epsilon: float
    """The epsilon of the dtype in which everything is computed."""
    parts: Sequence[Rows]
    """The samples of each micro-batch."""

    def full(self) -> Gradient:
        """The gradient of the whole batch, in one pass."""

    def accumulated(self) -> Gradient:
        """The gradient that the accumulator gives to an optimizer."""

    def gradient_of(self, rows: Rows, term: int | None = None) -> tuple[Gradient, float]:
        """The gradient and the loss of these samples in one pass, each sample as often as it is listed.

        Every call starts from the same state and random numbers, and runs no parameter hooks.

        Args:
            rows: The samples.
            term: The term of the loss, or None for the sum of its terms.
        """

    def by_loop(self, loop: Loop, order: Rows | None = None) -> tuple[Gradient, Gradient]:
        """The gradient that the user's own loop leaves, and the one after a second run without zeroing in between.

        Args:
            loop: The user's loop.
            order: The micro-batches to give it; all of them in order if it is None.
        """

    def explained(self) -> list[str]:
        """Causes that explain any difference without further experiments."""
        return []

    def right_scales(self) -> Array:
        """How much each micro-batch should count: one row per micro-batch, one column per term."""

    def notes(self) -> list[str]:
        """What was changed to make the two gradients comparable."""

    def layer_causes(self) -> list[str]:
        """Layers that see the micro-batch instead of the batch."""
        return []

    def mode(self) -> list[str]:
        """In which mode the model was compared, if that is not its own."""
        return []

    def cut_elsewhere(self, is_mean: Callable[[Gradient, Gradient, Gradient], bool]) -> str | None:
        """A sentence if the samples are along another axis; `is_mean(whole, first, second)` tests a cut in two."""
        return None

    def carried_over(self) -> list[str]:
        """The names of buffers that a pass changes, so that the next pass depends on it."""
        return []

    @property
    def is_random(self) -> bool:
        """Whether random numbers were drawn that cannot be cut like the batch."""
        return False

    @property
    def has_hooks(self) -> bool:
        """Whether parameters have hooks that change their gradients."""
        return False

    def quiet(self) -> AbstractContextManager[None]:
        """Switches off, inside the block, dropout and the layers that see the micro-batch."""
        return nullcontext()

    def without_dropout(self) -> AbstractContextManager[None]:
        """Switches off dropout inside the block; `notes` mentions it if there was any."""
        return nullcontext()

    def without_hooks(self) -> AbstractContextManager[None]:
        """Switches off hooks of parameters inside the block."""
        return nullcontext()


def scales_of(weights: Sequence[Terms], reduction: Reduction) -> Array:
    """`right_scales` for micro-batches with these weights."""
    total = totals(weights)
    return np.array([shares(weight, total, reduction) for weight in weights])
