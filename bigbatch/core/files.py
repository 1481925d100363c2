"""Files that are there whole or not at all."""

import os
from pathlib import Path


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes beside the file and puts it in its place: who is stopped on the way leaves the old one."""
    part = Path(f"{os.fspath(path)}.part")
    try:
        part.write_bytes(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
