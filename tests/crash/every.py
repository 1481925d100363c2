"""Kills a training process before each of its operations on the run folder, continues the run, and compares.

python -m tests.crash.every [--kills 12]
"""

import argparse
import os
import signal
import sys
import tempfile
import warnings
from importlib import import_module
from pathlib import Path

from bigbatch.core.checkpoint.store import Store
from tests.cli.zygote import EVERYWHERE, PRELOADED

from .comparison import differences
from .operations import killed_before, spread, watched
from .process import Forked

TASK = Path(__file__).parent / "tasks" / "torch_task.py"
OPTIONS = ["--steps", 3, "--checkpoint-every", 1, "--quiet", "--seed", 7]


class Every:
    """A run that is killed once, and one that is not."""

    def __init__(self, folder):
        self.folder, self.undisturbed, self.log = folder, folder / "undisturbed", folder / "log.txt"

    def train(self, out, see):
        """Starts the run as a restart loop would; returns the exit code."""
        where = ["--resume", out] if (out / "config.toml").exists() else ["--out", out]
        return Forked(["train", TASK, *where, *OPTIONS], self.log, watched(out, see)).wait(60)

    def num_operations(self):
        """Trains without a kill; returns how many operations there were."""
        with (self.folder / "operations.txt").open("w") as file:
            code = self.train(self.undisturbed, lambda operation: print(operation.name, file=file, flush=True))
        assert code == 0, self.log.read_text()
        return len((self.folder / "operations.txt").read_text().splitlines())

    def problems_of(self, number):
        """What is wrong after a kill before this operation, and after the run was continued."""
        out = self.folder / f"killed-{number}" / "run"
        out.parent.mkdir()
        if (code := self.train(out, killed_before(number))) != -signal.SIGKILL:
            return [f"exit code {code} before it was killed"]
        try:
            with warnings.catch_warnings(action="error"):
                Store(out / "checkpoints", is_read_only=True).load()
        except Exception as error:
            return [repr(error)]
        if (code := self.train(out, lambda operation: None)) != 0:
            return [f"exit code {code}: {self.log.read_text().splitlines()[-1]}"]
        unexpected = {path.name for path in out.iterdir()} ^ {path.name for path in self.undisturbed.iterdir()}
        unexpected |= {path.name for path in out.parent.iterdir()} - {"run"}
        return differences(self.undisturbed, out) + [f"unexpected: {name}" for name in sorted(unexpected)]


def save_and_wait(self, *arguments, wait=False, save=Store.save, **options):
    """Leaves nothing to a thread, so that the operations are the same in each run."""
    save(self, *arguments, wait=True, **options)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, help="so many of them, evenly spaced")
    given = parser.parse_args()
    Store.save = save_and_wait
    for name in [*EVERYWHERE, *PRELOADED["torch"]]:  # once for all processes
        import_module(name)
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None  # what a kill leaves needs no disk
    with tempfile.TemporaryDirectory(prefix="every-", dir=memory) as folder:
        every = Every(Path(folder))
        num = every.num_operations()
        found = {number: every.problems_of(number) for number in spread(num, given.kills)}
    for number, problems in found.items():
        if problems:
            print(f"killed before operation {number}: {'; '.join(problems)}")
    print(f"{len(found)} kills before {num} operations, {sum(map(bool, found.values()))} with problems")
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main())
