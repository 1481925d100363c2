"""Reads a run folder back, and says in one sentence what is wrong with a damaged one."""

import json
import reprlib
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ...core.errors import StateError

FILES = ("config.toml", "history.jsonl", "summary.json")
REMEDY = "train the run again, or leave its folder out"

Kind = Callable[[Any], Any]


@dataclass(frozen=True)
class Run:
    """What a run folder holds, checked; numbers that are not finite are floats again."""

    folder: Path
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    records: tuple[Mapping[str, Any], ...]
    """The lines of history.jsonl, one per step."""
    full_batch: "Run | None" = None
    """The training with the full batch, if there was one and it finished."""


def read_run(folder: Path) -> Run:
    """Reads a run folder. A last line of the history that was cut off, as in a run that was killed, is left out."""
    if not folder.is_dir():
        raise StateError(f"{folder} is no folder: pass a run folder that `bigbatch train` wrote")
    missing = [name for name in FILES if not (folder / name).is_file()]
    if len(missing) == len(FILES):
        raise StateError(
            f"{folder} is no run folder, since it holds none of {', '.join(FILES)}: "
            "pass a folder that `bigbatch train` wrote"
        )
    if missing:
        raise StateError(f"{folder / missing[0]} is missing, so the run did not get to its end: {REMEDY}")
    config = _read(folder / "config.toml", lambda text: tomllib.loads(text.decode()))
    summary = _read(folder / "summary.json", lambda text: _parsed(json.loads(text), SUMMARY))
    records = _with_times(_read(folder / "history.jsonl", _records), folder / "times.jsonl")
    is_compared = summary["full_batch"] is not None and summary["full_batch"]["status"] == "finished"
    return Run(folder, config, summary, records, read_run(folder / "full_batch") if is_compared else None)


def _read(file: Path, parse: Callable[[bytes], Any]) -> Any:
    try:
        return parse(file.read_bytes())
    except OSError as error:
        raise StateError(f"{file} cannot be read ({error.strerror}): {REMEDY}") from error
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise StateError(f"{file} is damaged ({reason}): {REMEDY}") from error


def _records(content: bytes) -> tuple[dict[str, Any], ...]:
    return _lines(content, RECORD, TIME)


def _lines(
    content: bytes, fields: Mapping[str, Kind], optional: Mapping[str, Kind] = MappingProxyType({})
) -> tuple[dict[str, Any], ...]:
    *lines, rest = content.split(b"\n")
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(_parsed(json.loads(line), fields, optional))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
    try:
        last = json.loads(rest) if rest else None
    except ValueError:  # a run that was killed while it wrote this line
        last = None
    if last is not None:
        records.append(_parsed(last, fields, optional))
    return tuple(records)


def _with_times(records: tuple[dict[str, Any], ...], file: Path) -> tuple[dict[str, Any], ...]:
    """Each step with its time, None where nobody knows it; runs before 0.2 have it in the history itself."""
    times = _read(file, lambda content: _lines(content, TIME)) if file.is_file() else ()
    found = {each["step"]: each["seconds"] for each in times}
    return tuple({"seconds": found.get(record["step"]), **record} for record in records)


def _parsed(
    value: Any, fields: Mapping[str, Kind], optional: Mapping[str, Kind] = MappingProxyType({})
) -> dict[str, Any]:
    """The object with each field checked; what it holds beyond them is kept as it is."""
    if not isinstance(value, dict):
        raise ValueError(f"{reprlib.repr(value)} is no JSON object")
    absent = [name for name in fields if name not in value]
    if absent:
        raise ValueError(f"the key {absent[0]!r} is missing")
    checked = dict(value)
    for name, kind in {**fields, **{name: kind for name, kind in optional.items() if name in value}}.items():
        try:
            checked[name] = kind(value[name])
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    return checked


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{reprlib.repr(value)} is no text")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{reprlib.repr(value)} is neither true nor false")
    return value


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{reprlib.repr(value)} is no whole number")
    return value


def _number(value: Any) -> int | float:
    if value in ("nan", "inf", "-inf"):  # how JSON lines carry what JSON has no word for
        return float(value)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{reprlib.repr(value)} is no number")
    return value


def _status(value: Any) -> str:
    if value not in ("finished", "interrupted", "stopped"):
        raise ValueError(f"{reprlib.repr(value)} is none of 'finished', 'interrupted', 'stopped'")
    return str(value)


def _or_null(kind: Kind) -> Kind:
    return lambda value: None if value is None else kind(value)


def _by_name(kind: Kind) -> Kind:
    return lambda value: _parsed(value, dict.fromkeys(value if isinstance(value, dict) else (), kind))


def _texts(value: Any) -> list[str]:
    if not isinstance(value, list):
        raise ValueError(f"{reprlib.repr(value)} is no list")
    return [_text(item) for item in value]


def _full_batch(value: Any) -> dict[str, Any]:
    """A full batch that failed has nothing to say but why."""
    if not isinstance(value, dict):
        raise ValueError(f"{reprlib.repr(value)} is no JSON object")
    return _parsed({**dict.fromkeys(FULL_BATCH), **value}, FULL_BATCH)


_RESULTS: dict[str, Kind] = {
    "loss": _or_null(_number),
    "seconds": _or_null(_number),
    "samples_per_second": _or_null(_number),
    "peak_bytes": _or_null(_number),
}
FULL_BATCH: dict[str, Kind] = {
    "status": _text,
    "reason": _or_null(_text),
    "scores": _or_null(_by_name(_number)),
    **_RESULTS,
}
COMPARISON: dict[str, Kind] = {
    "max_weight_difference": _number,
    "worst_weight": _or_null(_text),
    "max_loss_difference": _or_null(_number),
}
VERIFICATION: dict[str, Kind] = {
    "is_exact": _flag,
    "max_error": _number,
    "total_error": _number,
    "tolerance": _number,
    "errors": _by_name(_number),
    "causes": _texts,
}
SUMMARY: dict[str, Kind] = {
    **dict.fromkeys(("version", "task", "framework", "device"), _text),
    "status": _status,
    **dict.fromkeys(("batch_size", "micro_batch_size", "num_micro_batches"), _whole),
    **dict.fromkeys(("num_steps", "num_epochs", "num_samples"), _whole),
    "scores": _by_name(_number),
    **_RESULTS,
    "full_batch": _or_null(_full_batch),
    "comparison": _or_null(lambda value: _parsed(value, COMPARISON)),
    "verification": _or_null(lambda value: _parsed(value, VERIFICATION)),
}
RECORD: dict[str, Kind] = {
    "step": _whole,
    "loss": _number,
    "grad_norm": _or_null(_number),
    "is_applied": _flag,
    "lr": _or_null(_number),
    "num_samples": _whole,
}
TIME: dict[str, Kind] = {"step": _whole, "seconds": _or_null(_number)}
