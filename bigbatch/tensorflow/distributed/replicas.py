"""Batches over replicas, and variables as the strategy has them."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ...core.errors import WeightError
from .. import batch as nest


def strategy_of(model: Any) -> tf.distribute.Strategy:
    """The strategy that the model, or its first variable, was made under, or else the one that is in scope."""
    for owner in (model, *map(as_tf_variable, model.trainable_variables[:1])):
        strategy = getattr(owner, "distribute_strategy", None)
        if isinstance(strategy, tf.distribute.Strategy):
            return strategy
    return tf.distribute.get_strategy()


def is_spread(batch: Any) -> bool:
    """Whether the replicas have their parts of the batch already, as in a distributed dataset."""
    return any(isinstance(leaf, tf.distribute.DistributedValues) for leaf in tf.nest.flatten(batch))


def are_all_here(strategy: tf.distribute.Strategy) -> bool:
    """Whether all replicas are in this process, so that what they have together can be seen."""
    num = strategy.num_replicas_in_sync
    return num == 1 or len(strategy.extended.worker_devices) == num


def parts(strategy: tf.distribute.Strategy, batch: Any) -> list[Any]:
    """What each replica of this process has of such a batch; what is not spread goes to all of them."""

    def part(leaf: Any, place: int) -> Any:
        is_apart = isinstance(leaf, tf.distribute.DistributedValues)
        return strategy.experimental_local_results(leaf)[place] if is_apart else leaf

    num = len(strategy.extended.worker_devices)
    return [tf.nest.map_structure(lambda leaf, place=place: part(leaf, place), batch) for place in range(num)]


def spread(strategy: tf.distribute.Strategy, tensor: Any, batch_size: int) -> Any:
    """A tensor's rows, handed to the replicas of this process one after the other; the last may get fewer or none."""
    num = len(strategy.extended.worker_devices)
    each = -(-batch_size // num)
    place = iter(range(num))

    def part(_: Any) -> Any:
        start = min(next(place) * each, batch_size)
        return nest.part(tensor, start, min(start + each, batch_size))

    return strategy.experimental_distribute_values_from_function(part)


def check_terms(strategy: tf.distribute.Strategy, weights: Sequence[Any]) -> None:
    """Refuses micro-batches with other terms than the first."""
    nums = [strategy.experimental_local_results(each)[0].shape[0] for each in weights]
    for number, num in enumerate(nums):
        if num != nums[0]:
            raise WeightError(
                f"micro-batch {number + 1} has {num} weights, those before it in the window have {nums[0]}: give every "
                "micro-batch the same terms"
            )


def total(strategy: tf.distribute.Strategy, values: Sequence[Any]) -> tf.Tensor:
    """Values that every replica has its own of, added up on each and then over all of them, in one go."""
    own = [tf.add_n(each) for each in zip(*map(strategy.experimental_local_results, values), strict=True)]
    if strategy.num_replicas_in_sync == 1:
        return own[0]
    each = iter(own)
    spread = strategy.experimental_distribute_values_from_function(lambda _: next(each))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, spread, axis=None)


def any_size(value: Any) -> tf.TypeSpec:
    """The kind of a tensor, or of a tensor per replica, with a leading axis of any size."""
    if isinstance(value, tf.distribute.DistributedValues):
        return type(tf.type_spec_from_value(value))(*map(nest.any_size, value.values))
    return nest.any_size(value)


def as_tf_variable(variable: Any) -> Any:
    """Keras 3 wraps its variables."""
    inner = getattr(variable, "value", None)
    return variable if inner is None or callable(inner) else inner


def is_shared() -> bool:
    """Whether the code that runs here runs on several replicas."""
    context = tf.distribute.get_replica_context()
    return context is not None and context.num_replicas_in_sync > 1
