"""`Step`: what one optimizer step did."""

import math
from collections.abc import Callable
from typing import Any

from .weight import Reduction, Terms, as_terms


class _Fetched:
    """An attribute whose value may be a function. It is called at the first read, and its result is kept."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._slot = f"_{name}"

    def __set__(self, step: "Step", value: Any) -> None:
        setattr(step, self._slot, value)

    def __get__(self, step: "Step", owner: type) -> Any:
        value = getattr(step, self._slot)
        if callable(value):
            value = value()
            setattr(step, self._slot, value)
        return value


class Step:
    """What one optimizer step did.

        step = accumulator.step(batch)
        if not step.is_applied:
            print("skipped")
        print(step.loss, step.grad_norm)

    Creating a Step never waits for a GPU: values that are still on the device are fetched when you first read them.

    Attributes:
        loss: The loss of the whole batch: its terms added up. NaN if the total weight is 0.
        terms: The terms of the loss, each for the whole batch. A plain loss is a tuple of one.
        weight: The total weight of the batch: its samples, unless you count something else. A tuple with one number per
            term if the loss has several terms.
        grad_norm: The norm of the gradient of the whole batch, before clipping. None if it was not measured.
        num_micro_batches: How many micro-batches the step had, on all ranks together.
        micro_batch_size: How many samples a micro-batch has at most. None if you fed the micro-batches yourself.
        is_applied: Whether the parameters were updated. False if the total weight was 0, or if the gradient was not
            finite.
        reduction: "mean" or "sum": how the losses of the samples become that of the batch.
        noise_scale: The gradient noise scale, if somebody measured it; the accumulators leave it None.
    """

    __slots__ = (
        "_grad_norm",
        "_is_applied",
        "_num_micro_batches",
        "_terms",
        "_weight",
        "micro_batch_size",
        "noise_scale",
        "reduction",
    )
    terms = _Fetched()
    weight = _Fetched()
    grad_norm = _Fetched()
    num_micro_batches = _Fetched()
    is_applied = _Fetched()

    def __init__(
        self,
        *,
        terms: Terms | Callable[[], Terms],
        weight: Any,
        grad_norm: float | Callable[[], float] | None,
        num_micro_batches: int | Callable[[], int],
        micro_batch_size: int | None,
        is_applied: bool | Callable[[], bool],
        reduction: Reduction = "mean",
        noise_scale: float | None = None,
    ) -> None:
        self.terms = terms
        self.weight = weight
        self.grad_norm = grad_norm
        self.num_micro_batches = num_micro_batches
        self.micro_batch_size = micro_batch_size
        self.is_applied = is_applied
        self.reduction: Reduction = reduction
        self.noise_scale = noise_scale

    @property
    def loss(self) -> float:
        """The loss of the whole batch; NaN if the total weight is 0."""
        has_weight = self.reduction == "sum" or any(as_terms(self.weight))
        return float(sum(self.terms)) if has_weight else math.nan

    def as_dict(self) -> dict[str, Any]:
        """All values as plain Python numbers, lists and strings."""
        return {
            "loss": self.loss,
            "terms": list(self.terms),
            "weight": [*map(_plain, self.weight)] if isinstance(self.weight, tuple) else _plain(self.weight),
            "grad_norm": self.grad_norm,
            "num_micro_batches": self.num_micro_batches,
            "micro_batch_size": self.micro_batch_size,
            "is_applied": self.is_applied,
            "reduction": self.reduction,
            "noise_scale": self.noise_scale,
        }

    def __repr__(self) -> str:
        applied = "" if self.is_applied else ", not applied"
        size = "" if self.micro_batch_size is None else f" of {self.micro_batch_size}"
        norm = "" if self.grad_norm is None else f" grad_norm={self.grad_norm:.4g},"
        return (
            f"Step(loss={self.loss:.6g}, weight={self.weight},{norm} "
            f"{self.num_micro_batches} micro-batch{'es' * (self.num_micro_batches != 1)}{size}{applied})"
        )


def _plain(number: Any) -> Any:
    """A numpy number as Python's own."""
    return number.item() if hasattr(number, "item") else number
