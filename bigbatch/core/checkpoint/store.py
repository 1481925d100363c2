"""Checkpoints: folders that are there whole or not at all, checked byte by byte before anything is made of them.

checkpoints/
  000041/
    manifest.json       what is here: names, sizes, checksums
    state.json          plain values, and where arrays belong
    state.safetensors   the arrays
    history.jsonl       and other files that were given along
  000042/
"""

import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import OptionError, OrderError, StateError, warn
from .files import flush_folder, make_folder, read_plain, remove, write_through
from .serialize import Array, as_array, check_installed, from_safetensors, packed, to_json, to_safetensors, unpacked

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]

FORMAT = 1
MANIFEST, STATE, ARRAYS, LOCK = "manifest.json", "state.json", "state.safetensors", "lock"
MAX_MANIFEST = 1 << 20


@dataclass(frozen=True)
class Checkpoint:
    """What was found in one."""

    path: Path
    step: int
    state: Any
    files: Mapping[str, bytes]
    """What else was given along, by name."""


class Store:
    """A folder with the newest checkpoints of one run.

    store.save(step, state, files)     # copied now, written in the background
    found = store.load()               # the newest that is whole
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int = 2,
        to_array: Callable[[Any], Array | None] = as_array,
        from_array: Callable[[Array], Any] = Array.numpy,
        is_read_only: bool = False,
    ) -> None:
        if keep < 1:
            raise OptionError(f"keep={keep} checkpoints would be none: pass 1 or more")
        check_installed()
        self.folder = Path(folder)
        self.keep = keep
        self.is_read_only = is_read_only
        self._to_array, self._from_array = to_array, from_array
        self._pid = os.getpid()
        self._lock: int | None = None
        self._writer: threading.Thread | None = None
        self._error: BaseException | None = None
        self._damaged: set[Path] = set()
        self.newest_step: int | None = None
        """Of the newest checkpoint that was written or read, and is whole."""

    # --- writing -----------------------------------------------------------------------------------------

    def save(self, step: int, state: Any, files: Mapping[str, bytes] | None = None, *, wait: bool = False) -> None:
        """Copies the state to the host, and writes it while training goes on.

        What could not be written is warned of, and the checkpoints before stay; with `wait` it is raised.
        """
        if self.is_read_only:
            raise OrderError(f"{self.folder} was opened to be read only: open it without is_read_only to save")
        if os.getpid() != self._pid:
            raise OrderError(
                f"the checkpoints in {self.folder} are written by process {self._pid} and this is {os.getpid()}, which "
                "was forked from it: save in the first, or open another folder"
            )
        with suppress(OSError):  # the writer will meet it too
            self._refuse_two()
        plain, arrays = packed(state, self._to_array)
        given = {STATE: to_json(plain), **(files or {})}
        for name in given:
            check_name(name)
        self.wait()

        def write() -> None:
            try:
                self._write(step, given, arrays)
            except BaseException as error:
                self._error = error

        self._writer = threading.Thread(target=write, name="bigbatch checkpoint")
        self._writer.start()
        if wait:
            self._join()
            if self._error is not None:
                error, self._error = self._error, None
                raise error

    def _write(self, step: int, given: Mapping[str, bytes], arrays: Mapping[str, Array]) -> None:
        contents = {**given, ARRAYS: to_safetensors({name: array.stored for name, array in arrays.items()})}
        numbers = [number for number, _ in self._all()]
        path = self.folder / f"{max(numbers, default=0) + 1:06}"
        part = path.with_name(f"{path.name}.part")
        make_folder(self.folder)
        self._tidy()
        try:
            part.mkdir()
            for name, content in contents.items():
                write_through(part / name, content)
            write_through(part / MANIFEST, manifest_of(step, contents))
            flush_folder(part)
            part.rename(path)
            flush_folder(self.folder)
        finally:
            remove(part)
        self.newest_step = step
        self._drop_old()

    def _drop_old(self) -> None:
        """Those before the newest ones that are whole; taken out of sight first, so that none is there in part."""
        whole = [number for number, path in self._all() if path not in self._damaged]
        for number, path in self._all():
            if len(whole) > self.keep and number < whole[-self.keep]:
                with suppress(OSError):
                    remove(path.rename(path.with_name(f"{path.name}.part")))

    def _tidy(self) -> None:
        """What a process left that was killed while it wrote."""
        for path in self.folder.glob("[0-9]*.part"):
            remove(path)

    @property
    def is_writing(self) -> bool:
        """Whether the last one is not on the disk yet: another would have to wait."""
        return self._writer is not None and self._writer.is_alive()

    def wait(self) -> None:
        """Until the last one is written; warns if it could not be."""
        self._join()
        if self._error is not None:
            error, self._error = self._error, None
            self.tell(error)

    def tell(self, error: BaseException) -> None:
        """Warns of one that could not be written."""
        warn(
            f"a checkpoint could not be written to {self.folder} ({reason(error)}): the ones before are untouched, "
            "and training goes on; see that the folder can be written to and has space"
        )

    def _join(self) -> None:
        if self._writer is not None and os.getpid() == self._pid:
            self._writer.join()
            self._writer = None

    def close(self) -> None:
        """Waits for what is being written, and lets others have the folder."""
        self.wait()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def claim(self) -> None:
        """Keeps other processes from writing here, from now on; refuses if one does."""
        self._refuse_two()

    def _refuse_two(self) -> None:
        """One process at a time: the lock goes with the process, however it ends, and not to those that it forks."""
        if self._lock is not None or fcntl is None or self.is_read_only:
            return
        make_folder(self.folder)
        descriptor = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            os.close(descriptor)
            raise OrderError(
                f"another process trains in {self.folder}: wait until it has ended, or take another folder"
            ) from error
        except OSError:  # a file system without locks
            pass
        self._lock = descriptor

    # --- reading -----------------------------------------------------------------------------------------

    def load(self) -> Checkpoint | None:
        """The newest that is whole; None if there is none at all. What is damaged is named and never used."""
        if self.folder.is_dir():
            with suppress(OSError):  # what cannot be written to can be read
                self._refuse_two()
        told = []
        for _, path in reversed(list(self._all())):
            try:
                found = self._read(path)
            except StateError as error:
                self._damaged.add(path)
                told.append(str(error))
                continue
            if told:
                warn(f"{'; '.join(told)}: going on from {path}")
            self.newest_step = found.step
            return found
        if told:
            raise StateError(f"{'; '.join(told)}: no checkpoint in {self.folder} is whole, so start anew")
        return None

    def _read(self, path: Path) -> Checkpoint:
        """One checkpoint; every byte is compared with what was written before any is looked at."""
        try:
            step, contents = checked_contents(path)
            state = unpacked(json.loads(contents.pop(STATE)), from_safetensors(contents.pop(ARRAYS)), self._from_array)
        except Exception as error:  # whatever a stranger put there
            raise StateError(f"{path} is damaged ({reason(error)})") from error
        return Checkpoint(path, step, state, contents)

    def _all(self) -> Iterator[tuple[int, Path]]:
        """By age, the oldest first."""
        with suppress(FileNotFoundError):
            names = [name for name in os.listdir(self.folder) if re.fullmatch(r"[0-9]{6,}", name)]
            yield from sorted((int(name), self.folder / name) for name in names)


def manifest_of(step: int, contents: Mapping[str, bytes]) -> bytes:
    files = {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in contents.items()
    }
    return signed({"format": FORMAT, "step": step, "files": files})


def signed(manifest: Mapping[str, Any]) -> bytes:
    """With a checksum of its own as the last line; there is one way to write it, so that no byte can be another."""
    text = json.dumps(manifest, indent=1, sort_keys=True)
    return f"{text}\n{hashlib.sha256(text.encode()).hexdigest()}\n".encode()


def checked_contents(path: Path) -> tuple[int, dict[str, bytes]]:
    """The step, and the content of every file, if all of it is as it was written."""
    if path.is_symlink():
        raise ValueError("it is a link to elsewhere")
    text = read_plain(path / MANIFEST, MAX_MANIFEST)
    manifest = json.loads(text[: text.rindex(b"}") + 1])
    if text != signed(manifest):
        raise ValueError(f"{MANIFEST} is not as it was written")
    if manifest["format"] != FORMAT:
        raise ValueError(f"it has format {manifest['format']}, and this version reads {FORMAT}")
    contents = {}
    for name, wanted in manifest["files"].items():
        check_name(name)
        content = read_plain(path / name, wanted["bytes"])
        if len(content) != wanted["bytes"]:
            raise ValueError(f"{name} has {len(content)} bytes, {wanted['bytes']} were written")
        if hashlib.sha256(content).hexdigest() != wanted["sha256"]:
            raise ValueError(f"{name} is not as it was written")
        contents[name] = content
    return int(manifest["step"]), contents


def check_name(name: str) -> None:
    """A file of the checkpoint itself, none elsewhere."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", name) or name == MANIFEST:
        raise ValueError(f"{name[:100]!r} is no name for a file of a checkpoint")


def reason(error: BaseException) -> str:
    """What was wrong, in short."""
    if isinstance(error, FileNotFoundError):
        return f"{Path(error.filename or '').name} is missing"
    if isinstance(error, OSError):
        return f"{error.strerror or error}"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return (str(error).splitlines() or [""])[0][:300] or type(error).__name__
