"""The state of all random number generators that are global: restored before each pass, and which of them moved."""

import random

import numpy as np
import torch
from torch import nn

Moved = list[str]


class Drawn:
    """The state of Python's, NumPy's and torch's generators when this was made."""

    def __init__(self, model: nn.Module) -> None:
        self._devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
        self._python, self._numpy = random.getstate(), np.random.get_state()
        self._torch = torch.get_rng_state()
        self._cuda = [torch.cuda.get_rng_state(device) for device in self._devices]

    def restore(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        for device, state in zip(self._devices, self._cuda, strict=True):
            torch.cuda.set_rng_state(state, device)

    def moved(self) -> Moved:
        """Those beside torch's that something was drawn from."""
        found = ["Python's random"] if random.getstate() != self._python else []
        now, before = np.random.get_state(legacy=False), dict(zip(KEYS, self._numpy, strict=True))
        is_same = (
            np.array_equal(now["state"]["key"], before["key"])
            and now["state"]["pos"] == before["pos"]
            and now["has_gauss"] == before["has_gauss"]
        )
        return found if is_same else [*found, "NumPy's random"]


KEYS = ("name", "key", "pos", "has_gauss", "gauss")
