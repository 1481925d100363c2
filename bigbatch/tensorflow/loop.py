"""The loop over the micro-batches of a batch, in one graph."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from . import gradients
from .backward import Backward, Beside
from .batch import num_micro_batches, num_samples, slice_rows_for_xla, take_micro_batch
from .distributed import replicas
from .sums import BatchGradient, LoopSums, is_kept_sparse
from .weight import WEIGHT

_MAX_PARALLEL_BYTES = 32 * 2**20
"""Memory that micro-batches running in parallel may use together."""
_MAX_PARALLEL = 8

_Body = Callable[[Any, list[Any], Any], Any]
"""(number, micro-batch, state) -> state"""


def accumulate(backward: Backward, tensors: Sequence[Any], micro_batch_size: int) -> BatchGradient:
    """On a replica: the gradient of the whole batch.

        for micro_batch in batch:                              # tf.while_loop
            weights += weight(micro_batch)
        for micro_batch in batch:                              # tf.while_loop
            sums += gradient of weight / total * loss(micro_batch)
        sums = all_reduce(sums)                                # once, if there are several replicas

    `tensors` are those of this replica's part of the batch.
    """
    num = num_micro_batches(tensors, micro_batch_size)
    weights = _weigh(backward, tensors, micro_batch_size, num)
    own_total = tf.reduce_sum(weights, 0)
    traced = backward.traced(tensors, num_terms=weights.shape[1])
    # Until the total is known, each replica divides by its own total. It must be known before if the loss asks for its
    # share of the batch, or has several terms: their totals differ, and the sums mix them. Otherwise the total is
    # reduced with the gradients: one reduction fewer.
    is_total_first = weights.shape[1] > 1 or backward.is_share_used  # known now that it is traced
    reference = own_total
    if is_total_first and replicas.is_shared():
        reference = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, own_total)
    shares = backward.shares(weights, reference)
    sums, losses, beside = _run(backward, traced, tensors, micro_batch_size, num, shares, weights)
    backward.batch_norms.update(beside.moments)
    if not replicas.is_shared():
        return BatchGradient(sums, losses, own_total, num, _aux(backward, beside.aux, own_total))
    is_divided_later = not is_total_first and backward.reduction == "mean"
    if is_divided_later:  # replicas have different references: w / own total becomes w
        sums, losses = gradients.scaled(sums, reference[0]), losses * reference
    sums, (losses, num, total) = replicas.reduce(sums, [losses, tf.cast(num, WEIGHT), own_total])
    if is_divided_later:  # w becomes w / total
        correction = backward.shares(tf.ones_like(total), total)
        sums, losses = gradients.scaled(sums, correction[0]), losses * correction
    total = reference if is_total_first else total
    return BatchGradient(sums, losses, total, tf.cast(num, tf.int32), _aux(backward, beside.aux, total))


def _aux(backward: Backward, sums: list[Any], total: tf.Tensor) -> list[tf.Tensor]:
    """Aux counts by the first term of the loss."""
    return [] if backward.auxiliary is None else backward.auxiliary.finished(sums, total[0])


def _weigh(backward: Backward, tensors: Sequence[Any], micro_batch_size: int, num: Any) -> tf.Tensor:
    """The weights: a row for each micro-batch, with a column for each term."""
    if backward.weight is None:
        sizes = tf.minimum(micro_batch_size, num_samples(tensors) - tf.range(num) * micro_batch_size)
        return tf.cast(sizes, WEIGHT)[:, None]
    num_terms = backward.num_terms(tensors)

    def add(k: tf.Tensor, micro_batch: list[Any], weights: tf.TensorArray) -> tf.TensorArray:
        return weights.write(k, backward.weigh(micro_batch))

    weights = tf.TensorArray(WEIGHT, size=num, element_shape=[num_terms])
    weights = _loop(add, weights, tensors, micro_batch_size, num_parallel=1)
    return tf.reshape(weights.stack(), [-1, num_terms])


def _run(
    backward: Backward,
    traced: Any,
    tensors: Sequence[Any],
    micro_batch_size: int,
    num: Any,
    shares: tf.Tensor,
    weights: tf.Tensor,
) -> tuple[list[Any], tf.Tensor, Beside]:
    """Adds up gradients and losses over all micro-batches, each times its share, and what is beside them."""
    like, variables = traced.structured_outputs[1], backward.variables()
    sums, auxiliary, batch_norms = LoopSums(like, variables, num), backward.auxiliary, backward.batch_norms

    def add(k: tf.Tensor, micro_batch: list[Any], state: Any) -> Any:
        losses, states, beside = state

        def added(backward: Any, share: tf.Tensor) -> tuple[Any, ...]:
            own_losses, grads, own = backward(micro_batch, share)
            aux = [] if auxiliary is None else auxiliary.add(beside.aux, k, own.aux, weights[k, 0])
            return (
                losses + own_losses,
                sums.add(states, k, grads),
                Beside(aux, batch_norms.pool(beside.moments, own.moments)),
            )

        share = tf.gather(shares, k)
        if backward.weight is None:  # no micro-batch is empty
            return added(backward, share)
        num_rows = num_samples(micro_batch)
        return backward.run_or_skip(share, num_rows, added, lambda: (losses, sums.skip(states, k), beside))

    def start() -> tuple[Any, ...]:
        aux = [] if auxiliary is None else auxiliary.start(num)
        return tf.zeros(shares.shape[1:], WEIGHT), sums.start(), Beside(aux, batch_norms.start())

    is_dense = all(isinstance(t, tf.Tensor) for t in tensors) and not any(map(is_kept_sparse, like, variables))
    is_dense &= auxiliary is None or not auxiliary.has_rows
    if backward.jit_compile and is_dense and _is_good_for_xla(traced.graph):
        losses, states, beside = _loop_in_xla(add, start, tensors, micro_batch_size)
    else:
        num_parallel = _num_parallel(traced.graph, micro_batch_size)
        losses, states, beside = _loop(add, start(), tensors, micro_batch_size, num_parallel)
    return sums.finished(states), losses, beside


def _loop(body: _Body, state: Any, tensors: Sequence[Any], micro_batch_size: int, num_parallel: int) -> Any:
    """TensorFlow's own loop; the last micro-batch may be smaller."""
    num = num_micro_batches(tensors, micro_batch_size)

    def step(k: tf.Tensor, state: Any) -> tuple[tf.Tensor, Any]:
        return k + 1, body(k, [take_micro_batch(t, k, micro_batch_size) for t in tensors], state)

    return tf.while_loop(lambda k, _: k < num, step, (tf.constant(0), state), parallel_iterations=num_parallel)[1]


def _loop_in_xla(body: _Body, start: Callable[[], Any], tensors: Sequence[tf.Tensor], micro_batch_size: int) -> Any:
    """A compiled loop over the full micro-batches; the samples that are left follow.

    XLA compiles this for each size of the batch, so all sizes are constants to it. It would compile both sides of a
    condition, so TensorFlow decides what is run: a loss may fail on an empty micro-batch.
    """

    def full() -> Any:
        num_full = num_samples(tensors) // micro_batch_size
        return tf.while_loop(lambda k, _: k < num_full, step, (tf.constant(0), start()), parallel_iterations=1)[1]

    def step(k: tf.Tensor, state: Any) -> tuple[tf.Tensor, Any]:
        return k + 1, body(k, [slice_rows_for_xla(t, k * micro_batch_size, micro_batch_size) for t in tensors], state)

    num = num_samples(tensors)
    num_left = num % micro_batch_size
    done = tf.cond(num >= micro_batch_size, tf.function(full, jit_compile=True, autograph=False), start)
    return tf.cond(
        num_left > 0,
        lambda: body(num // micro_batch_size, [slice_rows_for_xla(t, num - num_left, num_left) for t in tensors], done),
        lambda: done,
    )


def _is_good_for_xla(graph: tf.Graph) -> bool:
    """Whether XLA should compile the whole loop and not just its body.

    A compiled body costs a launch for each micro-batch. But on a CPU, XLA runs convolutions many times slower inside a
    loop than outside (TensorFlow 2.21).
    """
    if tf.config.list_logical_devices("GPU"):
        return True
    graph_def = graph.as_graph_def()
    functions = [function.node_def for function in graph_def.library.function]
    return not any("Conv" in node.op for nodes in (graph_def.node, *functions) for node in nodes)


def _num_parallel(graph: tf.Graph, micro_batch_size: int) -> int:
    """How many micro-batches may run at one time: several keep all cores busy if they need little memory.

    One if their order matters: they draw random numbers in TF1's way, or update a variable (a seed,
    BatchNormalization). With eight, a small MLP takes two thirds of the time on 2 cores.
    """
    operations = graph.get_operations()
    if any(op.op_def.is_stateful and op.type != "ReadVariableOp" for op in operations):
        return 1
    num_bytes = sum(_num_bytes(tensor, micro_batch_size) for op in operations for tensor in op.outputs)
    return max(1, min(_MAX_PARALLEL, int(_MAX_PARALLEL_BYTES // max(num_bytes, 1))))


def _num_bytes(tensor: tf.Tensor, micro_batch_size: int) -> float:
    """The size of a tensor in the graph; its one unknown axis is taken for that of the micro-batch."""
    if tensor.dtype == tf.resource:
        return 0
    sizes = tensor.shape.as_list() if tensor.shape.rank is not None else [None, None]
    if tensor.dtype == tf.variant or sizes.count(None) > 1:
        return math.inf
    return tensor.dtype.size * math.prod(micro_batch_size if size is None else size for size in sizes)
