"""Signals that ask a run to end: it saves, ends with their exit code, and resumes bit for bit."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from bigbatch.core import errors

from .comparison import differences, newest
from .process import ROOT, num_lines, start

TASK = ROOT / "tests/crash/tasks/torch_task.py"
STEPS = 60


def train(folder, name, *arguments, **started):
    where = ["--resume"] if (folder / name).exists() else ["--out"]
    options = [*where, folder / name, "--steps", STEPS, "--seed", 7, "--no-compare", *arguments]
    return start(["train", TASK, *options], folder / "log.txt", **started)


def wait_for_steps(process, history, num, log):
    deadline = time.monotonic() + 120
    while num_lines(history) < num:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    assert train(folder, "run").wait(120) == 0
    return folder / "run"


def test_each_signal_saves_and_has_its_code(undisturbed, tmp_path):
    """All five signals end one run, one after the other; only they cause checkpoints. Under nohup it goes on."""
    out, log = tmp_path / "run", tmp_path / "log.txt"
    codes = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGUSR1: 138, signal.SIGUSR2: 140,
             signal.SIGHUP: 129}  # fmt: skip
    num = 0

    def signalled(number, **started):
        process = train(tmp_path, "run", **started)
        before = (out / "history.jsonl").stat().st_ino if num else None
        while num and (out / "history.jsonl").stat().st_ino == before and process.poll() is None:
            time.sleep(0.001)
        wait_for_steps(process, out / "history.jsonl", num + 3, log)
        process.send_signal(number)
        return process

    for number, code in codes.items():
        process = signalled(number)
        assert process.wait(60) == code, log.read_text()
        summary = json.loads((out / "summary.json").read_text())
        assert summary["status"] == "interrupted"
        assert num + 3 <= summary["num_steps"] == num_lines(out / "history.jsonl") < STEPS
        num = summary["num_steps"]
    assert signalled(signal.SIGHUP, under=["nohup"]).wait(120) == 0
    told = log.read_text()
    assert "Traceback" not in told
    assert told.replace("\n", " ").count(f"to continue, bigbatch train {TASK} --resume {out}") == len(codes)
    assert differences(undisturbed, out) == []


STUCK = """
import time
from tests.crash.tasks.torch_task import *

quick = loss
def loss(model, batch):
    time.sleep(600)
"""


def test_a_second_process_is_refused_and_a_second_signal_ends_at_once(tmp_path):
    """The loss never returns. The first signal waits for it; the second one, a different signal, does not."""
    task = tmp_path / "stuck.py"
    task.write_text("import torch" + STUCK.replace("time.sleep(600)", "(open(__file__ + '.in', 'w'), time.sleep(600))"))
    process = start(["train", task, "--out", tmp_path / "run"], tmp_path / "log.txt")
    deadline = time.monotonic() + 120
    while not os.path.exists(f"{task}.in"):
        assert process.poll() is None, (tmp_path / "log.txt").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert start(["train", task, "--resume", tmp_path / "run"], tmp_path / "other.txt").wait(60) == 2
    assert "is in use by another process" in (tmp_path / "other.txt").read_text()
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGUSR1)
    assert process.wait(5) == 138
    assert not (tmp_path / "run" / "summary.json").exists()


SLOW = """
import time
import torch
from tests.crash.tasks.torch_task import *
from tests.crash.tasks.torch_task import loss as quick

def loss(model, batch):
    time.sleep(0.2)
    return quick(model, batch)
"""


@pytest.mark.skipif(not hasattr(errors, "Interrupted"), reason="steps cannot be interrupted in their middle yet")
def test_in_the_middle_of_a_window(tmp_path):
    """The window has six micro-batches of 0.2 s; the finished ones are saved, and the rest follows after the resume."""
    task, log, out = tmp_path / "slow.py", tmp_path / "log.txt", tmp_path / "run"
    task.write_text(SLOW)
    assert start(["train", task, "--out", tmp_path / "whole", "--steps", 4, "--no-compare"], log).wait(120) == 0
    process = start(["train", task, "--out", out, "--steps", 4, "--no-compare"], log)
    wait_for_steps(process, out / "history.jsonl", 2, log)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143, log.read_text()
    saved = newest(out)
    assert saved.step == num_lines(out / "history.jsonl") == 2
    assert 0 < len(saved.state["trained"]["engine"]["parts"]["accumulator"]["window"]["losses"]) < 6
    assert start(["train", task, "--resume", out, "--steps", 4], log).wait(120) == 0
    assert differences(tmp_path / "whole", out) == []


SLOW_WHEN_WHOLE = """
import os
import sys
import time
from tests.crash.tasks.{framework}_task import *
from tests.crash.tasks.{framework}_task import loss as quick
import {framework}

def loss(model, batch, **key):
    if any(argument.endswith("full_batch") for argument in sys.argv):
        open(__file__ + ".pid", "w").write(str(os.getpid()))
        time.sleep(600)
    return quick(model, batch, **key)
"""


def contents(folder):
    return {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}


OTHERS = [pytest.param(signal.SIGKILL, framework, marks=pytest.mark.slow) for framework in ("tensorflow", "jax")]
OTHERS += [
    pytest.param(number, framework, marks=pytest.mark.slow)
    for number in (signal.SIGTERM, signal.SIGHUP)
    for framework in ("torch", "tensorflow", "jax")
]


@pytest.mark.parametrize(("number", "framework"), [(signal.SIGKILL, "torch"), *OTHERS])
def test_the_full_batch_ends_with_the_run(number, framework, tmp_path):
    """Its loss would take ten minutes; it is gone within two seconds, and writes nothing more."""
    task, out, log = tmp_path / "whole.py", tmp_path / "run", tmp_path / "log.txt"
    task.write_text(SLOW_WHEN_WHOLE.format(framework=framework))
    process = start(["train", task, "--out", out, "--steps", 2, "--compare"], log)
    pid = wait_for(process, tmp_path / "whole.py.pid", log)
    assert pid != process.pid
    assert is_running(pid)
    process.send_signal(number)
    assert process.wait(10) == -number
    deadline = time.monotonic() + 2
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    before = contents(tmp_path)
    time.sleep(0.5)
    assert contents(tmp_path) == before


def wait_for(process, path, log):
    """The number in a file that another process writes."""
    deadline = time.monotonic() + 120
    while not path.exists() or not path.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return int(path.read_text())


def is_running(pid):
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()  # a dead process whose parent is gone
    except FileNotFoundError:
        return False
