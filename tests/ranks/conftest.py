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
    """Ends at once: gloo aborts if it lets go of a tensor while Python ends, and some models live as long as it."""
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
    """A test begins when all ranks have ended the one before."""
    dist.barrier()


@pytest.fixture
def rank() -> int:
    return dist.get_rank()


@pytest.fixture
def size() -> int:
    return dist.get_world_size()
