"""A process that has imported a framework and forks a child for each `bigbatch …`.

Importing is most of the cost of a short command. A child is an ordinary process (with its own exit code, files and
threads) whose imports are done already. The framework has not run anything before the fork, so it has no threads
that a child would lose.
"""

import atexit
import gc
import json
import os
import subprocess
import sys
import threading
import warnings
from functools import cache
from importlib import import_module
from typing import Any

from tests.crash.confined import list_writes, obey_permissions

PRELOADED = {
    "torch": ["torch", "torch._dynamo", "sklearn.datasets", "bigbatch.torch", "bigbatch.cli.engines.torch"],
    "tensorflow": ["tensorflow", "keras", "sklearn.datasets", "bigbatch.tensorflow", "bigbatch.keras"],
    "jax": ["jax", "optax", "flax.nnx", "sklearn.datasets", "bigbatch.jax", "bigbatch.cli.engines.jax"],
}
EVERYWHERE = [
    "bigbatch.cli.app",
    "bigbatch.cli.run.train",
    "bigbatch.cli.report.page",
    "matplotlib.pyplot",
    "safetensors.numpy",
]


class Zygote:
    """The process, as a test uses it: one request at a time."""

    def __init__(self, framework: str, environment: dict[str, str]) -> None:
        command = [sys.executable, "-m", "tests.cli.zygote", framework]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        atexit.register(self._process.kill)

    def run(self, **request: Any) -> int:
        """Runs a command to its end; returns its exit code, negative if a signal ended it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


@cache
def zygote(framework: str, **environment: str) -> Zygote:
    """The zygote of this framework, started on first use."""
    return Zygote(framework, {**os.environ, **environment})


def serve(framework: str) -> None:
    """Forks for every request. Returns in each child, never in the parent."""
    for name in [*EVERYWHERE, *PRELOADED[framework]]:
        import_module(name)
    gc.collect()
    gc.freeze()  # so that garbage collection in a child does not copy the parent's memory
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        with warnings.catch_warnings(action="ignore"):  # JAX warns about every fork
            pid = os.fork()
        if not pid:
            answers.close()
            prepare(**json.loads(line))
            return
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=answers, flush=True)
    os._exit(0)


def prepare(
    arguments: list[str], folder: str, environment: dict[str, str], out: str, err: str, writes: str, has_rights: bool
) -> None:
    """Sets up the child like a newly started `bigbatch …`."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, path in enumerate([os.devnull, out, err]):
        file = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(file, descriptor)
        os.close(file)
    sys.argv = ["bigbatch", *arguments]
    sys.path[0] = os.path.dirname(sys.executable)  # as for the script of the command
    if not has_rights:
        obey_permissions()
    if writes:
        list_writes(writes)


def end(code: Any) -> None:
    """Exits like Python, without tearing down the imports of the parent, which would take longer than the command."""
    if isinstance(code, str):
        print(code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    serve(sys.argv[1])
    from bigbatch.cli import main

    try:
        main()
    except SystemExit as wanted:
        end(wanted.code)
    end(None)
