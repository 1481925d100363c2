"""Runs on every rank: `torchrun --standalone --nproc-per-node 2 -m pytest tests/ranks -x`."""

import os
import sys
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "WORLD_SIZE" not in os.environ:
        for item in items:
            item.add_marker(pytest.mark.skip(reason="needs torchrun, as `make test` has it"))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Exits at once: gloo aborts if it releases a tensor while Python shuts down, and some models live that long."""
    session = config.pluginmanager.get_plugin("session")
    if "WORLD_SIZE" in os.environ and isinstance(session, pytest.Session):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(session.exitstatus))


@pytest.fixture(scope="session", autouse=True)
def _group() -> Iterator[None]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _together() -> None:
    """Starts a test when all ranks have finished the previous one."""
    dist.barrier()


@pytest.fixture
def rank() -> int:
    return dist.get_rank()


@pytest.fixture
def size() -> int:
    return dist.get_world_size()
