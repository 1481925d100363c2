"""Checkpoints: folders that are written as a whole or not at all, and verified byte by byte before they are used.

checkpoints/
  000041/
    manifest.json       what is here: names, sizes, checksums
    state.json          plain values, and where arrays belong
    state.safetensors   the arrays
    history.jsonl       and other files that were passed to save()
  000042/
"""

import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import OrderError, StateError, warn
from ..options import positive
from .files import flush_folder, make_folder, read_plain, remove, write_through
from .serialize import Array, as_array, from_safetensors, packed, safetensors, to_json, to_safetensors, unpacked

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]

MANIFEST, STATE, ARRAYS, LOCK = "manifest.json", "state.json", "state.safetensors", "lock"
_FORMAT = 1
_MAX_MANIFEST = 1 << 20


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint has in it."""

    path: Path
    step: int
    state: Any
    files: Mapping[str, bytes]  # the other files, by name


class Store:
    """A folder with the newest checkpoints of one run.

    store.save(step, state, files)     # copied now, written in the background
    found = store.load()               # the newest intact one
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
        safetensors()
        self.folder = Path(folder)
        self.keep = positive("keep", keep)
        self.is_read_only = is_read_only
        self._to_array, self._from_array = to_array, from_array
        self._pid = os.getpid()
        self._lock: int | None = None
        self._writer: threading.Thread | None = None
        self._error: BaseException | None = None
        self._damaged: set[Path] = set()
        self.newest_step: int | None = None  # of the newest intact checkpoint that was written or read

    # --- writing -----------------------------------------------------------------------------------------

    def save(self, step: int, state: Any, files: Mapping[str, bytes] | None = None, *, wait: bool = False) -> None:
        """Copies the state to the host, and writes it in the background.

        If it cannot be written, you are warned and earlier checkpoints are kept; with `wait` the error is raised.
        """
        if os.getpid() != self._pid:
            raise OrderError(
                f"the checkpoints in {self.folder} are written by process {self._pid} and this is {os.getpid()}, which "
                "was forked from it: save in the original process, or use another folder"
            )
        with suppress(OSError):  # the writer will raise it too
            self.claim()
        plain, arrays = packed(state, self._to_array)
        texts = {STATE: to_json(plain), **(files or {})}
        for name in texts:
            _check_name(name)
        self.wait()

        def write() -> None:
            try:
                self._write(step, {**texts, ARRAYS: to_safetensors({name: a.stored for name, a in arrays.items()})})
            except BaseException as error:
                self._error = error

        self._writer = threading.Thread(target=write, name="bigbatch checkpoint")
        self._writer.start()
        if wait and (error := self._joined()) is not None:
            raise error

    def _write(self, step: int, contents: Mapping[str, bytes]) -> None:
        number = max((number for number, _ in self._all()), default=0) + 1
        path, part = self.folder / f"{number:06}", self.folder / f"{number:06}.part"
        make_folder(self.folder)
        for left in self.folder.glob("[0-9]*.part"):  # from a process that was killed while writing
            remove(left)
        try:
            part.mkdir()
            for name, content in contents.items():
                write_through(part / name, content)
            write_through(part / MANIFEST, _manifest_of(step, contents))
            flush_folder(part)
            part.rename(path)
            flush_folder(self.folder)
        finally:
            remove(part)
        self.newest_step = step
        self._drop_old()

    def _drop_old(self) -> None:
        """Removes all but the newest intact ones. Renames each first, so that a half-removed one never looks intact."""
        intact = [number for number, path in self._all() if path not in self._damaged]
        for number, path in self._all():
            if len(intact) > self.keep and number < intact[-self.keep]:
                with suppress(OSError):
                    remove(path.rename(path.with_name(f"{path.name}.part")))

    @property
    def is_writing(self) -> bool:
        """Whether the last checkpoint is still being written: another would have to wait."""
        return self._writer is not None and self._writer.is_alive()

    def wait(self) -> None:
        """Waits until the last checkpoint is written; warns if it could not be."""
        if (error := self._joined()) is not None:
            self.warn_not_written(error)

    def _joined(self) -> BaseException | None:
        """Waits for the writer; returns its error."""
        if self._writer is not None:
            self._writer.join()
        error, self._writer, self._error = self._error, None, None
        return error

    def warn_not_written(self, error: BaseException) -> None:
        """Warns that a checkpoint could not be written."""
        warn(
            f"a checkpoint could not be written to {self.folder} ({_reason(error)}): earlier ones are untouched, "
            "and training continues; make sure the folder is writable and has free space"
        )

    def claim(self) -> None:
        """Keeps other processes from writing here until `close`; raises OrderError if another one holds the folder.

        The lock is released when the process ends, however it ends. Forked processes do not inherit it.
        """
        if self._lock is not None or fcntl is None or self.is_read_only:
            return
        make_folder(self.folder)
        descriptor = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            os.close(descriptor)
            raise OrderError(
                f"another process is training in {self.folder}: wait until it ends, or use a different folder"
            ) from error
        except OSError:  # a file system without locks
            pass
        self._lock = descriptor

    def close(self) -> None:
        """Waits until the last checkpoint is written, and lets other processes write here."""
        self.wait()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # --- reading -----------------------------------------------------------------------------------------

    def load(self) -> Checkpoint | None:
        """The newest intact checkpoint; None if there are none at all. Damaged ones are named and never used."""
        if self.folder.is_dir():
            with suppress(OSError):  # a folder that cannot be written to can be read
                self.claim()
        damages = []
        for _, path in reversed(self._all()):
            try:
                found = self._read(path)
            except StateError as error:
                self._damaged.add(path)
                damages.append(str(error))
                continue
            if damages:
                warn(f"{'; '.join(damages)}: continuing from {path}")
            self.newest_step = found.step
            return found
        if damages:
            raise StateError(f"{'; '.join(damages)}: no checkpoint in {self.folder} is intact, so start over")
        return None

    def _read(self, path: Path) -> Checkpoint:
        """Reads one checkpoint; all checksums are verified before anything is used."""
        try:
            step, contents = _verified_contents(path)
            state = unpacked(json.loads(contents.pop(STATE)), from_safetensors(contents.pop(ARRAYS)), self._from_array)
        except Exception as error:  # somebody else may have put anything there
            raise StateError(f"{path} is damaged ({_reason(error)})") from error
        return Checkpoint(path, step, state, contents)

    def _all(self) -> list[tuple[int, Path]]:
        """Numbers and folders of all checkpoints, the oldest first."""
        with suppress(FileNotFoundError):
            names = [name for name in os.listdir(self.folder) if re.fullmatch(r"[0-9]{6,}", name)]
            return sorted((int(name), self.folder / name) for name in names)
        return []


def _manifest_of(step: int, contents: Mapping[str, bytes]) -> bytes:
    """The manifest of a checkpoint with these files."""
    files = {name: {"bytes": len(content), "sha256": _digest(content)} for name, content in contents.items()}
    return _signed({"format": _FORMAT, "step": step, "files": files})


def _signed(manifest: Mapping[str, Any]) -> bytes:
    """The manifest as a file: canonical JSON, followed by its checksum, so that any changed byte is noticed."""
    text = json.dumps(manifest, indent=1, sort_keys=True)
    return f"{text}\n{_digest(text.encode())}\n".encode()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _verified_contents(path: Path) -> tuple[int, dict[str, bytes]]:
    """The step, and the content of every file; raises an error unless all of it is as it was written."""
    if path.is_symlink():
        raise ValueError("it is a link to elsewhere")
    text = read_plain(path / MANIFEST, _MAX_MANIFEST)
    manifest = json.loads(text[: text.rindex(b"}") + 1])
    if text != _signed(manifest):
        raise ValueError(f"{MANIFEST} is not as it was written")
    if manifest["format"] != _FORMAT:
        raise ValueError(f"it has format {manifest['format']}, and this version reads {_FORMAT}")
    contents = {}
    for name, wanted in manifest["files"].items():
        _check_name(name)
        content = read_plain(path / name, wanted["bytes"])
        if len(content) != wanted["bytes"]:
            raise ValueError(f"{name} has {len(content)} bytes, {wanted['bytes']} were written")
        if _digest(content) != wanted["sha256"]:
            raise ValueError(f"{name} is not as it was written")
        contents[name] = content
    return int(manifest["step"]), contents


def _check_name(name: str) -> None:
    """Raises ValueError unless this is the name of a file in the checkpoint's own folder."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", name) or name == MANIFEST:
        raise ValueError(f"{name[:100]!r} is not a valid checkpoint file name")


def _reason(error: BaseException) -> str:
    """What was wrong, in short."""
    if isinstance(error, FileNotFoundError):
        return f"{Path(error.filename or '').name} is missing"
    if isinstance(error, OSError):
        return f"{error.strerror or error}"
    return (str(error).splitlines() or [""])[0][:300] or type(error).__name__
