"""MultiWorkerMirroredStrategy with two real processes: exact against one process that has the whole batch."""

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.problems import Problem, samples, tokens

from .training import Run, momentum

SPLITS = [(16, 16), (14, 8), (9, 8), (13, 8), (11, 0)]
DIGITS = Problem("digits", "samples", tuple(samples(sum(split))[0] for split in SPLITS), 4)
TEXT = Problem("text", "terms", (tokens(3, 60, 17, 40, 5),), 2)
TWICE = Problem("twice", "samples", samples(22) * 2, 4)


def digits(split: tuple[int, int]) -> dict[str, np.ndarray]:
    return samples(sum(split))[0]


def with_an_inf(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """In what the second worker has."""
    x = batch["x"].copy()
    x[-1, 3] = np.inf
    return {**batch, "x": x}


def free_ports(num: int) -> list[str]:
    sockets = [socket.socket() for _ in range(num)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [str(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[Any]:
    """What two workers ended with; if one of them does not end, both are stopped, and what they said is shown."""
    folder, ports = tmp_path_factory.mktemp("workers"), free_ports(2)
    outs: list[Path] = [folder / f"{index}.npz" for index in range(2)]
    logs = [folder / f"{index}.log" for index in range(2)]
    workers = []
    for index, (out, log) in enumerate(zip(outs, logs, strict=True)):
        command = [sys.executable, "-m", "tests.tensorflow.worker", str(index), *ports, str(out)]
        command += ["all"] if request.config.getoption("--all") else []
        with log.open("w") as file:
            workers.append(subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT))
    try:
        codes = [worker.wait(timeout=150) for worker in workers]
    except subprocess.TimeoutExpired:
        codes = [worker.poll() for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    told = "\n".join(f"--- worker {index}\n{log.read_text()[-4000:]}" for index, log in enumerate(logs))
    assert codes == [0, 0], told
    return [dict(np.load(out)) for out in outs]


def assert_same(found: list[Any], name: str, full: Run, update: np.ndarray | None = None) -> None:
    wanted = full.update if update is None else update
    for of_worker in found:
        error = np.linalg.norm(of_worker[name] - full.before - wanted) / np.linalg.norm(wanted)
        assert error <= 1e-12, f"{name}: {error:.1e}"
    np.testing.assert_array_equal(found[0][name], found[1][name])


@pytest.mark.usefixtures("float64")
def test_batches(found: list[Any]) -> None:
    """One after the other, each from where the last one ended."""
    full = Run(DIGITS, momentum)
    for split, batch in zip(SPLITS, DIGITS.batches, strict=True):
        full._step_plainly(full._gradients(batch)[1])
        assert_same(found, f"batch {split}", full)


@pytest.mark.parametrize("way", ["window", "add", "add in a graph"])
@pytest.mark.usefixtures("float64")
def test_windows_and_gradients_of_the_users(way: str, found: list[Any]) -> None:
    assert_same(found, way, Run(DIGITS, momentum).full())


@pytest.mark.usefixtures("float64")
def test_two_terms(found: list[Any]) -> None:
    assert_same(found, "terms", Run(TEXT, momentum).full())


@pytest.mark.parametrize("name", ["divided by the workers", "divided by the batch"])
@pytest.mark.usefixtures("float64")
def test_losses_that_are_divided_already(name: str, found: list[Any]) -> None:
    full = Run(DIGITS, momentum)
    plain = full.loss
    full.loss = lambda model, batch: plain(model, batch) + tf.reduce_sum(model.trainable_variables[0] ** 2)
    full._step_plainly(full._gradients(digits((14, 8)))[1])
    assert_same(found, name, full)


@pytest.mark.parametrize("kind", ["inf", "inf and a scale"])
@pytest.mark.usefixtures("float64")
def test_an_inf_on_one_worker_leaves_no_trace_on_any(kind: str, found: list[Any]) -> None:
    """The worker sees that nothing moves; afterwards all is as if that batch had never been."""
    assert_same(found, kind, Run(TWICE, momentum).full())


def test_clipping_sees_the_whole_gradient(found: list[Any]) -> None:
    assert [of_worker["clipping"] for of_worker in found] == [pytest.approx(-0.2, rel=1e-12)] * 2
