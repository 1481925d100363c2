"""A window that is fed one micro-batch at a time: what it holds, and how it is saved."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..core.errors import OrderError, StateError
from ..core.step import Step
from ..core.weight import Reduction, Tally
from .gradients import Sums
from .weight import read


@dataclass
class OpenWindow:
    """The micro-batches so far: their weights, their losses, and the gradient sums of each term."""

    tally: Tally
    sums: list[Sums]
    losses: list[list[Any]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tally.weights)

    def state_dict(self, parameters: list[Tensor]) -> dict[str, Any]:
        """Copies, so that going on does not change what was saved."""
        number = {p: k for k, p in enumerate(parameters)}
        return {
            "reduction": self.tally.reduction,
            "weights": read(self.tally.weights),
            "reference": self.tally.reference,
            "losses": [list(terms) for terms in self.losses],
            "gradients": [{number[p]: g.clone() for p, g in sums.items()} for sums in self.sums],
            "shapes": [tuple(p.shape) for p in parameters],
        }

    @classmethod
    def load(cls, state: dict[str, Any], parameters: list[Tensor], reduction: Reduction) -> "OpenWindow":
        shapes = [tuple(p.shape) for p in parameters]
        if state["reduction"] != reduction:
            raise StateError(
                f"the state was saved with reduction={state['reduction']!r}, this accumulator has "
                f"{reduction!r}: make it with the same"
            )
        if len(state["shapes"]) != len(shapes):
            raise StateError(
                f"the state is of {len(state['shapes'])} parameters, the optimizer holds {len(shapes)}: "
                "load it into the same model and optimizer"
            )
        for k, (saved, own) in enumerate(zip(state["shapes"], shapes, strict=True)):
            if tuple(saved) != own:
                raise StateError(
                    f"parameter {k} has the shape {tuple(saved)} in the state but {own} in the optimizer: "
                    "load it into the same model and optimizer"
                )
        tally = Tally(reduction)
        tally.weights = [tuple(weight) for weight in state["weights"]]
        tally.reference = tuple(state["reference"])
        return cls(
            tally,
            [
                {parameters[k]: g.to(parameters[k].device, copy=True) for k, g in sums.items()}
                for sums in state["gradients"]
            ],
            [list(terms) for terms in state["losses"]],
        )


class MicroBatch:
    """One micro-batch of the user's own loop; see `Accumulator.micro_batch`."""

    def __init__(self, feed: Callable[["MicroBatch", Any], None]) -> None:
        self._feed = feed
        self.has_begun = False
        self.step: Step | None = None
        """The step that this micro-batch completed, once the block has ended; None if its window goes on."""

    def backward(self, loss: Any) -> None:
        """Adds the gradient of this micro-batch's loss, a mean over its `weight`, to the window."""
        if self.has_begun:
            raise OrderError("micro.backward was called twice in one micro-batch: add the losses up before")
        self._feed(self, loss)
