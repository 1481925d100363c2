"""Starts a real `bigbatch train`, often and quickly."""

import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

ROOT = Path(__file__).parents[2]


def environment():
    known = {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return {**os.environ, **known}


def start(arguments, log, under=(), **options):
    """Starts a process with a new interpreter, maybe under another command such as nohup."""
    command = [*under, sys.executable, "-m", "bigbatch", *map(str, arguments)]
    with Path(log).open("ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, env=environment(), **options)


class Forked:
    """A process forked from an interpreter that has imported torch, which takes most of the time of a start.

    Torch has not run anything before the fork, so no threads are lost. The command runs in the context `around`.
    """

    def __init__(self, arguments, log, around=nullcontext()):  # noqa: B008
        self.returncode = None
        self.pid = os.fork()
        if not self.pid:
            self._run(arguments, log, around)

    def _run(self, arguments, log, around):
        code = 70
        try:
            file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(file, 1)
            os.dup2(file, 2)
            sys.argv = ["bigbatch", *map(str, arguments)]
            from bigbatch.cli import main

            with around:
                main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(bool(end.code))
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def poll(self):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout=None):
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(0.001)
        return self.returncode

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)


def num_lines(path):
    """The number of lines in a file that another process is writing."""
    try:
        return path.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0
