"""The micro-batches of a batch, one after the other: `add(k, micro_batch, carry)` for each of them."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from . import batch as nest

Add = Callable[[Any, list[Any], Any], Any]
"""(number, micro-batch, carry) -> carry"""


def plain(add: Add, carry: Any, tensors: Sequence[Any], micro_batch_size: int, at_once: int) -> Any:
    """In TensorFlow's own loop, where every micro-batch may have another size."""
    num = -(-num_samples(tensors) // micro_batch_size)

    def body(k: tf.Tensor, carry: Any) -> tuple[tf.Tensor, Any]:
        return k + 1, add(k, [nest.numbered(t, k, micro_batch_size) for t in tensors], carry)

    return tf.while_loop(lambda k, _: k < num, body, (tf.constant(0), carry), parallel_iterations=at_once)[1]


def for_xla(add: Add, start: Callable[[], Any], tensors: Sequence[tf.Tensor], micro_batch_size: int) -> Any:
    """As XLA wants it: all micro-batches of the compiled loop have one size, and what is left over follows.

    XLA compiles this once for each size of the batch, so to it all sizes here are constants. It compiles both sides of
    a condition, so TensorFlow decides what is run: a loss may not know what to do with a micro-batch of none.
    """

    def full() -> Any:
        num_full = num_samples(tensors) // micro_batch_size
        return tf.while_loop(lambda k, _: k < num_full, body, (tf.constant(0), start()), parallel_iterations=1)[1]

    def body(k: tf.Tensor, carry: Any) -> tuple[tf.Tensor, Any]:
        return k + 1, add(k, [rows(t, k * micro_batch_size, micro_batch_size) for t in tensors], carry)

    num = num_samples(tensors)
    rest = num % micro_batch_size
    done = tf.cond(num >= micro_batch_size, tf.function(full, jit_compile=True, autograph=False), start)
    return tf.cond(
        rest > 0,
        lambda: add(num // micro_batch_size, [rows(t, num - rest, rest) for t in tensors], done),
        lambda: done,
    )


def is_good_for_xla(graph: tf.Graph) -> bool:
    """Whether XLA should run the loop and not just what is in it.

    A compiled micro-step costs a launch each time. But on a CPU, XLA runs convolutions many times slower inside a loop
    than outside (TensorFlow 2.21).
    """
    if tf.config.list_logical_devices("GPU"):
        return True
    found = graph.as_graph_def()
    functions = [function.node_def for function in found.library.function]
    return not any("Conv" in node.op for nodes in (found.node, *functions) for node in nodes)


def rows(tensor: tf.Tensor, start: tf.Tensor, num: tf.Tensor) -> tf.Tensor:
    """As many rows from there on; XLA takes no -1 for all others."""
    if tensor.shape.rank == 0:
        return tensor
    sizes = [tf.shape(tensor)[i] if n is None else n for i, n in enumerate(tensor.shape)]
    return tf.slice(tensor, [start, *[0] * (tensor.shape.rank - 1)], [num, *sizes[1:]])


def num_samples(tensors: Sequence[Any]) -> tf.Tensor:
    return next(nest.size(t) for t in tensors if t.shape.rank != 0)
