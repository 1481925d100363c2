"""`History`: the steps of a training run, epoch by epoch."""

import csv
import inspect
import io
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .checkpoint.files import write_whole
from .errors import MissingExtraError, StateError
from .json_values import from_json, json_line
from .step import Step
from .weight import as_terms, check_weight, share

_FIELDS = frozenset(inspect.signature(Step).parameters)
_COLUMNS = ("step", "epoch", "loss", "grad_norm", "num_micro_batches", "micro_batch_size", "is_applied")


class History:
    """The steps of a training run, epoch by epoch.

        history = History()
        for epoch in range(3):
            for batch in loader:
                history.append(accumulator.step(batch))
            history.end_epoch()
        history.losses  # three numbers

    `len(history)` is the number of steps, and iterating over a history gives them in order.

    Attributes:
        steps: All steps, in order.
        losses: The mean loss of each epoch, over all its samples (or tokens).
        metrics: The metrics of each epoch by name: `{"accuracy": [0.7, 0.8, 0.9]}`.
    """

    def __init__(self) -> None:
        self._epochs: list[list[Step]] = [[]]
        self._lines: list[str] = []
        """The JSON lines of steps that can no longer change."""

    def append(self, step: Step) -> None:
        """Adds a step to the current epoch. Its `metrics` are kept; its `aux`, which may be large, is not."""
        self._epochs[-1].append(step.without_aux())

    def end_epoch(self) -> None:
        """Ends the current epoch: steps appended from now on belong to the next one."""
        self._epochs.append([])

    @property
    def steps(self) -> list[Step]:
        """All steps, in order."""
        return [step for epoch in self._epochs for step in epoch]

    @property
    def losses(self) -> list[float]:
        """The mean loss of each epoch, over all its samples (or tokens)."""
        return [_epoch_loss(epoch) for epoch in self._epochs if epoch]

    @property
    def metrics(self) -> dict[str, list[float]]:
        """The metrics of each epoch by name: those that add up are added, the others are means by weight.

        As in `losses`, steps that were not applied count too, so one that is not finite makes its epoch NaN.
        """
        epochs = [_epoch_metrics(epoch) for epoch in self._epochs if epoch]
        names = dict.fromkeys(name for epoch in epochs for name in epoch)
        return {name: [epoch.get(name, math.nan) for epoch in epochs] for name in names}

    def __len__(self) -> int:
        return sum(map(len, self._epochs))

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes one JSON line per step. If writing fails, a file that was there before is unchanged.

        Args:
            path: The file to write. It is replaced if it exists.
        """
        write_whole(path, self.to_lines())

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Writes a table with one row per step, for a spreadsheet or `pandas.read_csv`.

        Steps and epochs are counted from 0. Each metric has a column; a loss or a weight with several terms has one
        for each: `terms.0`, `weight.0`. What is not known is left empty. If writing fails, a file that was there
        before is unchanged.

        Args:
            path: The file to write. It is replaced if it exists.
        """
        rows = [_row(record) for record in self._records(0)]
        text = io.StringIO(newline="")
        table = csv.DictWriter(text, [*dict.fromkeys([*_COLUMNS, *(name for row in rows for name in row)])])
        table.writeheader()
        table.writerows(rows)
        write_whole(path, text.getvalue().encode())

    def __repr__(self) -> str:
        """The number of steps and epochs, and the loss of the last epoch."""
        losses = self.losses
        last = f", loss {losses[-1]:.6g} in the last" if losses else ""
        return (
            f"History({len(self)} step{'s' * (len(self) != 1)} in {len(losses)} epoch{'s' * (len(losses) != 1)}{last})"
        )

    def to_lines(self) -> bytes:
        """One JSON line per step."""
        lines, last = self.lines_from(0)
        return "".join([*lines, last]).encode()

    def lines_from(self, first: int) -> tuple[list[str], str]:
        """The lines of the steps from this number on that can no longer change, and the line of the last step.

        The last step may still become the last of its epoch. Lines are cached, so only new steps are encoded.

        Args:
            first: The number of the first step, from 0.
        """
        new = [json_line(record) for record in self._records(len(self._lines))]
        self._lines += new[:-1]
        return self._lines[first:], "".join(new[-1:])

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "History":
        """Reads a file that `save` wrote; raises StateError if it is not one.

        Args:
            path: The file to read.
        """
        return cls.from_lines(Path(path).read_bytes(), path)

    @classmethod
    def from_lines(cls, content: bytes, path: str | os.PathLike[str]) -> "History":
        """Reads what `to_lines` returned; raises StateError if it is anything else.

        Args:
            content: The JSON lines.
            path: The file that error messages name.
        """
        history = cls()
        try:
            lines = content.decode().splitlines()
        except UnicodeDecodeError as error:
            raise StateError(f"{path} is not a history, because it is not text: {error}") from error
        for number, line in enumerate(lines, 1):
            try:
                history._append_record(from_json(json.loads(line)))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise StateError(f"line {number} of {path} is not a step of a history: {error}") from error
        return history

    def become(self, other: "History") -> None:
        """Takes over the steps and epochs of another history."""
        self._epochs, self._lines = other._epochs, other._lines

    def _records(self, first: int) -> Iterator[dict[str, Any]]:
        """The records to write, from the step with this number on."""
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
        record["metrics"] = {str(name): float(value) for name, value in record.get("metrics", {}).items()}
        record["summed"] = tuple(map(str, record.get("summed", ())))
        step = Step(**{name: value for name, value in record.items() if name in _FIELDS})  # a line may have more
        while len(self._epochs) <= epoch:
            self.end_epoch()
        self.append(step)
        if ends_epoch:
            self.end_epoch()

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Draws the loss of each step and the mean of each epoch. Returns the matplotlib figure.

        Args:
            path: Where to save the picture; None to save nothing.
        """
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


def _row(record: dict[str, Any]) -> dict[str, Any]:
    """The columns of a step. A metric that has the name of another column is called `metrics.name`."""
    row = {name: record[name] for name in _COLUMNS}
    row |= _by_term("weight", record["weight"] if isinstance(record["weight"], list) else [record["weight"]])
    if len(record["terms"]) > 1:
        row |= _by_term("terms", record["terms"])
    metrics = record.get("metrics", {})
    return row | {f"metrics.{name}" if name in row else name: value for name, value in metrics.items()}


def _by_term(name: str, values: Sequence[Any]) -> dict[str, Any]:
    return {name: values[0]} if len(values) == 1 else {f"{name}.{k}": value for k, value in enumerate(values)}


def _epoch_loss(steps: Iterable[Step]) -> float:
    """The mean loss of an epoch: each term is divided by its own total weight."""
    sums: dict[int, float] = {}
    weights: dict[int, float] = {}
    for step in steps:
        for number, (term, weight) in enumerate(zip(step.terms, as_terms(step.weight), strict=True)):
            if weight:  # a term with weight 0 may be 0/0, so it is left out
                sums[number] = sums.get(number, 0.0) + term * (1 if step.reduction == "sum" else weight)
                weights[number] = weights.get(number, 0.0) + weight
    return float(sum(share(sums[number], weights[number]) for number in sums)) if sums else math.nan


def _epoch_metrics(steps: Sequence[Step]) -> dict[str, float]:
    """The metrics of an epoch: sums are added up, and means count by the weight of their step's first term."""
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for step in steps for name in step.metrics):
        having = [(step, as_terms(step.weight)[0]) for step in steps if name in step.metrics]
        if any(name in step.summed for step, _ in having):
            found[name] = sum(step.metrics[name] for step, _ in having)
        else:
            counted = [(step.metrics[name] * weight, weight) for step, weight in having if weight]
            sums = [sum(column) for column in zip(*counted, strict=True)]
            found[name] = float(share(*sums)) if sums else math.nan
    return found
