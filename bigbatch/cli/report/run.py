"""Reads a run folder, and says in one sentence what is wrong with a damaged one."""

import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...core.errors import StateError
from ..run.folder import CONFIG, FULL_BATCH, HISTORY, SUMMARY, TIMES
from ..summary import Record, Summary, parse

_FILES = (CONFIG, HISTORY, SUMMARY)
_REMEDY = "train the run again, or leave its folder out"


@dataclass(frozen=True)
class Run:
    """What a run folder contains, checked."""

    folder: Path
    config: Mapping[str, Any]
    """The options in config.toml."""
    summary: Summary
    records: tuple[Record, ...]
    full_batch: "Run | None" = None
    """The full-batch training, if there was one and it finished."""


@dataclass(frozen=True)
class _Time:
    """A line of times.jsonl."""

    step: int
    seconds: float | None


def read_run(folder: Path) -> Run:
    """Reads a run folder. If the last line of the history was cut off when the run was killed, it is left out."""
    if not folder.is_dir():
        raise StateError(f"{folder} is not a folder: pass a run folder that `bigbatch train` wrote")
    missing = [name for name in _FILES if not (folder / name).is_file()]
    if len(missing) == len(_FILES):
        raise StateError(
            f"{folder} is not a run folder, because it has none of {', '.join(_FILES)}: "
            "pass a folder that `bigbatch train` wrote"
        )
    if missing:
        raise StateError(f"{folder / missing[0]} is missing, so the run did not get to its end: {_REMEDY}")
    config = _read(folder / CONFIG, lambda content: tomllib.loads(content.decode()))
    summary = _read(folder / SUMMARY, lambda content: parse(Summary, json.loads(content)))
    records = _read(folder / HISTORY, lambda content: _parse_lines(Record, content))
    if (folder / TIMES).is_file():
        times = _read(folder / TIMES, lambda content: _parse_lines(_Time, content))
        seconds = {time.step: time.seconds for time in times}
        records = [replace(each, seconds=seconds.get(each.step)) for each in records]
    has_full_batch = summary.full_batch is not None and summary.full_batch.is_finished
    return Run(folder, config, summary, tuple(records), read_run(folder / FULL_BATCH) if has_full_batch else None)


def _read(file: Path, parse_content: Callable[[bytes], Any]) -> Any:
    try:
        return parse_content(file.read_bytes())
    except OSError as error:
        raise StateError(f"{file} cannot be read ({error.strerror}): {_REMEDY}") from error
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise StateError(f"{file} is damaged ({reason}): {_REMEDY}") from error


def _parse_lines(kind: Any, content: bytes) -> list[Any]:
    """Parses one JSON object per line."""
    lines = content.split(b"\n")
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(parse(kind, json.loads(line)))
        except ValueError as error:
            is_cut_off = number == len(lines) and isinstance(error, json.JSONDecodeError | UnicodeDecodeError)
            if not is_cut_off:  # the last line is empty, unless the run was killed while it wrote
                raise ValueError(f"line {number}: {error}") from error
    return found
