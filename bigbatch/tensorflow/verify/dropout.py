"""Dropout, switched off for a comparison."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..checks import layers_of


def dropouts(model: Any) -> list[Any]:
    return [layer for layer in layers_of(model) if getattr(layer, "rate", 0) and "Dropout" in type(layer).__name__]


@contextmanager
def dropout_off(model: Any) -> Iterator[None]:
    before = [(layer, layer.rate) for layer in dropouts(model)]
    for layer, _ in before:
        layer.rate = 0.0
    try:
        yield
    finally:
        for layer, rate in before:
            layer.rate = rate
