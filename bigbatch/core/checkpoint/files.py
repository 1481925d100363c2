"""Files that are written as a whole or not at all, and never through a link."""

import errno
import os
import re
import secrets
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from ..errors import StateError

_NO_LINK = getattr(os, "O_NOFOLLOW", 0)  # Windows has none
_UNFINISHED = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{16}\.part")


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes a new file and moves it into place: a process that is killed in between leaves the old file.

    When this returns, the file survives a power failure. A link in its place is replaced, not followed.
    """
    path = Path(path)
    part = unfinished(path)
    try:
        write_through(part, content)
        part.replace(path)
        flush_folder(path.parent)
    finally:
        part.unlink(missing_ok=True)


def write_through(path: Path, content: bytes) -> None:
    """Writes a new file to the disk itself, not only to the system's cache; an error if anything has that name."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK, 0o666)
    with open(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(descriptor)


def unfinished(path: Path) -> Path:
    """Where to write what will be moved to `path`: beside it, under a name that nobody can foresee."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")


def is_unfinished(path: Path, name: str) -> bool:
    """Whether this is from `unfinished`, for a file whose name matches this regular expression."""
    found = _UNFINISHED.fullmatch(path.name)
    return found is not None and re.fullmatch(name, found["name"]) is not None


def remove_unfinished(folder: Path, name: str) -> None:
    """Removes what processes that were killed have left of `unfinished`.

    Args:
        folder: Where to look.
        name: A regular expression for the names that were to be written.
    """
    for path in folder.iterdir() if folder.is_dir() else ():
        if is_unfinished(path, name):
            remove(path)


def open_own(path: Path, flags: int) -> int:
    """Opens a file of ours, which is created if it is missing; raises StateError for a link, a pipe and the like."""
    try:
        descriptor = os.open(path, flags | os.O_CREAT | _NO_LINK | getattr(os, "O_NONBLOCK", 0), 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENXIO, errno.EISDIR):
            raise StateError(_not_ours(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise StateError(_not_ours(path))
    return descriptor


def check_own(path: Path, *, is_folder: bool = False) -> None:
    """Raises StateError if this name stands for anything but a regular file of ours, or a folder, or nothing."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not (stat.S_ISDIR(mode) if is_folder else stat.S_ISREG(mode)):
        raise StateError(_not_ours(path))


def _not_ours(path: Path) -> str:
    """The error message for a name that stands for something we would not have made."""
    what = "a link" if path.is_symlink() else "not a folder" if path.exists() and not path.is_dir() else "not a file"
    return f"{path} is {what}, which bigbatch does not make and does not follow: remove it, or use a different folder"


def flush_folder(path: Path) -> None:
    """Writes the names in a folder to the disk itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot flush a folder
            raise
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Makes a folder and its parents, and writes their names to the disk itself."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    flush_folder(path.parent)


def remove(path: Path) -> None:
    """Removes a file, a folder, or a link but not its target. Nothing happens if that fails."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def read_plain(
    path: Path, num_bytes: int | None = None, *, max_bytes: int | None = None, first_bytes: int | None = None
) -> bytes:
    """Returns the content of a regular file; raises OSError for a link.

    Args:
        path: The file.
        num_bytes: How many bytes it must have. A file of another size is not read: ValueError.
        max_bytes: How many it may have at most.
        first_bytes: How many to read; it must have at least so many.
    """
    descriptor = os.open(path, os.O_RDONLY | _NO_LINK | getattr(os, "O_NONBLOCK", 0))
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"{path.name} is not a regular file")
        if num_bytes is not None and found.st_size != num_bytes:
            raise ValueError(f"{path.name} has {found.st_size} bytes, {num_bytes} were written")
        if max_bytes is not None and found.st_size > max_bytes:
            raise ValueError(f"{path.name} has {found.st_size} bytes, {max_bytes} are allowed")
        if first_bytes is not None and found.st_size < first_bytes:
            raise ValueError(f"{path.name} has {found.st_size} bytes, {first_bytes} were written")
        return file.read(first_bytes)
