"""Reads a run folder, and says in one sentence what is wrong with a damaged one."""

import json
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.errors import StateError
from ..run.folder import CONFIG, FULL_BATCH, HISTORY, SUMMARY, TIMES
from ..summary import Record, Summary, parse


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


def read_run(folder: Path) -> Run:
    """Reads a run folder; raises StateError if it is not one, or damaged."""
    for name in (CONFIG, HISTORY, SUMMARY, TIMES):
        if not (folder / name).is_file():
            raise StateError(f"{folder / name} is missing: pass the folder of a run that has ended")
    config = _read(folder / CONFIG, lambda content: tomllib.loads(content.decode()))
    summary = _read(folder / SUMMARY, lambda content: parse(Summary, json.loads(content)))
    seconds = _read(folder / TIMES, lambda content: {line["step"]: line["seconds"] for line in _lines(content)})
    records = _read(
        folder / HISTORY,
        lambda content: [parse(Record, {**line, "seconds": seconds.get(line["step"])}) for line in _lines(content)],
    )
    has_full_batch = summary.full_batch is not None and summary.full_batch.is_finished
    return Run(folder, config, summary, tuple(records), read_run(folder / FULL_BATCH) if has_full_batch else None)


def _read(file: Path, parse_content: Callable[[bytes], Any]) -> Any:
    try:
        return parse_content(file.read_bytes())
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise StateError(f"{file} is damaged ({reason}): train the run again, or leave its folder out") from error


def _lines(content: bytes) -> list[Any]:
    """The JSON objects of the lines, without a last one that was cut off when the run was killed."""
    *lines, last = content.split(b"\n")
    records = [json.loads(line) for line in lines]
    with suppress(ValueError):
        records.append(json.loads(last))
    return records
