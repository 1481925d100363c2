"""fit under tf.distribute: MirroredStrategy on two logical CPUs, MultiWorkerMirroredStrategy in two processes."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from .cases import CASES, gap

ROOT = Path(__file__).parents[2]


def test_mirrored(request: pytest.FixtureRequest) -> None:
    """The devices have to be set up before anything runs, so in a process of its own."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/keras/replica_suite.py"]
    command += ["--all"] if request.config.getoption("--all") else []
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def free_ports(num: int) -> list[int]:
    sockets = [socket.socket() for _ in range(num)]
    for each in sockets:
        each.bind(("localhost", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
def test_two_workers(tmp_path: Path) -> None:
    """Two real processes; both end with the weights and the history of plain fit in one."""
    ports = list(map(str, free_ports(2)))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.keras.worker", str(index), *ports, str(tmp_path)],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for index in range(2)
    ]  # fmt: skip
    try:
        outputs = [worker.communicate(timeout=600)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(output[-5000:] for output in outputs)
    for index in range(2):
        for name, result in json.loads((tmp_path / f"{index}.json").read_text()).items():
            case = next(case for case in CASES if case.name == name)
            plain, history = case.fit(None)
            with np.load(tmp_path / f"{name}-{index}.npz") as file:
                weights = [file[key] for key in file.files]
            ours = type("Weights", (), {"get_weights": lambda self, weights=weights: weights})()
            assert gap((ours, result["history"]), (plain, history)) < 1e-12
            expected = plain.evaluate(**case.data(), batch_size=20, verbose=0, return_dict=True)
            assert result["evaluated"]["accuracy"] == pytest.approx(expected["accuracy"])
