"""Every operation of a process on the files of a folder, seen just before it happens: to be killed there, or recorded.

The process opens its files with Python's own implementation of `open`, so that each one ends in a function of `os`.
"""

import _pyio
import builtins
import fcntl
import io
import os
import signal
import threading
import traceback
from contextlib import contextmanager
from typing import Any, NamedTuple


class Operation(NamedTuple):
    """One operation. A write is two of them, one for each half, so that a process can be killed in its middle."""

    name: str  # open, write, truncate, fsync, mkdir, rename, unlink or rmdir
    path: str
    value: Any = None  # the flags of an open, (offset, data) of a write, the size of a truncate, the target of a rename


class _Watched:
    """The functions of `os` that change files, with `see` called before each that changes the folder."""

    def __init__(self, folder, see):
        self.top, self.see = os.path.realpath(folder), see
        self.lock = threading.RLock()  # what is seen first happens first, in all threads
        self.original = {name: getattr(os, name) for name in vars(_Watched) if name in os.__all__}

    def is_inside(self, path):
        return path == self.top or path.startswith(f"{self.top}/")

    def call(self, name, path, *arguments, value=None, function=None, **options):
        with self.lock:
            if self.is_inside(path):
                self.see(Operation(name, path, value))
            return self.original[function or name](*arguments, **options)

    def open(self, path, flags, mode=0o777, *, dir_fd=None):
        if not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
            return self.original["open"](path, flags, mode, dir_fd=dir_fd)
        return self.call("open", whole(path, dir_fd), path, flags, mode, value=flags, dir_fd=dir_fd)

    def write(self, descriptor, data):
        path, data = of(descriptor), bytes(data)
        if not self.is_inside(path):
            return self.original["write"](descriptor, data)
        for half in filter(None, (data[: len(data) // 2], data[len(data) // 2 :])):
            is_at_end = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_APPEND
            offset = os.fstat(descriptor).st_size if is_at_end else os.lseek(descriptor, 0, os.SEEK_CUR)
            self.call("write", path, descriptor, half, value=(offset, half))
        return len(data)

    def ftruncate(self, descriptor, size):
        self.call("truncate", of(descriptor), descriptor, size, value=size, function="ftruncate")

    def fsync(self, descriptor):
        self.call("fsync", of(descriptor), descriptor)

    def rename(self, source, target):
        self.call("rename", whole(source), source, target, value=whole(target))

    replace = rename

    def mkdir(self, path, mode=0o777):
        self.call("mkdir", whole(path), path, mode)

    def unlink(self, path, *, dir_fd=None):
        self.call("unlink", whole(path, dir_fd), path, dir_fd=dir_fd)

    remove = unlink

    def rmdir(self, path, *, dir_fd=None):
        self.call("rmdir", whole(path, dir_fd), path, dir_fd=dir_fd)


def whole(path, dir_fd=None):
    return os.path.join(os.getcwd() if dir_fd is None else of(dir_fd), os.fspath(path))


def of(descriptor):
    return os.readlink(f"/proc/self/fd/{descriptor}")


@contextmanager
def watched(folder, see):
    """In this block, `see(operation)` is called before everything that may change the folder or what is in it."""
    functions, usual = _Watched(folder, see), builtins.open
    try:
        builtins.open = io.open = _pyio.open
        for name in functions.original:
            setattr(os, name, getattr(functions, name))
        yield
    finally:
        builtins.open = io.open = usual
        for name, function in functions.original.items():
            setattr(os, name, function)


def killed_before(number):
    """Ends this process with SIGKILL just before the operation with this number."""
    left = number

    def see(operation):
        nonlocal left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1

    return see


def in_a_fork(work):
    """Runs this in a forked process; returns its exit code, negative if a signal ended it."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def spread(num, wanted):
    """The numbers below `num`, or so many of them, evenly spaced."""
    return range(num) if wanted is None else sorted({k * (num - 1) // (wanted - 1) for k in range(wanted)})
