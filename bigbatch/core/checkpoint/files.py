"""Files that are written completely or not at all."""

import errno
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes a new file and moves it into place: a process that is killed in between leaves the old file."""
    part = Path(f"{os.fspath(path)}.part")
    try:
        write_through(part, content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_through(path: Path, content: bytes) -> None:
    """Writes to the disk itself, not only to the system's cache."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


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


def read_plain(path: Path, max_bytes: int | None = None) -> bytes:
    """Returns the content of a regular file; raises ValueError for a pipe, and OSError for a link."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    with open(descriptor, "rb") as file:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise ValueError(f"{path.name} is not a regular file")
        if max_bytes is not None and info.st_size > max_bytes:
            raise ValueError(f"{path.name} has {info.st_size} bytes, but at most {max_bytes} are allowed")
        return file.read()
