"""A batch is any nest of tensors: its size, its micro-batches, and what a graph for it depends on."""

import enum
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ..core.batch import shared_size
from ..core.errors import BatchError

_Leaf = Any  # tf.Tensor, tf.RaggedTensor or tf.SparseTensor
_PLAIN = (str, bytes, bool, int, float, complex, type(None), np.generic, tf.DType)
_NAMED = (type, types.FunctionType, types.BuiltinFunctionType, enum.Enum)


class Layout:
    """How a batch is nested. Values that are not tensors are passed whole to every micro-batch.

    Args:
        batch: A nest of tensors.
    """

    def __init__(self, batch: Any) -> None:
        self.batch = batch
        self.leaves = [_as_leaf(item) for item in tf.nest.flatten(batch)]
        self.places = [k for k, leaf in enumerate(self.leaves) if is_tensor(leaf)]
        self.tensors = [self.leaves[k] for k in self.places]
        """The tensors; a part for each replica once the batch is spread."""
        self.others: list[Layout] = []
        """The layouts of the parts on other replicas, if the batch came in parts."""

    @property
    def structure(self) -> tuple[Any, ...]:
        """Equal for batches that differ only in the shapes of their tensors."""
        return _nesting(self.batch), *map(_leaf_type, self.leaves)

    @property
    def shapes(self) -> tuple[Any, ...]:
        """The shapes of the tensors, without the batch axis."""
        shapes = (self.leaves[k].shape for k in self.places)
        return tuple(tuple(shape[1:]) if shape.rank else () for shape in shapes), *(o.shapes for o in self.others)

    @property
    def can_keep_graph(self) -> bool:
        """Whether a graph may be kept: not if the batch holds an object that may have changed by the next call."""
        return all(is_tensor(leaf) or isinstance(leaf, _PLAIN + _NAMED) for leaf in self.leaves)

    def pack(self, tensors: Sequence[_Leaf]) -> Any:
        """The batch with other tensors in place of its own."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        return tf.nest.pack_sequence_as(self.batch, leaves)


def _nesting(batch: Any) -> Any:
    """How a batch is nested, for comparison."""
    if isinstance(batch, tuple | list):
        return type(batch), *map(_nesting, batch)
    if isinstance(batch, dict):
        return type(batch), *((name, _nesting(part)) for name, part in batch.items())
    if isinstance(batch, tf.Tensor) or not tf.nest.is_nested(batch):
        return None
    return repr(tf.nest.map_structure(lambda _: 0, batch))


def _leaf_type(leaf: Any) -> Any:
    """Everything about a leaf that a graph depends on, except its shape."""
    if isinstance(leaf, tf.Tensor):
        return leaf.dtype, leaf.shape.rank
    if isinstance(leaf, tf.RaggedTensor):
        return tf.RaggedTensor, leaf.dtype, leaf.shape.rank, leaf.ragged_rank, leaf.row_splits.dtype
    if isinstance(leaf, tf.SparseTensor):
        return tf.SparseTensor, leaf.dtype, leaf.shape.rank
    return leaf if isinstance(leaf, _NAMED) else (type(leaf), repr(leaf))  # 1, 1.0 and True are equal


def _as_leaf(item: Any) -> Any:
    if not isinstance(item, np.ndarray | tf.Variable):
        return item
    try:
        return tf.convert_to_tensor(item)
    except ValueError as error:  # an array of objects
        raise BatchError(
            f"an array of the batch has {len(item)} entries of the dtype {item.dtype}, which TensorFlow cannot convert "
            "to a tensor: pass numbers or strings, or a list, which every micro-batch gets uncut"
        ) from error


def is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor | tf.RaggedTensor | tf.SparseTensor)


def any_size(leaf: Any) -> tf.TypeSpec:
    """The type of a tensor, or of a tensor per replica, with a leading axis of any size."""
    if isinstance(leaf, tf.distribute.DistributedValues):
        return type(tf.type_spec_from_value(leaf))(*map(any_size, leaf.values))
    shape = leaf.shape if leaf.shape.rank == 0 else tf.TensorShape([None, *leaf.shape[1:]])
    if isinstance(leaf, tf.RaggedTensor):
        return tf.RaggedTensorSpec(shape, leaf.dtype, leaf.ragged_rank, leaf.row_splits.dtype)
    if isinstance(leaf, tf.SparseTensor):
        return tf.SparseTensorSpec(shape, leaf.dtype)
    return tf.TensorSpec(shape, leaf.dtype)


def size(leaf: _Leaf) -> Any:
    """The size of the leading axis."""
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.nrows(out_type=tf.int32)
    if isinstance(leaf, tf.SparseTensor):
        return tf.cast(leaf.dense_shape[0], tf.int32)
    return tf.shape(leaf)[0]


def num_samples(tensors: Sequence[_Leaf]) -> Any:
    """The size of a batch, in a graph."""
    return next(size(t) for t in tensors if t.shape.rank != 0)


def batch_size(layout: Layout) -> int:
    """The size that all tensors of a batch share, which may be 0."""
    leaves = ((k, layout.leaves[k]) for k in layout.places)
    sizes = [(f"tensor {k}", _known_size(leaf)) for k, leaf in leaves if leaf.shape.rank]
    if sizes and not any(num for _, num in sizes):
        return 0
    return shared_size(sizes, layout.batch, "; pass other values to the loss in another way")


def _known_size(leaf: _Leaf) -> int:
    """The size of the leading axis, if possible without asking the device."""
    static = None if isinstance(leaf, tf.SparseTensor) else leaf.shape[0]
    return int(size(leaf)) if static is None else int(static)


def num_micro_batches(tensors: Sequence[_Leaf], micro_batch_size: int) -> Any:
    """How many micro-batches a batch is cut into, in a graph."""
    return -(-num_samples(tensors) // micro_batch_size)


def take_micro_batch(leaf: _Leaf, number: tf.Tensor, micro_batch_size: int) -> _Leaf:
    """The micro-batch of this number; the last one may be smaller."""
    if leaf.shape.rank == 0:
        return leaf
    if isinstance(leaf, tf.RaggedTensor | tf.SparseTensor):
        start = number * micro_batch_size
        return slice_rows(leaf, start, tf.minimum(start + micro_batch_size, size(leaf)))
    start = number * tf.constant([micro_batch_size])  # leaf[start:stop] would pack its bounds in every pass
    return tf.strided_slice(leaf, start, start + micro_batch_size, [1])


def slice_rows(leaf: _Leaf, start: Any, stop: Any) -> _Leaf:
    if leaf.shape.rank == 0:
        return leaf
    if isinstance(leaf, tf.SparseTensor):
        begin = tf.concat([[tf.cast(start, tf.int64)], tf.zeros([leaf.shape.rank - 1], tf.int64)], 0)
        shape = tf.concat([[tf.cast(stop - start, tf.int64)], leaf.dense_shape[1:]], 0)
        return tf.sparse.slice(leaf, begin, shape)
    return leaf[start:stop]


def slice_rows_for_xla(tensor: tf.Tensor, start: tf.Tensor, num: tf.Tensor) -> tf.Tensor:
    """`num` rows from `start` on. XLA does not take -1 for all entries of an axis."""
    if tensor.shape.rank == 0:
        return tensor
    sizes = [tf.shape(tensor)[i] if n is None else n for i, n in enumerate(tensor.shape)]
    return tf.slice(tensor, [start, *[0] * (tensor.shape.rank - 1)], [num, *sizes[1:]])
