"""The global random numbers of Python, NumPy and every framework that is imported."""

import importlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ...core.checkpoint import random as of_host


def state() -> dict[str, Any]:
    """The state of all global random generators."""
    of_frameworks = {name: each.state() for name, each in _FRAMEWORKS.items() if name in sys.modules}
    return {**of_host.state(), **of_frameworks}


def restore(saved: dict[str, Any]) -> None:
    """Restores what `state` returned; Python and NumPy last, because a framework may draw from them meanwhile."""
    for name, framework in _FRAMEWORKS.items():
        if name in saved:
            importlib.import_module(name)
            framework.restore(saved[name])
    of_host.restore(saved)


def seed(number: int) -> None:
    """Seeds all global random generators."""
    random.seed(number)
    np.random.seed(number)
    for name, framework in _FRAMEWORKS.items():
        if name in sys.modules:
            framework.seed(number)


@contextmanager
def preserved() -> Iterator[None]:
    """Restores all global random generators afterwards."""
    before = state()
    try:
        yield
    finally:
        restore(before)


class Stream:
    """A seeded sequence of random numbers that does not depend on what is drawn outside of it."""

    def __init__(self, number: int) -> None:
        with preserved():
            seed(number)
            self.state = state()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Draws inside come from this stream."""
        with preserved():
            restore(self.state)
            try:
                yield
            finally:
                self.state = state()


class _Torch:
    """The generators of the host and of every GPU."""

    def state(self) -> list[np.ndarray]:
        import torch

        of_devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return [each.numpy() for each in (torch.get_rng_state(), *of_devices)]

    def restore(self, saved: list[Any]) -> None:
        import torch

        of_host, *of_devices = (torch.from_numpy(np.array(each)) for each in saved)
        torch.set_rng_state(of_host)
        for number, of_device in enumerate(of_devices[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(of_device, number)

    def seed(self, number: int) -> None:
        import torch

        torch.manual_seed(number)


class _TensorFlow:
    """The seeds that operations draw, which also order a shuffled dataset; and the global generator.

    TensorFlow 2.21 keeps the seeds in a `random.Random` without a public way to it.
    """

    def _generators(self) -> tuple[Any, Any]:
        from tensorflow.python.eager import context
        from tensorflow.python.ops import stateful_random_ops

        return getattr(context.context(), "_rng", None), stateful_random_ops.global_generator

    def state(self) -> list[Any]:
        seeds, generator = self._generators()
        return [seeds and seeds.getstate(), None if generator is None else generator.state.numpy()]

    def restore(self, saved: list[Any]) -> None:
        import tensorflow as tf

        seeds, _ = self._generators()
        if saved[0] is not None and seeds is not None:
            seeds.setstate(saved[0])
        if saved[1] is not None:
            tf.random.get_global_generator().state.assign(np.asarray(saved[1]))

    def seed(self, number: int) -> None:
        seeds, generator = self._generators()
        if seeds is not None:
            seeds.seed(number)
        if generator is not None:
            generator.reset_from_seed(number)


class _Keras:
    """The generator of random operations without a seed, on any backend. Keras 3.15 has no public way to it."""

    def state(self) -> np.ndarray | None:
        from keras.src.backend.common import global_state

        generator = global_state.get_global_attribute("global_seed_generator")
        return None if generator is None else np.array(generator.state)

    def restore(self, saved: Any) -> None:
        from keras.src.random.seed_generator import global_seed_generator

        if saved is not None:
            global_seed_generator().state.assign(np.asarray(saved))

    def seed(self, number: int) -> None:
        if self.state() is not None:
            seed_keras(number)


def seed_keras(number: int) -> None:
    """Creates Keras's global generator with this seed, or seeds it anew."""
    _FRAMEWORKS["keras"].restore(np.array([number % 2**31, 0]))


_FRAMEWORKS: dict[str, Any] = {"torch": _Torch(), "tensorflow": _TensorFlow(), "keras": _Keras()}
