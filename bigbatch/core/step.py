"""`Step`: what one optimizer step did."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar, cast

from .weight import Reduction, Terms, as_terms

_T = TypeVar("_T")
_REQUIRED = object()
_OF_AUX = frozenset({"aux", "metrics", "summed"})


class _Fetched(Generic[_T]):
    """A field whose value may be a function. It is called at the first read, and its result is kept.

    Args:
        default: The value, or the function, if none is given. Without it, the field must be given.
    """

    def __init__(self, default: Any = _REQUIRED) -> None:
        self._default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    def __set__(self, step: "Step", value: _T | Callable[[], _T]) -> None:
        vars(step)[self._name] = value

    def __get__(self, step: "Step | None", owner: type) -> _T:
        if step is None:
            if self._default is _REQUIRED:
                raise AttributeError  # tells dataclass that there is no default
            return cast(_T, self._default)
        value = vars(step)[self._name]
        if callable(value):
            value = vars(step)[self._name] = value()
        fetched: _T = value
        return fetched


@dataclass(kw_only=True, eq=False, repr=False)
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
        reduction: "mean" or "sum": how the losses of the samples are combined.
        noise_scale: The gradient noise scale. Nothing measures it yet, so it is None.
        aux: What the loss returned beside its value, with `has_aux=True`, for the whole batch. None in a `History`,
            which keeps `metrics`.
        metrics: The numbers in `aux` by name, such as `{"accuracy": 0.9}`.
        summed: The names of the metrics that add up over micro-batches and steps. The others are weighted means.
    """

    terms: _Fetched[Terms] = _Fetched()
    weight: _Fetched[Any] = _Fetched()
    grad_norm: _Fetched[float | None] = _Fetched()
    num_micro_batches: _Fetched[int] = _Fetched()
    micro_batch_size: int | None
    is_applied: _Fetched[bool] = _Fetched()
    reduction: Reduction = "mean"
    noise_scale: float | None = None
    aux: _Fetched[Any] = _Fetched(None)
    metrics: _Fetched[dict[str, float]] = _Fetched(dict)
    summed: tuple[str, ...] = ()

    def without_aux(self) -> "Step":
        """This step without `aux`, which may hold a row for each sample; a `History` keeps this."""
        if vars(self)["_aux"] is None:
            return self
        kept = copy.copy(self)
        kept.aux = None
        return kept

    @property
    def loss(self) -> float:
        """The loss of the whole batch; NaN if the total weight is 0."""
        has_weight = self.reduction == "sum" or any(as_terms(self.weight))
        return float(sum(self.terms)) if has_weight else math.nan

    def as_dict(self) -> dict[str, Any]:
        """All values but `aux` as plain Python numbers, lists and strings. `metrics` is there if there are any."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _OF_AUX}
        if self.metrics:
            values |= {"metrics": {name: float(value) for name, value in self.metrics.items()}}
            values |= {"summed": list(self.summed)} if self.summed else {}
        weight = [*map(_plain, self.weight)] if isinstance(self.weight, tuple) else _plain(self.weight)
        return {"loss": self.loss, **values, "terms": list(self.terms), "weight": weight}

    def __repr__(self) -> str:
        applied = "" if self.is_applied else ", not applied"
        size = "" if self.micro_batch_size is None else f" of {self.micro_batch_size}"
        norm = "" if self.grad_norm is None else f" grad_norm={self.grad_norm:.4g},"
        metrics = "".join(f" {name}={value:.4g}," for name, value in self.metrics.items())
        return (
            f"Step(loss={self.loss:.6g}, weight={self.weight},{metrics}{norm} "
            f"{self.num_micro_batches} micro-batch{'es' * (self.num_micro_batches != 1)}{size}{applied})"
        )


def _plain(number: Any) -> Any:
    """A numpy number as a Python number."""
    return number.item() if hasattr(number, "item") else number
