"""Batches of TensorFlow: how they are counted, cut, and stood in for."""

from typing import Any

import tensorflow as tf
from keras import tree

from ...core.errors import BatchError

OTHER_ROWS = (
    "an array of x, y or sample_weight has another number of samples than the first of x: all arrays of a batch share "
    "their leading axis"
)


def as_tensor(leaf: Any) -> Any:
    """What a graph can cut; None stays None."""
    is_ready = leaf is None or isinstance(leaf, tf.Tensor | tf.RaggedTensor | tf.SparseTensor)
    return leaf if is_ready else tf.convert_to_tensor(leaf)


def without_optional(leaf: Any) -> Any:
    """Keras's datasets have an empty Optional where there is None."""
    return None if isinstance(leaf, tf.experimental.Optional) else leaf


def num_samples(x: Any) -> Any:
    """How many samples a batch has: a number where the graph knows it, else a tensor."""
    leaf = next((leaf for leaf in tree.flatten(x) if leaf is not None), None)
    if leaf is None or leaf.shape.rank == 0:
        raise BatchError("x has no batch axis to cut along: give fit arrays of samples")
    if leaf.shape[0] is not None:
        return leaf.shape[0]
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int32)
    return tf.cast(leaf.dense_shape[0], tf.int32) if isinstance(leaf, tf.SparseTensor) else tf.shape(leaf)[0]


def with_rows(batch: Any, size: Any) -> Any:
    """The batch; where sizes are known only when the graph runs, it checks them then (XLA leaves that out)."""

    def leaf(value: Any) -> Any:
        is_plain = isinstance(value, tf.Tensor) and value.shape.rank
        if not is_plain or (isinstance(size, int) and value.shape[0] is not None):
            return value
        with tf.control_dependencies([tf.debugging.Assert(tf.equal(tf.shape(value)[0], size), [OTHER_ROWS])]):
            return tf.identity(value)

    return tree.map_structure(leaf, batch)


def cut(batch: Any, start: Any, num: Any) -> Any:
    """The micro-batch of `num` samples from `start` on; what has no axes goes to every micro-batch."""

    def leaf(value: Any) -> Any:
        if value is None or value.shape.rank == 0:
            return value
        if isinstance(value, tf.RaggedTensor):
            return value[start : start + num]
        zeros = [0] * (value.shape.rank - 1)
        if isinstance(value, tf.SparseTensor):
            begin = tf.cast(tf.stack([start, *zeros]), tf.int64)
            return tf.sparse.slice(value, begin, tf.concat([[tf.cast(num, tf.int64)], value.dense_shape[1:]], 0))
        shape = [tf.shape(value)[i] if n is None else n for i, n in enumerate(value.shape)]  # XLA takes no -1 here
        return tf.slice(value, [start, *zeros], [num, *shape[1:]])

    return tree.map_structure(leaf, batch)


def spec(leaf: Any) -> Any:
    """The type of a batch of any size."""
    if leaf is None:
        return None
    kind = tf.type_spec_from_value(leaf)
    shape = leaf.shape if leaf.shape.rank == 0 else (None, *leaf.shape[1:])
    if isinstance(leaf, tf.RaggedTensor):
        return tf.RaggedTensorSpec(shape, kind.dtype, kind.ragged_rank, kind.row_splits_dtype)
    return type(kind)(shape, kind.dtype)


def placeholder(kind: Any) -> Any:
    """A tensor of this type in a graph that never runs."""
    v1 = tf.compat.v1
    if isinstance(kind, tf.RaggedTensorSpec):
        return v1.ragged.placeholder(kind.dtype, kind.ragged_rank, kind.shape[kind.ragged_rank + 1 :])
    if isinstance(kind, tf.SparseTensorSpec):
        return v1.sparse.placeholder(kind.dtype, kind.shape)
    return None if kind is None else v1.placeholder(kind.dtype, kind.shape)
