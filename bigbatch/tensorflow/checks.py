"""Checks of models, losses and gradients before anything is changed."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from ..core import labels as core_labels
from ..core.errors import GradientError, LossError, OptionError, OrderError, WeightError
from ..core.weight import Terms, check_terms, is_number
from .auxiliary import OTHER_ROWS
from .gradients import wide_dtype
from .weight import BAD_WEIGHT, WEIGHT

_BAD_LOSS = "the loss is not a scalar: return the mean, for example tf.reduce_mean(loss)"
_REMEDY = "pass tape.gradient(loss, model.trainable_variables)"


def check_model(model: Any) -> None:
    if hasattr(model, "apply_gradients"):
        raise OptionError(
            f"model is a {type(model).__name__}, an optimizer: the model comes first, Accumulator(model, optimizer, …)"
        )
    if not hasattr(model, "trainable_variables"):
        raise OptionError(
            f"the model is a {type(model).__name__}, which has no trainable_variables: pass a model of Keras, or a "
            "tf.Module"
        )


def check_trainable(model: Any, *, is_called: bool) -> None:
    """Raises an error if no variable is trainable."""
    if model.trainable_variables:
        return
    num = len(model.variables)
    if not num and not is_called:
        raise OrderError("the model has no variables yet: call it on a batch once, then make the accumulator")
    raise OptionError(f"of the model's {num} variables 0 are trainable: set trainable = True where it is to learn")


def warn_of_uncounted_labels(batch: Any) -> None:
    """Warns if labels of the batch are ignored although no weight counts them. Waits for the device."""
    found = core_labels.may_be_uncounted(batch)
    is_array = isinstance(found, np.ndarray) or (isinstance(found, tf.Tensor) and found.dtype.is_integer)
    if is_array and np.any(np.asarray(found) == core_labels.IGNORED):
        core_labels.warn_of_uncounted("bigbatch.tensorflow")


def name_of(variable: Any) -> str:
    return str(getattr(variable, "path", None) or variable.name)


def check_loss(terms: Terms, num_weights: int) -> Terms:
    """The terms, as scalars; raises LossError unless each is a scalar tensor of floats."""
    check_terms(len(terms), num_weights)
    for term in terms:
        if not isinstance(term, tf.Tensor | tf.Variable) or not term.dtype.is_floating:
            raise LossError(
                f"the loss is a {type(term).__name__}: return a scalar tensor of floats, or a tuple of them"
            )
        if term.shape.rank not in (None, 0):
            raise LossError(f"the loss has the shape {term.shape}: return the mean, for example tf.reduce_mean(loss)")
    return tuple(term if term.shape.rank == 0 else _scalar(term) for term in terms)


def _scalar(term: tf.Tensor) -> tf.Tensor:
    """A term whose shape is known only when the graph runs, such as the result of a tf.py_function."""
    with tf.control_dependencies([tf.debugging.Assert(tf.equal(tf.rank(term), 0), [_BAD_LOSS])]):
        term = tf.identity(term)  # so that the gradient of the reshape waits for the check, too
    return tf.reshape(term, [])


def as_loss(loss: Any) -> tf.Tensor:
    """The loss that a user passed to `add`, as a scalar."""
    if not (is_number(loss) or (hasattr(loss, "dtype") and tf.as_dtype(loss.dtype).is_floating)):
        raise LossError(f"the loss is a {type(loss).__name__}: pass the micro-batch's mean loss, a scalar")
    if hasattr(loss, "shape") and loss.shape == (0,):  # Keras's mean over nothing
        return tf.constant(np.nan, WEIGHT)
    if hasattr(loss, "shape") and tf.TensorShape(loss.shape).rank not in (None, 0):
        raise LossError(f"the loss has the shape {loss.shape}: pass the micro-batch's mean loss, a scalar")
    return tf.reshape(tf.cast(loss, WEIGHT), [])


@contextmanager
def explained() -> Iterator[None]:
    """Replaces TensorFlow's errors from our graphs with clear ones."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        for message, error_class in ((BAD_WEIGHT, WeightError), (_BAD_LOSS, LossError), (OTHER_ROWS, OptionError)):
            if message in error.message:
                raise error_class(message) from None
        raise
    except RuntimeError as error:
        if "merge_call" in str(error):
            raise LossError(
                "the model or the loss waits for the other replicas in each micro-batch, which is not possible in a "
                "loop, probably by assigning to a variable that has an aggregation: make that variable with "
                "synchronization=tf.VariableSynchronization.ON_READ"
            ) from error
        raise


def check_gradients(gradients: Any, variables: Sequence[Any]) -> None:
    """Raises an error unless each gradient fits its variable."""
    if not isinstance(gradients, Sequence):
        raise OptionError(f"add() got a {type(gradients).__name__}: {_REMEDY}")
    if len(gradients) != len(variables):
        raise OptionError(f"add() got {len(gradients)} gradients for {len(variables)} variables: {_REMEDY}")
    for k, (g, v) in enumerate(zip(gradients, variables, strict=True)):
        if g is None:
            continue
        if not isinstance(g, tf.Tensor | tf.IndexedSlices) or wide_dtype(g.dtype) != wide_dtype(v.dtype):
            dtype = f"of {getattr(g.dtype, 'name', g.dtype)} " if hasattr(g, "dtype") else ""
            wanted = tf.as_dtype(v.dtype).name
            raise GradientError(
                f"gradient {k} is a {type(g).__name__} {dtype}but its variable is of {wanted}: {_REMEDY}"
            )
        shape = g.shape
        if isinstance(g, tf.IndexedSlices) and g.values.shape.rank:
            shape = tf.TensorShape([shape[0] if shape.rank else None, *g.values.shape[1:]])
        if not shape.is_compatible_with(v.shape):
            raise GradientError(f"gradient {k} has the shape {shape} but its variable {v.shape}: {_REMEDY}")
