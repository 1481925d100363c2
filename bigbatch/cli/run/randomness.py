"""The random numbers that everybody draws from: of Python, of NumPy, of the frameworks that are in use."""

import importlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ...core.checkpoint import random as core_random


def state() -> dict[str, Any]:
    """Where all of them are."""
    found = core_random.state()
    for name, framework in FRAMEWORKS.items():
        if name in sys.modules:
            found[name] = framework.state()
    return found


def restore(found: dict[str, Any]) -> None:
    """Puts them where they were; last those that frameworks may draw from when they make theirs."""
    for name, framework in FRAMEWORKS.items():
        if name in found:
            importlib.import_module(name)
            framework.restore(found[name])
    name, keys, *others = found["numpy"]
    core_random.restore({"python": found["python"], "numpy": (name, np.asarray(keys), *others)})


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    for name, framework in FRAMEWORKS.items():
        if name in sys.modules:
            framework.seed(number)


@contextmanager
def kept() -> Iterator[None]:
    """A block whose draws nobody notices."""
    outside = state()
    try:
        yield
    finally:
        restore(outside)


class Stream:
    """A sequence of random numbers of its own: who draws in it draws the same, whatever others draw meanwhile."""

    def __init__(self, number: int) -> None:
        with kept():
            seed(number)
            self.state = state()

    @contextmanager
    def flowing(self) -> Iterator[None]:
        """A block that draws from it."""
        with kept():
            restore(self.state)
            try:
                yield
            finally:
                self.state = state()


class OfTorch:
    """Those of the host and of every GPU."""

    @staticmethod
    def state() -> list[np.ndarray]:
        import torch

        of_devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return [each.numpy() for each in (torch.get_rng_state(), *of_devices)]

    @staticmethod
    def restore(found: list[Any]) -> None:
        import torch

        of_host, *of_devices = (torch.from_numpy(np.array(each)) for each in found)
        torch.set_rng_state(of_host)
        for number, of_device in enumerate(of_devices[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(of_device, number)

    @staticmethod
    def seed(number: int) -> None:
        import torch

        torch.manual_seed(number)


class OfTensorFlow:
    """What the next operation takes for its seed, which also orders a dataset that is shuffled; the global generator.

    TensorFlow 2.21 keeps the former in a Random of Python's and has no public way to it.
    """

    @staticmethod
    def state() -> dict[str, Any]:
        from tensorflow.python.eager import context
        from tensorflow.python.ops import stateful_random_ops

        drawn = getattr(context.context(), "_rng", None)
        generator = stateful_random_ops.global_generator
        return {
            "operations": None if drawn is None else drawn.getstate(),
            "generator": None if generator is None else generator.state.numpy(),
        }

    @staticmethod
    def restore(found: dict[str, Any]) -> None:
        import tensorflow as tf
        from tensorflow.python.eager import context

        drawn = getattr(context.context(), "_rng", None)
        if found["operations"] is not None and drawn is not None:
            drawn.setstate(found["operations"])
        if found["generator"] is not None:
            tf.random.get_global_generator().state.assign(np.asarray(found["generator"]))

    @staticmethod
    def seed(number: int) -> None:
        from tensorflow.python.eager import context
        from tensorflow.python.ops import stateful_random_ops

        drawn = getattr(context.context(), "_rng", None)
        if drawn is not None:
            drawn.seed(number)
        if stateful_random_ops.global_generator is not None:
            stateful_random_ops.global_generator.reset_from_seed(number)


class OfKeras:
    """What random operations without a seed draw from, on any backend; Keras 3.15 has no public way to it."""

    @staticmethod
    def state() -> np.ndarray | None:
        from keras.src.backend.common import global_state

        generator = global_state.get_global_attribute("global_seed_generator")
        return None if generator is None else np.array(generator.state)

    @staticmethod
    def restore(found: Any) -> None:
        from keras.src.random.seed_generator import global_seed_generator

        if found is not None:
            global_seed_generator().state.assign(np.asarray(found))

    @staticmethod
    def seed(number: int) -> None:
        if OfKeras.state() is not None:
            OfKeras.begin(number)

    @staticmethod
    def begin(number: int) -> None:
        """Makes one, which else the first operation would do."""
        OfKeras.restore(np.array([number % 2**31, 0]))


FRAMEWORKS: dict[str, Any] = {"torch": OfTorch, "tensorflow": OfTensorFlow, "keras": OfKeras}
