"""How many micro-batches may be under way at one time."""

import math

import tensorflow as tf

LITTLE = 32 * 2**20
"""Bytes that nobody cuts a batch for."""
MOST = 8


def num_side_by_side(graph: tf.Graph, micro_batch_size: int) -> int:
    """One, unless micro-batches are so small that their memory does not matter: then several keep all cores busy.

    Only where it cannot matter which of them is first: what is random in TF1's way or updates a variable (a seed,
    BatchNormalization) has an order.
    """
    operations = graph.get_operations()
    if any(op.op_def.is_stateful and op.type != "ReadVariableOp" for op in operations):
        return 1
    found = sum(num_bytes(tensor, micro_batch_size) for op in operations for tensor in op.outputs)
    return max(1, min(MOST, int(LITTLE // max(found, 1))))


def num_bytes(tensor: tf.Tensor, micro_batch_size: int) -> float:
    """What a tensor of the graph takes, with the one size that is not known taken for that of the micro-batch."""
    if tensor.dtype == tf.resource:
        return 0
    sizes = tensor.shape.as_list() if tensor.shape.rank is not None else [None, None]
    if tensor.dtype == tf.variant or sizes.count(None) > 1:
        return math.inf
    return tensor.dtype.size * math.prod(micro_batch_size if size is None else size for size in sizes)
