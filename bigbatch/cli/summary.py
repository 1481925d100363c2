"""What a run records: its summary and one record per step. `bigbatch train` writes them, and the report reads them."""

import reprlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from ..core.json_values import from_json
from ..core.verify.result import Verification

_T = TypeVar("_T")
Status = Literal["finished", "interrupted", "stopped"]


@dataclass(frozen=True, kw_only=True)
class FullBatch:
    """The same training with the full batch in one micro-batch."""

    status: str
    """"finished" or "failed"."""
    reason: str | None = None
    """Why it failed."""
    loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    scores: Mapping[str, float]
    seconds: float | None = None
    samples_per_second: float | None = None
    peak_bytes: int | None = None

    @property
    def is_finished(self) -> bool:
        return self.status == "finished"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How far accumulated and full-batch training are apart."""

    max_weight_difference: float
    """The largest difference in a tensor, relative to the largest weight of that tensor."""
    worst_weight: str
    """The name of that tensor."""
    max_loss_difference: float


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What summary.json says about a run."""

    version: str
    task: str
    framework: str
    device: str
    status: Status
    batch_size: int
    micro_batch_size: int
    num_micro_batches: int
    """Of a whole batch, on all ranks."""
    num_ranks: int = 1
    num_steps: int
    num_epochs: int
    num_samples: int
    loss: float | None
    """The mean loss of the last epoch."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The metrics of the last epoch: what the loss returned as aux."""
    scores: Mapping[str, float]
    """What the task's evaluate() returned at the end."""
    seconds: float | None
    samples_per_second: float | None
    peak_bytes: int | None
    """What training added to the memory in use, at its peak."""
    full_batch: FullBatch | None
    """None if the full batch was not trained."""
    comparison: Comparison | None
    verification: Verification | None


@dataclass(frozen=True, kw_only=True)
class Record:
    """What history.jsonl says about a step: a line of a `History`, with the learning rate and the samples."""

    step: int
    epoch: int
    ends_epoch: bool
    loss: float
    terms: tuple[float, ...]
    weight: Any
    grad_norm: float | None
    num_micro_batches: int
    micro_batch_size: int | None
    is_applied: bool
    reduction: str
    noise_scale: float | None
    lr: float | None
    num_samples: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the loss returned as aux, if it did."""
    summed: tuple[str, ...] = ()
    seconds: float | None = None
    """Since training began. It is in times.jsonl, because the history is the same in every repetition of a run."""


def parse(kind: type[_T], found: Any) -> _T:
    """Makes a dataclass from a JSON object, without the keys it does not know.

    Raises ValueError if a key is missing, or has a value of another type.
    """
    if not isinstance(found, dict):
        raise ValueError(f"{reprlib.repr(found)} is not a JSON object")
    values = {each.name: from_json(found[each.name]) for each in fields(kind) if each.name in found}  # type: ignore[arg-type]
    for name, part in _PARTS.items():
        if values.get(name) is not None:
            values[name] = parse(part, values[name])
    for name, value in values.items():
        if not _fits(value, _TYPES[kind][name]):
            raise ValueError(f"{name} is {reprlib.repr(value)}")
    try:
        return kind(**values)
    except TypeError as error:  # missing 1 required keyword-only argument
        raise ValueError(str(error)) from error


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value from JSON, where a tuple is a list, is of this type."""
    inside = get_args(hint)
    if hint is Any:
        return True
    if isinstance(hint, UnionType):
        return any(_fits(value, each) for each in inside)
    if get_origin(hint) is Literal:
        return value in inside
    if get_origin(hint) is tuple:
        return isinstance(value, list) and all(_fits(each, inside[0]) for each in value)
    if get_origin(hint) is Mapping:
        return isinstance(value, dict) and all(_fits(each, inside[1]) for each in value.values())
    if isinstance(value, bool) or hint not in (int, float):
        return isinstance(value, hint)
    if isinstance(value, int):
        return abs(value) <= (sys.maxsize if hint is int else sys.float_info.max)
    return isinstance(value, hint)


_PARTS = {"full_batch": FullBatch, "comparison": Comparison, "verification": Verification}
_TYPES = {kind: get_type_hints(kind) for kind in (Summary, Record, *_PARTS.values())}
