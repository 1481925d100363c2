"""The state of all global random generators: Python's, NumPy's and torch's, on the host and on CUDA devices."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from ..core.checkpoint import random as of_host


class RandomState:
    """The state at the time when this was made, to be restored any number of times.

    Args:
        devices: The CUDA devices whose generators are included.
    """

    def __init__(self, devices: Sequence[Any]) -> None:
        self._devices = devices
        self._of_host = of_host.state()
        self._torch = torch.get_rng_state()
        self._cuda = [torch.cuda.get_rng_state(device) for device in devices]

    def restore(self) -> None:
        of_host.restore(self._of_host)
        torch.set_rng_state(self._torch)
        for device, state in zip(self._devices, self._cuda, strict=True):
            torch.cuda.set_rng_state(state, device)

    def drawn(self) -> list[str]:
        """The generators, besides torch's own, that have been drawn from since."""
        now: Any = np.random.get_state()
        before = self._of_host["numpy"]
        found = ["Python's random"] if random.getstate() != self._of_host["python"] else []
        is_same = np.array_equal(now[1], before[1]) and now[2:4] == before[2:4]
        return found if is_same else [*found, "NumPy's random"]

    def has_drawn_on_host(self) -> bool:
        """Whether any generator on the host has been drawn from since, torch's included."""
        return bool(self.drawn()) or not torch.equal(self._torch, torch.get_rng_state())


@contextmanager
def random_state_kept(model: nn.Module) -> Iterator[None]:
    """Restores all random state afterwards."""
    state = RandomState(cuda_devices_of(model))
    try:
        yield
    finally:
        state.restore()


def cuda_devices_of(model: nn.Module) -> list[int]:
    """The CUDA devices that a model has parameters on."""
    return sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
