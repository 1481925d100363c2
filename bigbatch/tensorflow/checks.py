"""What can be seen to be wrong before anything is changed."""

import math
import warnings
from typing import Any

import tensorflow as tf

from ..core.errors import BigBatchWarning, LossError, OptionError
from ..core.weight import Terms, check_terms, check_weight


def check_clip(name: str, value: float | None) -> None:
    if value is not None and not (value > 0 and not math.isnan(value)):
        raise OptionError(f"{name} is {value!r}: pass a number above 0, or None")


def check_loss(terms: Terms, num_weights: int) -> None:
    """Refuses what no gradient can be taken of, while the graph is being made."""
    check_terms(len(terms), num_weights)
    for term in terms:
        if not tf.is_tensor(term) or not term.dtype.is_floating:
            raise LossError(f"the loss is a {type(term).__name__}: return a scalar tensor of floats, or a tuple of them")
        if term.shape.rank not in (None, 0):
            raise LossError(f"the loss has the shape {term.shape}: return the mean, for example tf.reduce_mean(loss)")


def check_weight_at_hand(weight: Any) -> None:
    """Refuses a bad weight where it is known; in a graph it is not."""
    if isinstance(weight, tf.Tensor) and not hasattr(weight, "numpy"):
        return
    number = weight.numpy().item() if isinstance(weight, tf.Tensor) else weight
    check_weight((number,), of="this micro-batch")


def batch_norms(model: Any) -> list[str]:
    """The names of the BatchNormalization layers that normalise by what they are fed."""
    layers = model._flatten_layers() if hasattr(model, "_flatten_layers") else []
    return [layer.name for layer in layers if type(layer).__name__ == "BatchNormalization" and layer.trainable]


def tell_batch_norm(model: Any) -> None:
    """Says that BatchNormalization sees micro-batches, if it does."""
    if names := batch_norms(model):
        warnings.warn(
            f"{len(names)} BatchNormalization layer{'s' * (len(names) != 1)} in training mode ({names[0]} first) "
            "normalise by the micro-batch, so the result is not that of the full batch: freeze them, or use "
            "GroupNormalization or LayerNormalization, to be exact; verify() shows how far apart it is",
            BigBatchWarning,
            stacklevel=4,
        )
