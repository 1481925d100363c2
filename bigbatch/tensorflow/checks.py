"""What can be seen to be wrong before anything is changed."""

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from ..core.errors import BigBatchWarning, GradientError, LossError, OptionError, WeightError
from ..core.weight import Terms, check_terms, check_weight

WEIGHT = tf.float64  # counts are exact in it
BAD_WEIGHT = (
    "the weight of a micro-batch is negative or not finite: a weight says over how many samples or tokens "
    "the loss is a mean, so it must be a finite number of at least 0"
)


def check_clip(name: str, value: float | None) -> None:
    if value is not None and not (value > 0 and not math.isnan(value)):
        raise OptionError(f"{name} is {value!r}: pass a number above 0, or None")


def check_loss(terms: Terms, num_weights: int) -> None:
    """Refuses what no gradient can be taken of, while the graph is being made."""
    check_terms(len(terms), num_weights)
    for term in terms:
        if not tf.is_tensor(term) or not term.dtype.is_floating:
            raise LossError(
                f"the loss is a {type(term).__name__}: return a scalar tensor of floats, or a tuple of them"
            )
        if term.shape.rank not in (None, 0):
            raise LossError(f"the loss has the shape {term.shape}: return the mean, for example tf.reduce_mean(loss)")


def weight_at_hand(weight: Any) -> tf.Tensor:
    """One number for a micro-batch; refuses a bad one where it is known, and in a graph when that is run."""
    if not isinstance(weight, tf.Tensor | np.ndarray):  # tf.cast takes a plain number through float32
        return tf.constant(check_weight((weight,), of="this micro-batch")[0], WEIGHT)
    added = tf.reduce_sum(tf.cast(weight, WEIGHT))
    if tf.executing_eagerly():
        check_weight((float(added),), of="this micro-batch")
        return added
    return checked(added)


def checked(weights: tf.Tensor) -> tf.Tensor:
    """The weights, with a check in the graph; `step` turns it into a WeightError."""
    is_good = tf.reduce_all(tf.math.is_finite(weights) & (weights >= 0))
    with tf.control_dependencies([tf.debugging.Assert(is_good, [BAD_WEIGHT])]):
        return tf.identity(weights)


@contextmanager
def telling_bad_weights() -> Iterator[None]:
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        if BAD_WEIGHT in error.message:
            raise WeightError(BAD_WEIGHT) from None
        raise


def check_gradients(gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """Refuses gradients that are not the variables', before any is added."""
    if len(gradients) != len(variables):
        raise OptionError(
            f"add() got {len(gradients)} gradients for {len(variables)} variables: "
            "pass tape.gradient(loss, model.trainable_variables)"
        )
    for k, (g, v) in enumerate(zip(gradients, variables, strict=True)):
        if g is not None and not g.shape.is_compatible_with(v.shape):
            raise GradientError(
                f"gradient {k} has the shape {g.shape} but its variable {v.shape}: "
                "pass tape.gradient(loss, model.trainable_variables)"
            )


def batch_norms(model: Any) -> list[str]:
    """The names of the BatchNormalization layers that normalise by what they are fed."""
    return [layer.name for layer in layers_of(model) if is_batch_norm(layer) and layer.trainable]


def layers_of(model: Any) -> list[Any]:
    """All layers, those inside of others too."""
    return list(model._flatten_layers()) if hasattr(model, "_flatten_layers") else []


def is_batch_norm(layer: Any) -> bool:
    return any(cls.__name__ == "BatchNormalization" for cls in type(layer).__mro__)


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
