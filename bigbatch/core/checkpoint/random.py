"""The random state of Python and NumPy, from which data loaders and augmentations draw."""

import random
from typing import Any

import numpy as np


def state() -> dict[str, Any]:
    return {"python": random.getstate(), "numpy": np.random.get_state()}


def restore(found: dict[str, Any]) -> None:
    random.setstate(found["python"])
    np.random.set_state(found["numpy"])
