"""Skips tests that need a GPU if there is none, with one line for all of them."""

import pytest
import torch


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no GPU: torch.cuda.is_available() is false")
