"""A process without the rights of root, and one that keeps a list of what it writes."""

import ctypes
import os
import sys

_OVERRIDES = 0b1111  # CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_PATHS = {  # the events of Python's audit hooks, with the places of each path and of the descriptor of its folder
    "os.rename": ((0, 2), (1, 3)), "os.remove": ((0, 1),), "os.rmdir": ((0, 1),), "os.mkdir": ((0, 2),),
    "os.link": ((1, 3),), "os.symlink": ((1, 2),), "os.truncate": ((0, None),), "os.chmod": ((0, 2),),
    "os.chown": ((0, 3),), "os.utime": ((0, 3),), "os.setxattr": ((0, None),),
}  # fmt: skip


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Capabilities(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


def obey_permissions() -> None:
    """From now on this process may only do what owners and modes of files allow, even if it is root's."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, found = _Header(0x20080522, 0), (_Capabilities * 2)()
    for function in (libc.capget, libc.capset):
        if function(ctypes.byref(header), ctypes.byref(found)):
            raise OSError(ctypes.get_errno(), "the capabilities cannot be changed")
        found[0].effective &= ~_OVERRIDES
        found[0].permitted &= ~_OVERRIDES


def list_writes(file: str) -> None:
    """Writes to this file each path that the process opens for writing, creates, moves, changes or removes."""
    listed = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def add(path: str | bytes | os.PathLike[str], folder: int | None = None, *, is_followed: bool = False) -> None:
        path = os.path.join(
            os.readlink(f"/proc/self/fd/{folder}") if folder not in (None, -1) else "", os.fsdecode(path)
        )
        above, name = os.path.split(path)
        real = os.path.realpath(path) if is_followed else os.path.join(os.path.realpath(above), name)
        os.write(listed, f"{real}\n".encode())

    def hook(event: str, given: tuple[object, ...]) -> None:
        if event == "open" and isinstance(given[2], int) and given[2] & _WRITES and not isinstance(given[0], int):
            add(given[0], is_followed=not given[2] & os.O_NOFOLLOW)  # type: ignore[arg-type]
        for path, folder in _PATHS.get(event, ()):
            add(given[path], None if folder is None else given[folder])  # type: ignore[arg-type]

    sys.addaudithook(hook)
