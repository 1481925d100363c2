"""The aux of a loss (`has_aux=True`): combines that of the micro-batches into that of the batch."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from ..core import auxiliary
from ..core.auxiliary import Kind, Path, Way
from ..core.errors import OptionError
from ..core.loss_result import split
from ..core.weight import from_terms, is_number, share
from .distributed import replicas
from .gradients import wide_dtype
from .weight import WEIGHT, where

OTHER_ROWS = (
    "an axis of aux whose size is not known before the graph runs is not that of the samples: have the samples along "
    "the leading axis, or pass the way to combine it as aux"
)


class _Leaf(NamedTuple):
    """A leaf of aux that is combined."""

    path: Path
    way: Way
    kind: Kind
    dtype: tf.DType
    spec: tf.TensorSpec
    """What is added up or concatenated for it: sums in float64, which replicas reduce in one call, or rows."""

    @property
    def is_row(self) -> bool:
        """Whether it is concatenated. The values that a function gets are rows of a micro-batch each."""
        return callable(self.way) or self.way == "concatenate"

    def number(self, whole: float) -> float | int:
        """The sum or mean of a scalar as a number."""
        return whole if self.kind.numbers == "float" or self.way == "mean" else int(whole)

    @property
    def wide_dtype(self) -> tf.DType:
        """Of its sum or mean, if that is a tensor: at least float32, or int64."""
        if self.kind.numbers == "float":
            return wide_dtype(self.dtype)
        return tf.int64 if self.way == "sum" else WEIGHT


class Auxiliary:
    """Combines the aux of micro-batches, in the loop of one graph or over a window.

        for number, micro_batch in enumerate(batch):                # tf.while_loop
            value, aux = loss(model, micro_batch)
            sums = auxiliary.add(sums, number, auxiliary.leaves(aux, num_samples), weight)
        leaves = auxiliary.finished(sums, total)

    stands for

        aux["accuracy"] = sum(w * a["accuracy"] for w, a in zip(weights, all_aux)) / total     # "mean"
        aux["correct"] = sum(a["correct"] for a in all_aux)                                    # "sum"
        aux["logits"] = tf.concat([a["logits"] for a in all_aux], 0)                           # "concatenate"

    Args:
        words: The option `aux`.
    """

    def __init__(self, words: Any) -> None:
        self._words = words
        self._like: Any = None
        self._leaves: list[_Leaf] = []
        """Known once a micro-batch was traced. One more holds the weights, if a function needs them."""

    @property
    def has_rows(self) -> bool:
        """Whether anything is concatenated."""
        return any(leaf.is_row for leaf in self._leaves)

    def leaves(self, aux: Any, num_samples: Any) -> list[tf.Tensor]:
        """The leaves of one micro-batch's aux that are combined; raises OptionError if one cannot be.

        Args:
            aux: What the loss returned beside its value.
            num_samples: How many samples the micro-batch has, as a tensor.
        """
        words = auxiliary.words_for(self._words, aux)
        self._like, self._leaves, tensors = aux, [], []
        for path, value in auxiliary.flattened(aux).items():
            tensor, word = _as_tensor(value), words[path]
            kind = _kind_of(tensor)
            is_unknown = word == "auto" and bool(kind.shape) and kind.shape[0] is None
            way = auxiliary.way_of(path, kind, "concatenate" if is_unknown else word, tf.get_static_value(num_samples))
            if way == "keep":
                continue
            if is_unknown:
                tensor = _with_rows(tensor, num_samples)
            elif callable(way):
                tensor = tensor[None]
            self._leaves.append(_Leaf(path, way, kind, tensor.dtype, _spec(path, tensor, way)))
            tensors.append(tensor)
        if any(callable(leaf.way) for leaf in self._leaves):
            rows = tf.TensorSpec([None], WEIGHT)
            self._leaves.append(_Leaf((), "concatenate", Kind((None,), "float", "weights"), WEIGHT, rows))
        self._like = auxiliary.rebuilt(aux, dict.fromkeys(auxiliary.flattened(aux)))
        return tensors

    def counted(self, tensors: Sequence[tf.Tensor], weight: tf.Tensor) -> list[tf.Tensor]:
        """What a micro-batch adds: rows as they are, and means times its weight; 0 if that is 0, even for NaN."""

        def counted(leaf: _Leaf, tensor: tf.Tensor) -> tf.Tensor:
            wide = tf.cast(tensor, leaf.spec.dtype)
            return tf.math.multiply_no_nan(wide, weight) if leaf.way == "mean" else wide

        weights = [weight[None]] if len(self._leaves) > len(tensors) else []
        return [counted(*each) for each in zip(self._leaves, [*tensors, *weights], strict=True)]

    def nothing(self) -> list[tf.Tensor]:
        """What a replica without samples adds."""
        return [tf.zeros([size or 0 for size in leaf.spec.shape], leaf.spec.dtype) for leaf in self._leaves]

    # --- in the loop of one graph ------------------------------------------------------------------------

    def start(self, num_micro_batches: Any) -> list[Any]:
        """The sums before the first micro-batch."""

        def start(spec: tf.TensorSpec, is_row: bool) -> Any:
            if is_row:
                return tf.TensorArray(spec.dtype, num_micro_batches, infer_shape=False, element_shape=spec.shape)
            return tf.zeros(spec.shape, spec.dtype)

        return [start(leaf.spec, leaf.is_row) for leaf in self._leaves]

    def add(self, sums: Sequence[Any], number: tf.Tensor, tensors: Sequence[tf.Tensor], weight: tf.Tensor) -> list[Any]:
        """The sums with this micro-batch."""
        each = zip(self._leaves, sums, self.counted(tensors, weight), strict=True)
        return [one.write(number, own) if leaf.is_row else one + own for leaf, one, own in each]

    def finished(self, sums: Sequence[Any], total: tf.Tensor) -> list[tf.Tensor]:
        """On a replica: means and sums over all replicas, and the rows of this one."""
        added = [one for leaf, one in zip(self._leaves, sums, strict=True) if not leaf.is_row]
        if replicas.is_shared() and added:
            added = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, added)
        left = iter(added)
        whole = [one.concat() if leaf.is_row else next(left) for leaf, one in zip(self._leaves, sums, strict=True)]
        return self._divided(whole, total)

    def of_replicas(self, strategy: tf.distribute.Strategy, tensors: Sequence[Any]) -> list[tf.Tensor]:
        """Across replicas: the rows of all replicas of this process, in order; sums are the same on all."""
        local = [strategy.experimental_local_results(tensor) for tensor in tensors]
        pairs = zip(self._leaves, local, strict=True)
        return [tf.concat(parts, 0) if leaf.is_row and len(parts) > 1 else parts[0] for leaf, parts in pairs]

    # --- in eager code -----------------------------------------------------------------------------------

    def over_window(self, strategy: tf.distribute.Strategy, added: Sequence[Any], total: tf.Tensor) -> list[tf.Tensor]:
        """Across replicas: the leaves for a window, from what each micro-batch added on each replica."""

        def whole(leaf: _Leaf, parts: Sequence[Any]) -> tf.Tensor:
            if not leaf.is_row:
                return replicas.added(strategy, parts)
            return tf.concat([row for part in parts for row in strategy.experimental_local_results(part)], 0)

        return self._divided([whole(*each) for each in zip(self._leaves, zip(*added, strict=True), strict=True)], total)

    def rebuilt(self, tensors: Sequence[tf.Tensor]) -> Any:
        """The aux of the whole batch. Its scalars are Python's numbers."""
        found: dict[Path, Any] = dict.fromkeys(auxiliary.flattened(self._like))
        for leaf, tensor in zip(self._leaves, tensors, strict=True):
            if callable(leaf.way):
                found[leaf.path] = leaf.way(tf.unstack(tensor), tensors[-1].numpy().tolist())
            elif leaf.way == "concatenate":
                found[leaf.path] = tensor
            else:
                found[leaf.path] = tf.cast(tensor, leaf.wide_dtype) if leaf.kind.shape else leaf.number(float(tensor))
        return auxiliary.rebuilt(self._like, found)

    def summed(self) -> tuple[str, ...]:
        """The names of the metrics that add up."""
        return auxiliary.summed(
            {leaf.path: leaf.way for leaf in self._leaves}, {leaf.path: leaf.kind for leaf in self._leaves}
        )

    def _divided(self, sums: Sequence[tf.Tensor], total: tf.Tensor) -> list[tf.Tensor]:
        pairs = zip(self._leaves, sums, strict=True)
        return [share(one, total, where) if leaf.way == "mean" else one for leaf, one in pairs]


def _as_tensor(value: Any) -> Any:
    """Arrays and plain numbers as tensors, floats as float64; anything else unchanged."""
    if is_number(value) and not isinstance(value, bool | np.generic):
        return tf.constant(value, tf.int64 if isinstance(value, int) else WEIGHT)
    is_array = isinstance(value, bool | np.generic | np.ndarray | tf.Variable)
    return tf.convert_to_tensor(value) if is_array else value


def _kind_of(tensor: Any) -> Kind:
    if tensor is None:
        return Kind((), "none", "NoneType")
    if not isinstance(tensor, tf.Tensor):
        return Kind((), "other", type(tensor).__name__)
    dtype = tensor.dtype
    numbers: Any = "float" if dtype.is_floating else "integer" if dtype.is_integer else "bool"
    if tensor.shape.rank is None or not (dtype.is_floating or dtype.is_integer or dtype.is_bool):
        return Kind((), "other", f"tensor of {dtype.name} and the shape {tensor.shape}")
    return Kind(tuple(tensor.shape.as_list()), numbers, "tensor")


def _spec(path: Path, tensor: tf.Tensor, way: Way) -> tf.TensorSpec:
    """What is kept of a leaf; raises OptionError if its sum has no shape."""
    if callable(way) or way == "concatenate":
        return tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype)
    if not tensor.shape.is_fully_defined():
        raise OptionError(
            f"{auxiliary.name_of(path)} has the shape {tensor.shape}, which a {way} over micro-batches does not have: "
            'pass aux="concatenate", or take it over the samples in the loss'
        )
    return tf.TensorSpec(tensor.shape, WEIGHT)


def _with_rows(tensor: tf.Tensor, num_samples: tf.Tensor) -> tf.Tensor:
    """The tensor, with a check that its leading axis is that of the samples. XLA drops the check."""
    is_of_samples = tf.equal(tf.shape(tensor)[0], tf.cast(num_samples, tf.int32))
    with tf.control_dependencies([tf.debugging.Assert(is_of_samples, [OTHER_ROWS])]):
        return tf.identity(tensor)


def without_aux(loss: Callable[[Any, Any], Any], given: Any, *, has_aux: bool) -> Callable[[Any, Any], Any]:
    """The loss as a function that returns its terms only.

    Args:
        loss: The user's loss.
        given: What the user passed as the model.
        has_aux: The option of the accumulator.
    """

    def terms(_: Any, batch: Any) -> Any:
        return from_terms(split(loss(given, batch), None, has_aux=has_aux, shape_of=shape_of)[0])

    return terms


def shape_of(value: Any) -> tuple[int | None, ...] | None:
    """The shape of a tensor; None for anything else. One that is not known passes for a scalar's."""
    if not isinstance(value, tf.Tensor | tf.Variable):
        return None
    return () if value.shape.rank is None else tuple(value.shape.as_list())
