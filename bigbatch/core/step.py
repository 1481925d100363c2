"""What a step did, and the steps of a run."""

import inspect
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from .checkpoint.files import write_whole
from .errors import MissingExtraError, StateError
from .weight import Reduction, Terms, as_terms, check_weight


class _Fetched:
    """An attribute whose value may be a function that fetches it: called when it is first read, and only then."""

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
    """What one step did.

    Making one never waits for a device: each value may be a function that fetches it. Reading it calls that
    function, once.
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
    """The loss of the whole batch, term by term."""
    weight = _Fetched()
    """The total weight of the batch; a tuple where the loss has several terms."""
    grad_norm = _Fetched()
    """The norm of the whole gradient, before clipping; None if nobody measured it."""
    num_micro_batches = _Fetched()
    """How many the batch was cut into, or the window had; on all replicas together."""
    is_applied = _Fetched()
    """False if the parameters were left alone: the weight was zero or the gradient not finite."""

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
        """The loss of the whole batch; not a number if the total weight is zero."""
        has_weight = self.reduction == "sum" or any(as_terms(self.weight))
        return float(sum(self.terms)) if has_weight else math.nan

    def as_dict(self) -> dict[str, Any]:
        """All values, as plain Python ones."""
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


STEP = frozenset(inspect.signature(Step).parameters)


class History:
    """The steps of a run, epoch by epoch.

    for epoch in range(3):
        for batch in loader:
            history.append(accumulator.step(batch))
        history.end_epoch()
    history.losses  # three numbers
    """

    def __init__(self) -> None:
        self._epochs: list[list[Step]] = [[]]
        self._lines: list[str] = []
        """Of steps that nothing can change any more."""

    def append(self, step: Step) -> None:
        """Adds a step to the epoch that is running."""
        self._epochs[-1].append(step)

    def end_epoch(self) -> None:
        """Ends the epoch; the next step belongs to the next one."""
        self._epochs.append([])

    @property
    def steps(self) -> list[Step]:
        """All steps in order."""
        return [step for epoch in self._epochs for step in epoch]

    @property
    def losses(self) -> list[float]:
        """One number per epoch: the mean loss, weighted as the batches were."""
        return [epoch_loss(epoch) for epoch in self._epochs if epoch]

    def __len__(self) -> int:
        return sum(map(len, self._epochs))

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes JSON lines, one per step. The file is there whole or not at all."""
        write_whole(path, self.to_lines())

    def to_lines(self) -> bytes:
        """JSON lines, one per step; what was written before is not written anew."""
        new = [json.dumps(to_json(record), allow_nan=False) + "\n" for record in self._records(len(self._lines))]
        text = "".join([*self._lines, *new]).encode()
        self._lines += new[:-1]  # the last may yet turn out to be its epoch's last
        return text

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "History":
        """Reads what `save` wrote."""
        return cls.from_lines(Path(path).read_bytes(), path)

    @classmethod
    def from_lines(cls, content: bytes, path: str | os.PathLike[str]) -> "History":
        """What `to_lines` gave; the path is for what is told if it is no history."""
        history = cls()
        try:
            lines = content.decode().splitlines()
        except UnicodeDecodeError as error:
            raise StateError(f"{path} is no history, since it is no text: {error}") from error
        for number, line in enumerate(lines, 1):
            try:
                history._append_record(from_json(json.loads(line)))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise StateError(f"line {number} of {path} is no step of a history: {error}") from error
        return history

    def become(self, other: "History") -> None:
        """Takes the steps and epochs of another in place of its own."""
        self._epochs, self._lines = other._epochs, other._lines

    def _records(self, first: int) -> Iterator[dict[str, Any]]:
        """Those of all steps from this one on."""
        before = 0
        for epoch, steps in enumerate(self._epochs):
            for place in range(max(0, first - before), len(steps)):
                ends_epoch = place == len(steps) - 1 and epoch < len(self._epochs) - 1
                yield {"step": before + place, "epoch": epoch, "ends_epoch": ends_epoch, **steps[place].as_dict()}
            before += len(steps)

    def _append_record(self, record: dict[str, Any]) -> None:
        del record["step"], record["loss"]
        epoch, ends_epoch = record.pop("epoch"), record.pop("ends_epoch")
        if epoch < len(self._epochs) - 1:
            raise ValueError(f"epoch {epoch} comes after epoch {len(self._epochs) - 1}")
        record["terms"] = tuple(map(float, record["terms"]))
        if isinstance(record["weight"], list):
            record["weight"] = tuple(record["weight"])
        check_weight(as_terms(record["weight"]), of="the step")
        step = Step(**{name: value for name, value in record.items() if name in STEP})  # others may add to the line
        while len(self._epochs) <= epoch:
            self.end_epoch()
        self.append(step)
        if ends_epoch:
            self.end_epoch()

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Draws the loss over the steps, and the mean of each epoch; returns the matplotlib figure."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise MissingExtraError('History.plot needs matplotlib: pip install "bigbatch[cli]"') from error
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        axes.plot([step.loss for step in self.steps], linewidth=1, label="step")
        ends = [sum(map(len, self._epochs[: i + 1])) - 1 for i, epoch in enumerate(self._epochs) if epoch]
        axes.plot(ends, self.losses, marker="o", label="mean of the epoch")
        axes.set_xlabel("step")
        axes.set_ylabel("loss")
        axes.legend()
        if path is not None:
            figure.savefig(path)
        return figure


def epoch_loss(steps: Iterable[Step]) -> float:
    """The loss of all samples (or tokens) of an epoch: each term a mean by its own weight."""
    sums: dict[int, float] = {}
    weights: dict[int, float] = {}
    for step in steps:
        for number, (term, weight) in enumerate(zip(step.terms, as_terms(step.weight), strict=True)):
            if weight:  # a term over nothing says nothing, not even if it is 0/0
                sums[number] = sums.get(number, 0.0) + term * (1 if step.reduction == "sum" else weight)
                weights[number] = weights.get(number, 0.0) + weight
    return sum(sums[number] / weights[number] for number in sums) if sums else math.nan


def _plain(number: Any) -> Any:
    """Numpy's numbers as Python's."""
    return number.item() if hasattr(number, "item") else number


def to_json(value: Any) -> Any:
    """JSON knows no infinity and no NaN: they travel as text."""
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [to_json(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def from_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: from_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [from_json(item) for item in value]
    return float(value) if value in ("nan", "inf", "-inf") else value
