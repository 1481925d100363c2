"""The replicas of a strategy: what each has of a batch, and what they reduce."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import tensorflow as tf

from ...core.errors import BatchError, WeightError
from ..batch import Layout, batch_size, slice_rows
from ..gradients import Gradient, dense
from ..weight import WEIGHT


def strategy_of(model: Any) -> tf.distribute.Strategy:
    """The strategy that the model, or its first variable, was made under; else the one that is in scope."""
    for owner in (model, *map(as_tf_variable, model.trainable_variables[:1])):
        strategy = getattr(owner, "distribute_strategy", None)
        if isinstance(strategy, tf.distribute.Strategy):
            return strategy
    return tf.distribute.get_strategy()


def as_tf_variable(variable: Any) -> Any:
    """TensorFlow's variable, which Keras 3 wraps."""
    inner = getattr(variable, "value", None)
    return variable if inner is None or callable(inner) else inner


def trainable(model: Any) -> list[Any]:
    """The trainable variables of a model, as TensorFlow's."""
    return [as_tf_variable(v) for v in model.trainable_variables]


def own_sum(shape: Any, dtype: tf.DType, strategy: tf.distribute.Strategy) -> tf.Variable:
    """In the scope of the strategy: a variable of zeros, one for each replica. A checkpoint has their sum."""
    on_each = {"synchronization": tf.VariableSynchronization.ON_READ, "aggregation": tf.VariableAggregation.SUM}
    is_shared = strategy.num_replicas_in_sync > 1
    return tf.Variable(tf.zeros(shape, dtype), trainable=False, **(on_each if is_shared else {}))


def is_shared() -> bool:
    """Whether the code that runs here runs on several replicas."""
    context = tf.distribute.get_replica_context()
    return context is not None and context.num_replicas_in_sync > 1


# --- a batch -------------------------------------------------------------------------------------------------


def spread(strategy: tf.distribute.Strategy, batch: Any) -> Layout:
    """The layout of a batch, with a part of each tensor for each replica if there are several.

    A distributed dataset already has such parts. Plain tensors are cut in order; the last replicas may get fewer rows,
    or none.
    """
    num_replicas = strategy.num_replicas_in_sync
    is_one = num_replicas == 1
    is_spread = not is_one and any(isinstance(leaf, tf.distribute.DistributedValues) for leaf in tf.nest.flatten(batch))
    layout, *layout.others = map(Layout, _parts(strategy, batch) if is_spread else [batch])
    size = sum(map(batch_size, (layout, *layout.others)))
    # if this worker has no sample, others may have some
    if size == 0 and not is_spread and (is_one or len(strategy.extended.worker_devices) == num_replicas):
        raise BatchError(f"tensor {layout.places[0]} has 0 samples: leave empty batches out of the stream")
    if is_spread:
        leaves = tf.nest.flatten(batch)
        layout.tensors = [leaves[k] for k in layout.places]
    elif not is_one:
        layout.tensors = [_cut(strategy, tensor, size) for tensor in layout.tensors]
    return layout


def _parts(strategy: tf.distribute.Strategy, batch: Any) -> list[Any]:
    """Each replica's part of a batch, in this process. Values that are not distributed go to all replicas."""

    def of_each(leaf: Any) -> Sequence[Any]:
        is_distributed = isinstance(leaf, tf.distribute.DistributedValues)
        return strategy.experimental_local_results(leaf) if is_distributed else [leaf] * num

    num = len(strategy.extended.worker_devices)
    return [tf.nest.pack_sequence_as(batch, part) for part in zip(*map(of_each, tf.nest.flatten(batch)), strict=True)]


def _cut(strategy: tf.distribute.Strategy, tensor: Any, size: int) -> Any:
    num = len(strategy.extended.worker_devices)
    ends = [min(-(-size // num) * place, size) for place in range(num + 1)]
    return _distributed(strategy, [slice_rows(tensor, start, stop) for start, stop in pairwise(ends)])


def _distributed(strategy: tf.distribute.Strategy, parts: list[Any]) -> Any:
    each = iter(parts)
    return strategy.experimental_distribute_values_from_function(lambda _: next(each))


# --- weights and gradients -----------------------------------------------------------------------------------


def total(strategy: tf.distribute.Strategy, weights: Sequence[Any]) -> tf.Tensor:
    """The total weight of a window over all replicas, term by term. Each weight is a tensor per replica."""
    local = [strategy.experimental_local_results(weight) for weight in weights]
    num_terms = local[0][0].shape[0]
    for number, (first, *_) in enumerate(local, 1):
        if first.shape[0] != num_terms:
            raise WeightError(
                f"micro-batch {number} has {first.shape[0]} weights, those before it in the window have {num_terms}: "
                "give every micro-batch the same terms"
            )
    return added(strategy, weights)


def added(strategy: tf.distribute.Strategy, values: Sequence[Any]) -> tf.Tensor:
    """Across replicas: the sum of values of one shape, each a tensor per replica."""
    own = [tf.add_n(each) for each in zip(*map(strategy.experimental_local_results, values), strict=True)]
    if strategy.num_replicas_in_sync == 1:
        return own[0]
    return strategy.reduce(tf.distribute.ReduceOp.SUM, _distributed(strategy, own), axis=None)


def reduce(sums: Sequence[Gradient], others: list[tf.Tensor]) -> tuple[list[Gradient], list[tf.Tensor]]:
    """On a replica: adds up gradients and other tensors over all replicas, with one call for each dtype of gradients.

    A call takes one dtype only, so the others are cast to the widest dtype of the gradients.
    """
    present = [k for k, g in enumerate(sums) if g is not None]
    dtypes = sorted({sums[k].dtype for k in present}, key=lambda dtype: dtype.size) or [WEIGHT]
    context = tf.distribute.get_replica_context()
    reduced: list[Gradient] = [None] * len(sums)
    for dtype in dtypes:
        places = [k for k in present if sums[k].dtype == dtype]
        along = [tf.cast(other, dtype) for other in others] if dtype is dtypes[-1] else []
        added = context.all_reduce(tf.distribute.ReduceOp.SUM, [*(dense(sums[k]) for k in places), *along])
        for k, g in zip(places, added, strict=False):
            reduced[k] = g
    return reduced, [tf.cast(value, WEIGHT) for value in added[len(places) :]]
