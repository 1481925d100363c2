"""The global random numbers: of Python, of NumPy, and of every framework that is imported."""

import importlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ...core.checkpoint import random as core_random


def state() -> dict[str, Any]:
    """The state of all of them."""
    of_frameworks = {name: each.state() for name, each in _FRAMEWORKS.items() if name in sys.modules}
    return {**core_random.state(), **of_frameworks}


def restore(found: dict[str, Any]) -> None:
    """Puts them where they were; Python and NumPy last, since frameworks may draw from them when they make theirs."""
    for name, framework in _FRAMEWORKS.items():
        if name in found:
            importlib.import_module(name)
            framework.restore(found[name])
    core_random.restore(found)


def seed(number: int) -> None:
    """Seeds all of them."""
    random.seed(number)
    np.random.seed(number)
    for name, framework in _FRAMEWORKS.items():
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
    """A sequence of random numbers of its own: what is drawn in it does not depend on what others draw.

    Args:
        number: Its seed.
    """

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


class _Torch:
    """The generators of the host and of every GPU."""

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


class _TensorFlow:
    """The seeds that operations draw, which also order a shuffled dataset; and the global generator.

    TensorFlow 2.21 keeps the former in a Random of Python's and has no public way to it.
    """

    @staticmethod
    def _parts() -> tuple[Any, Any]:
        from tensorflow.python.eager import context
        from tensorflow.python.ops import stateful_random_ops

        return getattr(context.context(), "_rng", None), stateful_random_ops.global_generator

    @staticmethod
    def state() -> list[Any]:
        drawn, generator = _TensorFlow._parts()
        return [drawn and drawn.getstate(), None if generator is None else generator.state.numpy()]

    @staticmethod
    def restore(found: list[Any]) -> None:
        import tensorflow as tf

        of_operations, of_generator = found
        drawn, _ = _TensorFlow._parts()
        if of_operations is not None and drawn is not None:
            drawn.setstate(of_operations)
        if of_generator is not None:
            tf.random.get_global_generator().state.assign(np.asarray(of_generator))

    @staticmethod
    def seed(number: int) -> None:
        drawn, generator = _TensorFlow._parts()
        if drawn is not None:
            drawn.seed(number)
        if generator is not None:
            generator.reset_from_seed(number)


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
        """Makes the generator, as the first operation would."""
        OfKeras.restore(np.array([number % 2**31, 0]))


_FRAMEWORKS: dict[str, Any] = {"torch": _Torch, "tensorflow": _TensorFlow, "keras": OfKeras}
