"""A batch is any nest of tensors: what its size is and how it is cut, in a graph as well as outside of one."""

import enum
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ..core.errors import BatchError

Leaf = Any  # tf.Tensor, tf.RaggedTensor or tf.SparseTensor
PLAIN = (str, bytes, bool, int, float, complex, type(None), np.generic, tf.DType)
NAMED = (type, types.FunctionType, types.BuiltinFunctionType, enum.Enum)


class Layout:
    """How a batch is nested, apart from its tensors: what is no tensor goes to every micro-batch as it is."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch
        self.leaves = [as_leaf(item) for item in tf.nest.flatten(batch)]
        self.places = [k for k, leaf in enumerate(self.leaves) if is_tensor(leaf)]
        self.others: list[Layout] = []
        """Those of the batch's parts on other replicas, where they came in parts."""

    @property
    def tensors(self) -> list[Leaf]:
        return [self.leaves[k] for k in self.places]

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for batches that one compiled function can take, if it takes tensors of all their shapes."""
        return structure(self.batch), *map(kind, self.leaves)

    @property
    def shapes(self) -> tuple[Any, ...]:
        """The shapes of the tensors, without the batch axis."""
        return tuple(shape_of_row(self.leaves[k]) for k in self.places), *(other.shapes for other in self.others)

    @property
    def is_lasting(self) -> bool:
        """Whether equal keys mean equal batches; an object of a class of the user's may change between two calls."""
        return all(is_tensor(leaf) or isinstance(leaf, PLAIN + NAMED) for leaf in self.leaves)

    def pack(self, tensors: Sequence[Leaf]) -> Any:
        """The batch with other tensors in place of its own."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        return tf.nest.pack_sequence_as(self.batch, leaves)

    def names(self) -> list[str]:
        return [f"tensor {k}" for k in self.places]


def structure(batch: Any) -> Any:
    """How a batch is nested, to be compared."""
    if isinstance(batch, tuple | list):
        return type(batch), *map(structure, batch)
    if isinstance(batch, dict):
        return type(batch), *((name, structure(part)) for name, part in batch.items())
    if isinstance(batch, tf.Tensor) or not tf.nest.is_nested(batch):
        return None
    return repr(tf.nest.map_structure(lambda _: 0, batch))


def kind(leaf: Any) -> Any:
    """What of a leaf is the same for batches of any size and shape."""
    if isinstance(leaf, tf.Tensor):
        return leaf.dtype, leaf.shape.rank
    if isinstance(leaf, tf.RaggedTensor):
        return tf.RaggedTensor, leaf.dtype, leaf.shape.rank, leaf.ragged_rank, leaf.row_splits.dtype
    if isinstance(leaf, tf.SparseTensor):
        return tf.SparseTensor, leaf.dtype, leaf.shape.rank
    return leaf if isinstance(leaf, NAMED) else (type(leaf), repr(leaf))  # 1, 1.0 and True are equal


def shape_of_row(leaf: Leaf) -> tuple[int | None, ...]:
    return () if leaf.shape.rank == 0 else tuple(leaf.shape[1:])


def as_leaf(item: Any) -> Any:
    if not isinstance(item, np.ndarray | tf.Variable):
        return item
    try:
        return tf.convert_to_tensor(item)
    except ValueError as error:  # an array of objects
        raise BatchError(
            f"an array of the batch has {len(item)} entries of the dtype {item.dtype}, of which TensorFlow makes no "
            "tensor: pass numbers or strings, or a list to have it go whole to every micro-batch"
        ) from error


def is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor | tf.RaggedTensor | tf.SparseTensor)


def any_size(leaf: Leaf) -> tf.TypeSpec:
    shape = leaf.shape if leaf.shape.rank == 0 else tf.TensorShape([None, *leaf.shape[1:]])
    if isinstance(leaf, tf.RaggedTensor):
        return tf.RaggedTensorSpec(shape, leaf.dtype, leaf.ragged_rank, leaf.row_splits.dtype)
    if isinstance(leaf, tf.SparseTensor):
        return tf.SparseTensorSpec(shape, leaf.dtype)
    return tf.TensorSpec(shape, leaf.dtype)


def size(leaf: Leaf) -> Any:
    """The size of the leading axis: a number where it is known, else a tensor."""
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.nrows(out_type=tf.int32)
    if isinstance(leaf, tf.SparseTensor):
        return tf.cast(leaf.dense_shape[0], tf.int32)
    return tf.shape(leaf)[0]


def size_at_hand(leaf: Leaf) -> int:
    """The same for a tensor that is at hand, without asking the device."""
    static = None if isinstance(leaf, tf.SparseTensor) else leaf.shape[0]
    return int(size(leaf)) if static is None else int(static)


def batch_size(layout: Layout) -> int:
    """The size that all tensors share, of a batch that is at hand."""
    sizes = {size_at_hand(leaf) for leaf in layout.tensors if leaf.shape.rank}
    if len(sizes) == 1:
        return sizes.pop()
    named = [
        (name, size_at_hand(leaf)) for name, leaf in zip(layout.names(), layout.tensors, strict=True) if leaf.shape.rank
    ]
    if not named:
        raise BatchError(
            f"the batch has no tensor with a batch axis ({type(layout.batch).__name__}): "
            "pass a tensor or a nest of tensors"
        )
    first, number = named[0]
    for name, other in named:
        if other != number:
            raise BatchError(
                f"{first} has {number} samples but {name} has {other}: all tensors of a batch share their leading "
                "axis; what belongs to no sample goes into the loss by other ways"
            )
    return number


def numbered(leaf: Leaf, number: tf.Tensor, part_size: int) -> Leaf:
    """The part of this number, where all have this size and the last takes what is left."""
    if leaf.shape.rank == 0:
        return leaf
    if isinstance(leaf, tf.RaggedTensor | tf.SparseTensor):
        start = number * part_size
        return part(leaf, start, tf.minimum(start + part_size, size(leaf)))
    start = number * tf.constant([part_size])  # as a slice takes it: leaf[start:stop] would pack every bound anew
    return tf.strided_slice(leaf, start, start + part_size, [1])


def part(leaf: Leaf, start: Any, stop: Any) -> Leaf:
    """Rows start to stop."""
    if leaf.shape.rank == 0:
        return leaf
    if isinstance(leaf, tf.SparseTensor):
        begin = tf.concat([[tf.cast(start, tf.int64)], tf.zeros([leaf.shape.rank - 1], tf.int64)], 0)
        shape = tf.concat([[tf.cast(stop - start, tf.int64)], leaf.dense_shape[1:]], 0)
        return tf.sparse.slice(leaf, begin, shape)
    return leaf[start:stop]
