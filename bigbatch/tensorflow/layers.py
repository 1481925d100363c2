"""The layers of a Keras model that make a micro-batch differ from the batch: BatchNormalization and dropout."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from ..core.batch import warn_of_batch_norm
from .internals import layers_of


def batch_norms(model: Any) -> list[Any]:
    """The BatchNormalization layers that normalise by what they are fed."""
    return [layer for layer in layers_of(model) if _is_batch_norm(layer) and layer.trainable]


def _is_batch_norm(layer: Any) -> bool:
    return any(cls.__name__ == "BatchNormalization" for cls in type(layer).__mro__)


def warn_of_batch_norms(model: Any) -> None:
    """Warns that BatchNormalization sees micro-batches, if it does."""
    names = [layer.name for layer in batch_norms(model)]
    warn_of_batch_norm(names, "freeze them", layer="BatchNormalization")


def dropouts(model: Any) -> list[Any]:
    """The layers that drop something out."""
    return [layer for layer in layers_of(model) if getattr(layer, "rate", 0) and "Dropout" in type(layer).__name__]


def dropout_off(model: Any) -> AbstractContextManager[None]:
    """Inside, no layer drops anything out."""
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
