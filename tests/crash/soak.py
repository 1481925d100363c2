"""Kills a training process at random moments and starts it again until it has finished, then compares.

python -m tests.crash.soak --kills 200 --framework torch --report build/soak.md
"""

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from .comparison import differences
from .process import Forked, num_lines, start

TASKS = Path(__file__).parent / "tasks"
LIMIT = 120.0
"""Seconds until a process must reach the step where it is killed; TensorFlow alone takes ten to start, or more."""
MOMENTS = ("in a step", "while saving", "in a step", "while saving", "while starting", "in a step")


class Soak:
    """One run that is killed again and again."""

    def __init__(self, task, folder, num_kills, num_steps, seed, *, is_forked):
        self.out, self.log = folder / "killed", folder / "log.txt"
        self.undisturbed = folder / "undisturbed"
        self.draw = random.Random(seed)
        self.options = ["--steps", num_steps, "--checkpoint-every", 1, "--quiet", "--seed", 7]
        self.task, self.num_steps, self.num_kills, self.is_forked = task, num_steps, num_kills, is_forked
        self.kills = []

    def start(self, out):
        """Starts the run as a restart loop would: resumes it if there is something to resume."""
        where = ["--resume", out] if (out / "config.toml").exists() else ["--out", out]
        arguments = ["train", self.task, *where, *self.options]
        return Forked(arguments, self.log) if self.is_forked else start(arguments, self.log)

    def run(self):
        """Returns what differs from a run that was not killed."""
        self.must_end_well(start(["train", self.task, "--out", self.undisturbed, *self.options], self.log))
        steps = sorted(self.draw.randint(0, self.num_steps) for _ in range(self.num_kills))
        while len(self.kills) < self.num_kills:
            self.kill_at(steps[len(self.kills)], MOMENTS[len(self.kills) % len(MOMENTS)])
        self.must_end_well(self.start(self.out))
        return differences(self.undisturbed, self.out)

    def must_end_well(self, process):
        code = process.wait(LIMIT)
        if code != 0:
            raise AssertionError(f"the run ended with {code} by itself:\n{self.log.read_text()}")

    def kill_at(self, step, moment):
        """Kills the process at this step: anywhere in the step, or while a checkpoint is being written."""
        before = self.file_number()
        process = self.start(self.out)
        if moment == "while starting":
            time.sleep(self.draw.uniform(0, 0.5 if self.is_forked else 5.0))
        else:
            self.wait_until(process, lambda: self.file_number() != before and num_lines(self.history) >= step)
        if step == self.num_steps and moment == "in a step":
            moment = "at the end"
            time.sleep(self.draw.uniform(0, 1.0))
        elif moment == "in a step":
            time.sleep(self.draw.uniform(0, 0.02))
        elif moment == "while saving":
            self.wait_until(
                process, lambda: self.is_saving() or num_lines(self.history) >= min(step + 5, self.num_steps)
            )
            time.sleep(self.draw.uniform(0, 0.003))
            moment = "while saving" if self.is_saving() else "in a step"
        if process.poll() is not None:
            self.must_end_well(process)
            return
        process.kill()
        process.wait(LIMIT)
        self.kills.append((num_lines(self.history), moment))

    @property
    def history(self):
        return self.out / "history.jsonl"

    def file_number(self):
        """The inode of the history, which changes when the process has returned to its checkpoint."""
        return self.history.stat().st_ino if self.history.exists() else None

    def is_saving(self):
        return any((self.out / "checkpoints").glob("*.part"))

    def wait_until(self, process, is_there):
        deadline = time.monotonic() + LIMIT
        while not is_there() and process.poll() is None:
            if time.monotonic() > deadline:
                process.kill()
                raise AssertionError(f"it did not get there in {LIMIT:.0f} s:\n{self.log.read_text()}")
            time.sleep(0.0005)


def told(soak, framework, different, seconds):
    """The report as a section of a Markdown page."""
    verdict = "bitwise the same as undisturbed" if not different else f"NOT the same: {', '.join(different)}"
    moments = ", ".join(f"{num} {moment}" for moment, num in Counter(moment for _, moment in soak.kills).most_common())
    return (
        f"## {framework}: {len(soak.kills)} kills, {verdict}\n\n"
        f"- {soak.num_steps} steps, a checkpoint as often as the disk allows, {seconds:.0f} s\n"
        f"- killed {moments}\n"
        f"- compared: history.jsonl, model.safetensors, and all of the newest checkpoint but its time\n"
        f"- lines of the history at each kill: {', '.join(str(step) for step, _ in soak.kills)}\n"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=15)
    parser.add_argument("--framework", default="torch", choices=["torch", "tensorflow", "jax"])
    parser.add_argument("--task", type=Path, help="another task than the one of the framework")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=Path, help="a file to add a section to")
    given = parser.parse_args()
    is_forked = given.framework == "torch"
    if is_forked:
        import bigbatch.cli.app  # once for all processes
        import bigbatch.cli.engines.torch
        import bigbatch.cli.run.train  # noqa: F401
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        # the undisturbed run fills the compilation cache of XLA for the killed ones
        os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{folder}/compiled"
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        task = given.task or TASKS / f"{given.framework}_task.py"
        soak = Soak(task, Path(folder), given.kills, max(40, 2 * given.kills), given.seed, is_forked=is_forked)
        different = soak.run()
    page = told(soak, given.framework, different, time.monotonic() - began)
    print(page)
    if given.report is not None:
        given.report.parent.mkdir(parents=True, exist_ok=True)
        with given.report.open("a", encoding="utf-8") as file:
            file.write(page + "\n")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
