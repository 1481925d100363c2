"""Two processes with two devices each, joined by jax.distributed."""

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.mark.parametrize("kind", ["explicit", pytest.param("auto", marks=pytest.mark.slow)])
def test_two_processes_with_uneven_data(kind):
    address = f"127.0.0.1:{free_port()}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.jax.worker", address, "2", str(number), kind],
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        found = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for number, (output, errors) in enumerate(found):
        assert processes[number].returncode == 0, errors
        told = re.search(rf"process {number} devices 4 gap (\S+)", output)
        assert float(told[1]) <= 1e-12
        assert "collectives ({'all-reduce': 1}, {})" in output
