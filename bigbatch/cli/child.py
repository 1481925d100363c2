"""A command in a process of its own, which ends with the process that started it, however that one ends."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from .run.ranks import environment_of_one

_ROOT = str(Path(__file__).parents[2])
_CODE = f"import sys; sys.path.append({_ROOT!r}); from bigbatch.cli.child import main; main()"


@contextmanager
def started(*arguments: str, output: IO[Any], errors: IO[Any]) -> Iterator["subprocess.Popen[bytes]"]:
    """Runs `bigbatch` with these arguments, and kills it at the end of the block if it is still running."""
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", _CODE, *arguments],  # -P: a file in the current folder may be called typer.py
        stdin=subprocess.PIPE, stdout=output, stderr=errors, start_new_session=True,
        env=environment_of_one(),
    )  # fmt: skip
    assert child.stdin is not None
    with child.stdin:  # open for as long as this process lives
        try:
            yield child
        finally:
            child.kill()
            child.wait()


def main() -> None:
    """Runs the command line in the child."""
    from . import main as run

    threading.Thread(target=_end_with_parent, daemon=True).start()
    run()


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)
