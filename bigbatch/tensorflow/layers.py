"""The layers of a Keras model that make a micro-batch differ from the batch: BatchNormalization and dropout."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from ..core.batch import warn_of_batch_norm
from .internals import layers_of


def batch_norms(model: Any) -> list[Any]:
    """The BatchNormalization layers that normalise by the batch they are given."""
    return [
        layer
        for layer in layers_of(model)
        if layer.trainable and "BatchNormalization" in {cls.__name__ for cls in type(layer).__mro__}
    ]


def all_batch_norms(model: Any) -> list[Any]:
    """The BatchNormalization layers of Keras 3."""
    cls = getattr(sys.modules.get("keras.layers"), "BatchNormalization", ())
    return [layer for layer in layers_of(model) if isinstance(layer, cls)]


def warn_of_batch_norms(model: Any, batch_norm: str) -> None:
    names = [] if batch_norm == "frozen" else [layer.name for layer in batch_norms(model)]
    warn_of_batch_norm(
        names,
        'pass batch_norm="frozen"',
        layer="BatchNormalization",
        has_pooled_statistics=batch_norm == "batch",
        statistics="step() and micro_batch() give them the moving statistics of the whole batch, or warn that they "
        "cannot",
    )


def dropouts(model: Any) -> list[Any]:
    return [layer for layer in layers_of(model) if getattr(layer, "rate", 0) and "Dropout" in type(layer).__name__]


def dropout_off(model: Any) -> AbstractContextManager[None]:
    """Inside, dropout is off."""
    return with_value(dropouts(model), "rate", 0.0)


@contextmanager
def with_value(layers: Sequence[Any], name: str, value: Any) -> Iterator[None]:
    """Inside, these layers have another value of an attribute."""
    before = [getattr(layer, name) for layer in layers]
    for layer in layers:
        setattr(layer, name, value)
    try:
        yield
    finally:
        for layer, old in zip(layers, before, strict=True):
            setattr(layer, name, old)
