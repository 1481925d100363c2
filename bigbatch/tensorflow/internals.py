"""The private APIs of TensorFlow 2.21 and Keras 3.15 that are used here."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.core.ag_ctx import ControlStatusCtx, Status
from tensorflow.python.autograph.core.converter import ConversionOptions
from tensorflow.python.autograph.impl.api import converted_call
from tensorflow.python.distribute import distribute_lib
from tensorflow.python.eager import record
from tensorflow.python.eager.polymorphic_function import function_context
from tensorflow.python.framework import ops
from tensorflow.python.ops import control_flow_util


def converted(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a user's function. In a graph AutoGraph converts it, as in tf.function: `if` and `for` take tensors."""
    if tf.executing_eagerly():
        return function(*args)
    options = ConversionOptions(recursive=True, optional_features=None, user_requested=True)
    with ControlStatusCtx(Status.ENABLED, options):
        return converted_call(function, args, {}, options=options)


def is_for_xla() -> bool:
    """Whether XLA will compile what is being traced. It drops tf.print and tf.debugging.Assert."""
    return bool(control_flow_util.GraphOrParentsInXlaContext(ops.get_default_graph()))


def current_graph() -> Any:
    """The graph that is being traced; None in eager code."""
    return None if tf.executing_eagerly() else ops.get_default_graph()


def layers_of(model: Any) -> list[Any]:
    """All layers of a Keras model, or of several, including nested ones (Keras 3.15)."""
    models = getattr(model, "models", [model])
    return [layer for each in models if hasattr(each, "_flatten_layers") for layer in each._flatten_layers()]


@contextmanager
def without_reduction(optimizer: Any) -> Iterator[None]:
    """Inside, an optimizer of Keras 3 does not add gradients up over replicas. There is no public switch (Keras 3.15).

    Only this object's method is replaced, and only while a step is traced. Replica threads may enter this together.
    """
    optimizer._all_reduce_sum_gradients = list
    try:
        yield
    finally:
        vars(optimizer).pop("_all_reduce_sum_gradients", None)


def is_recording() -> bool:
    """Whether a GradientTape is open on this thread."""
    return bool(record.could_possibly_record())


@contextmanager
def outside_of_scopes() -> Iterator[None]:
    """Inside, no strategy is in scope."""
    distribute_lib._push_per_thread_mode(distribute_lib._get_default_replica_mode())
    try:
        yield
    finally:
        distribute_lib._pop_per_thread_mode()


def replace_num_replicas(answer: Callable[[int], int]) -> None:
    """From now on `num_replicas_in_sync` of every strategy is `answer(real number)`.

    TensorFlow's own reductions and variables do not read this property.
    """
    strategy = distribute_lib.StrategyBase
    plain = strategy.num_replicas_in_sync.fget
    strategy.num_replicas_in_sync = property(
        lambda self: answer(plain(self)), doc=strategy.num_replicas_in_sync.__doc__
    )


def replace_public(package: str, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wraps a public function everywhere programs look it up: `tf.nn.relu`, `tf.compat.v2.nn.relu`."""
    wrapped = make(getattr(getattr(tf, package), name))
    for module in (getattr(tf, package), getattr(tf.compat.v2, package)):
        setattr(module, name, wrapped)


def trace_apart(label: Callable[[], str]) -> None:
    """From now on a tf.function is traced once for each value of `label()`."""
    plain = function_context.make_function_context

    def make_function_context(scope_type: Any = None) -> Any:
        context = plain(scope_type)
        return context._replace(scope_type=(context.scope_type, label())) if label() else context

    function_context.make_function_context = make_function_context
