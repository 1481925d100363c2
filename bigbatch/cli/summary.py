"""What a run records: its summary and one record per step. `bigbatch train` writes them, and the report reads them."""

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ..core.verify.result import Verification

Status = Literal["finished", "interrupted", "stopped"]


@dataclass(frozen=True, kw_only=True)
class FullBatch:
    """The same training with the full batch in one micro-batch."""

    status: str
    """"finished" or "failed"."""
    reason: str | None = None
    """Why it failed."""
    loss: float | None = None
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
    seconds: float | None = None
    """Since training began. It is in times.jsonl, because the history is the same in every repetition of a run."""


_WORDS = {str: "text", bool: "true or false", int: "a whole number", float: "a number"}
_fields_of: Callable[[Any], dict[str, Any]] = cache(get_type_hints)


def parse(kind: Any, value: Any) -> Any:
    """Returns a value read from JSON as this type; raises ValueError if it is something else.

    Args:
        kind: A dataclass, or a type that the fields of one are annotated with.
        value: What `json.loads` returned. Keys that a dataclass does not have are ignored.
    """
    if kind is Any:
        return value
    if isinstance(kind, type) and is_dataclass(kind):
        given, known = _object(value), _fields_of(kind)
        if missing := [name for name in known if name not in given and not hasattr(kind, name)]:
            raise ValueError(f"the key {missing[0]!r} is missing")
        return kind(**{name: _parse_item(known[name], name, given[name]) for name in known if name in given})
    origin, inner = get_origin(kind), get_args(kind)
    if origin is UnionType:  # `X | None`
        return None if value is None else parse(inner[0], value)
    if origin is Mapping:
        return {name: _parse_item(inner[1], name, item) for name, item in _object(value).items()}
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{reprlib.repr(value)} is not a list")
        return tuple(parse(inner[0], item) for item in value)
    if origin is Literal:
        if value not in inner:
            raise ValueError(f"{reprlib.repr(value)} is not one of {', '.join(map(repr, inner))}")
        return value
    if kind is float and value in ("nan", "inf", "-inf"):  # JSON has no numbers for these
        return float(value)
    is_right = isinstance(value, int | float if kind is float else kind)
    if not is_right or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{reprlib.repr(value)} is not {_WORDS[kind]}")
    return value


def _parse_item(kind: Any, name: str, value: Any) -> Any:
    try:
        return parse(kind, value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{reprlib.repr(value)} is not a JSON object")
    return value
