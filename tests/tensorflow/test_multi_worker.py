"""MultiWorkerMirroredStrategy with two real processes: exact against one process that has the whole batch."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np

from tests.problems import Problem, samples

from .training import Run, flat

SPLITS = [[16, 16], [14, 8], [9, 8], [13, 8], [11, 0]]


def free_ports(num: int) -> list[str]:
    sockets = [socket.socket() for _ in range(num)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [str(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()


def test_two_workers_are_one_with_the_whole_batch(tmp_path: Path, float64: None) -> None:
    ports = free_ports(2)
    outs = [tmp_path / f"{index}.npz" for index in range(2)]
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.tensorflow.worker", str(index), *ports, str(out), json.dumps(SPLITS)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index, out in enumerate(outs)
    ]
    try:
        told = [worker.communicate(timeout=240)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(told)
    found = [np.load(out) for out in outs]
    for split in SPLITS:
        problem = Problem(str(split), "samples", samples(sum(split)), 4)
        full = Run(problem).full()
        for of_worker in found:
            update = of_worker[json.dumps(split)] - full.before
            error = np.linalg.norm(update - full.update) / np.linalg.norm(full.update)
            assert error <= 1e-12, f"{split}: {error:.1e}"
        assert not np.array_equal(flat(full.model), full.before)
