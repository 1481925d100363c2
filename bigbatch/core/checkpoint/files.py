"""Files that are there whole or not at all."""

import errno
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes beside the file and puts it in its place: who is stopped on the way leaves the old one."""
    part = Path(f"{os.fspath(path)}.part")
    try:
        write_through(part, content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_through(path: Path, content: bytes) -> None:
    """To the disk itself, not only to the system's memory."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def flush_folder(path: Path) -> None:
    """The names in a folder, to the disk itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # of systems that do not know this for folders
            raise
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """With those that it lies in; each name is on the disk itself, so that what is written there is found again."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    flush_folder(path.parent)


def remove(path: Path) -> None:
    """Whatever it is; what a link points to stays. Nothing happens if it cannot be removed."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def read_plain(path: Path, max_bytes: int | None = None) -> bytes:
    """The content of a file that is one: no link to elsewhere, no pipe that never ends."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"{path.name} is no plain file")
        if max_bytes is not None and found.st_size > max_bytes:
            raise ValueError(f"{path.name} has {found.st_size} bytes, {max_bytes} are allowed")
        return file.read()
