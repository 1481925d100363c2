"""Checkpoints: folders that are written as a whole or not at all, and verified byte by byte before they are used.

checkpoints/
  000041/
    manifest.json       what is here: names, sizes, checksums
    state.json          plain values, and where arrays belong
    state.safetensors   the arrays
    …                   and other files that were passed to save()
  000042/
  log-8f3e32e1.jsonl    an append-only log, such as a history; each checkpoint knows how much of it is its own
  lock                  held by the process that trains here

Only what has our manifest, and our own unfinished files, are ever removed. No link is followed.
"""

import errno
import hashlib
import json
import os
import re
import secrets
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import OrderError, StateError, warn
from ..options import positive
from .files import (
    flush_folder,
    make_folder,
    open_own,
    read_plain,
    remove,
    remove_unfinished,
    unfinished,
    write_through,
)
from .serialize import (
    MAX_JSON,
    Array,
    as_array,
    from_json,
    from_safetensors,
    packed,
    safetensors,
    to_json,
    to_safetensors,
    unpacked,
)

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]

MANIFEST, STATE, ARRAYS = "manifest.json", "state.json", "state.safetensors"
LOCK = "lock"
_NAME = r"[0-9]{6,18}"
_FORMAT = 2
_MAX_MANIFEST = 1 << 20
_NOT_DAMAGE = {errno.EACCES, errno.EPERM, errno.ENOMEM, errno.EMFILE, errno.ENFILE}
_live: "weakref.WeakSet[Store]" = weakref.WeakSet()


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint has in it."""

    path: Path
    step: int
    state: Any
    files: Mapping[str, bytes]  # the other files, by name
    log: bytes  # all lines that were passed to save() until then


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
        self._unlock: Callable[[], Any] | None = None  # None while the folder is not locked
        self._writer: threading.Thread | None = None
        self._error: BaseException | None = None
        self._damaged: set[Path] = set()
        self._log = _Log("", 0, hashlib.sha256())  # as the newest checkpoint has it
        self._new_lines = b""  # those that are in no checkpoint yet
        self.num_lines = 0  # how many were passed to save(), or read
        self.newest_step: int | None = None  # of the newest intact checkpoint that was written or read
        _live.add(self)

    # --- writing -----------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        state: Any,
        files: Mapping[str, bytes] | None = None,
        *,
        new_lines: bytes = b"",
        wait: bool = False,
    ) -> None:
        """Copies the state to the host, and writes it in the background.

        If it cannot be written, you are warned and earlier checkpoints are kept; with `wait` the error is raised.

        Args:
            step: The number that `newest_step` and `Checkpoint.step` will have.
            state: A nest of plain values and arrays.
            files: Other files, by name.
            new_lines: Lines to append to the log. They are written once, however many checkpoints follow.
            wait: Whether to wait until it is written.
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
        self._new_lines += new_lines
        self.num_lines += new_lines.count(b"\n")

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
        while os.path.lexists(path := self.folder / f"{number:06}"):  # not one of ours
            number += 1
        make_folder(self.folder)
        remove_unfinished(self.folder, _NAME)  # by a process that was killed while it wrote
        part = unfinished(path)
        try:
            part.mkdir()
            for name, content in contents.items():
                write_through(part / name, content)
            log = self._append_to_log()
            write_through(part / MANIFEST, _manifest_of(step, contents, log))
            flush_folder(part)
            part.rename(path)
            flush_folder(self.folder)
        finally:
            remove(part)
        self._log, self._new_lines = log, b""
        self.newest_step = step
        self._drop_old()

    def _append_to_log(self) -> "_Log":
        """Writes the new lines behind those of the newest checkpoint; returns the log with them.

        What is behind those is in no intact checkpoint: a process was killed, or went back to an earlier one.
        """
        name, size, digest = self._log
        if not self._new_lines:
            return self._log
        digest = digest.copy()
        digest.update(self._new_lines)
        is_new = not name
        if is_new:  # kept if this fails, so that the next save uses the same file
            name = f"log-{secrets.token_hex(4)}.jsonl"
            self._log = self._log._replace(name=name)
        log = _Log(name, size + len(self._new_lines), digest)
        with open(open_own(self.folder / log.name, os.O_RDWR), "r+b") as file:
            if os.fstat(file.fileno()).st_nlink > 1:  # a backup that was made with hard links has it, too
                before = file.read(size)
                log = log._replace(name=f"log-{secrets.token_hex(4)}.jsonl")
                write_through(self.folder / log.name, before + self._new_lines)
            else:
                file.truncate(size)
                file.seek(size)
                file.write(self._new_lines)
                file.flush()
                os.fsync(file.fileno())
        if is_new or log.name != name:
            flush_folder(self.folder)
        return log

    def _drop_old(self) -> None:
        """Removes all but the newest intact ones. Each is renamed first, so that it never looks whole while it goes."""
        manifests = {path: _own_manifest(path) for _, path in self._all()}
        own = [path for path, manifest in manifests.items() if manifest]
        intact = [path for path in own if path not in self._damaged]
        dropped = own[: own.index(intact[-self.keep])] if len(intact) > self.keep else []
        logs = {path: manifests[path]["log"]["name"] for path in own}
        for path in dropped:
            with suppress(OSError):
                remove(path.rename(unfinished(path)))
        for name in {logs[path] for path in dropped} - {logs[path] for path in own if path not in dropped} - {""}:
            remove(self.folder / name)

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
        """Keeps others from writing here until `close`; raises OrderError if another process or Store does.

        The lock is released when this is closed or collected, or when the process ends, however it ends. Forked
        processes do not inherit it.
        """
        if self._unlock is not None or fcntl is None or self.is_read_only:
            return
        make_folder(self.folder)
        descriptor = open_own(self.folder / LOCK, os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise OrderError(
                f"{self.folder} is in use by another process, or by another Checkpoints of this one: wait until it "
                "ends, close() it, or use a different folder"
            ) from error
        except OSError:  # a file system without locks
            pass
        self._unlock = weakref.finalize(self, os.close, descriptor)

    def close(self) -> None:
        """Waits until the last checkpoint is written, and lets others write here."""
        self.wait()
        self._release()

    def _release(self) -> None:
        if self._unlock is not None:
            self._unlock()
            self._unlock = None

    # --- reading -----------------------------------------------------------------------------------------

    def load(self) -> Checkpoint | None:
        """The newest intact checkpoint; None if there are none at all. Damaged ones are named and never used."""
        if self.folder.is_dir():
            with suppress(OSError):  # a folder that cannot be written to can be read
                self.claim()
        damages = []
        for _, path in reversed(self._all()):
            try:
                found, log = self._read(path)
            except _DamageError as error:
                self._damaged.add(path)
                damages.append(str(error))
                continue
            if damages:
                warn(f"{'; '.join(damages)}: continuing from {path}")
            self.newest_step, self._log = found.step, log
            self._new_lines, self.num_lines = b"", found.log.count(b"\n")
            return found
        if damages:
            raise StateError(f"{'; '.join(damages)}: no checkpoint in {self.folder} is intact, so start over")
        return None

    def _read(self, path: Path) -> "tuple[Checkpoint, _Log]":
        """One checkpoint. Every byte is compared with what was written before any is used."""
        try:
            step, contents, lines, log = _verified_contents(path)
            state = unpacked(from_json(contents.pop(STATE)), from_safetensors(contents.pop(ARRAYS)), self._from_array)
        except Exception as error:  # a stranger may have put anything there
            if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _NOT_DAMAGE):
                raise StateError(
                    f"{path} cannot be read ({_reason(error)}), which does not mean that it is damaged: fix that and "
                    "start again; nothing was changed"
                ) from error
            raise _DamageError(f"{path} is damaged ({_reason(error)})") from error
        return Checkpoint(path, step, state, contents, lines), log

    def _all(self) -> list[tuple[int, Path]]:
        """Numbers and folders of all checkpoints, the oldest first, those that are damaged included."""
        with suppress(FileNotFoundError):
            paths = [self.folder / name for name in os.listdir(self.folder) if re.fullmatch(_NAME, name)]
            return sorted((int(path.name), path) for path in paths if _may_be_checkpoint(path))
        return []


def _may_be_checkpoint(path: Path) -> bool:
    """Whether a folder has any of our files, or nobody lets us see what it has."""
    try:
        return not {MANIFEST, STATE, ARRAYS}.isdisjoint(os.listdir(path))
    except PermissionError:
        return True
    except OSError:
        return False


class _Log(NamedTuple):
    """An append-only file of lines."""

    name: str  # of the file; empty if there is none yet
    size: int  # in bytes
    digest: Any  # of all of them


class _DamageError(StateError):
    """A checkpoint that is not as it was written."""


def _release_in_child() -> None:
    """Releases the locks in a forked process, such as a data loader worker that outlives the training process."""
    for store in list(_live):
        store._release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_child)


def _manifest_of(step: int, contents: Mapping[str, bytes], log: "_Log | None" = None) -> bytes:
    """The manifest of a checkpoint with these files, and with the log as it is now."""
    files = {name: {"bytes": len(content), "sha256": _digest(content)} for name, content in contents.items()}
    name, size, digest = log or _Log("", 0, hashlib.sha256())
    own = {"name": name, "bytes": size, "sha256": digest.hexdigest()}
    return _signed({"format": _FORMAT, "step": step, "files": files, "log": own})


def _signed(manifest: Mapping[str, Any]) -> bytes:
    """The manifest as a file: canonical JSON, followed by its checksum, so that any changed byte is noticed."""
    text = json.dumps(manifest, indent=1, sort_keys=True)
    return f"{text}\n{_digest(text.encode())}\n".encode()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint; raises an error unless it is as it was written."""
    if path.is_symlink():
        raise ValueError("it is a link to elsewhere")
    text = read_plain(path / MANIFEST, max_bytes=_MAX_MANIFEST)
    found: dict[str, Any] = json.loads(text[: text.rindex(b"}") + 1])
    if text != _signed(found):
        raise ValueError(f"{MANIFEST} is not as it was written")
    return found


def _own_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint of ours; empty for something of the user's, and for one that is damaged."""
    try:
        found = _manifest(path)
        _check_log(found["log"]["name"])
        return found
    except Exception:  # a stranger may have put anything there
        return {}


def _verified_contents(path: Path) -> tuple[int, dict[str, bytes], bytes, _Log]:
    """The step, every file, the lines and the log they are in; raises an error unless all is as it was written."""
    manifest = _manifest(path)
    if manifest["format"] != _FORMAT:
        raise ValueError(f"it has format {manifest['format']}, and this version reads {_FORMAT}")
    contents = {}
    for name, wanted in manifest["files"].items():
        _check_name(name)
        contents[name] = read_plain(path / name, wanted["bytes"], max_bytes=MAX_JSON if name == STATE else None)
        if _digest(contents[name]) != wanted["sha256"]:
            raise ValueError(f"{name} is not as it was written")
    name, size, lines = manifest["log"]["name"], manifest["log"]["bytes"], b""
    _check_log(name)
    if name:
        lines = read_plain(path.parent / name, first_bytes=size)
    digest = hashlib.sha256(lines)
    if len(lines) != size or digest.hexdigest() != manifest["log"]["sha256"]:
        raise ValueError(f"{name or 'the log'} is not as it was written")
    return int(manifest["step"]), contents, lines, _Log(name, size, digest)


def _check_log(name: str) -> None:
    """Raises ValueError unless this is the name of a log, or empty."""
    if name and not re.fullmatch(r"log-[0-9a-f]{8}\.jsonl", name):
        raise ValueError(f"{name[:100]!r} is not the name of a log")


def _check_name(name: str) -> None:
    """Raises ValueError unless this is the name of a file in the checkpoint's own folder."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", name) or name == MANIFEST:
        raise ValueError(f"{name[:100]!r} is not a valid checkpoint file name")


def _reason(error: BaseException) -> str:
    """What was wrong, in short."""
    if isinstance(error, FileNotFoundError):
        return f"{Path(error.filename or '').name} is missing"
    if isinstance(error, OSError) and error.errno == errno.ELOOP:
        return f"{Path(error.filename or '').name} is a link to elsewhere"
    if isinstance(error, OSError):
        return f"{error.strerror or error}"
    return (str(error).splitlines() or [""])[0][:300] or type(error).__name__
