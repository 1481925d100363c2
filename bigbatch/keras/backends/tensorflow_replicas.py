"""fit under tf.distribute: what the replicas of a model tell each other in a step.

Each replica has its own part of the batch, cuts it, and adds up its own gradients. They talk twice: to add up the
weights before the first micro-batch, and to add up the gradients after the last.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from keras import tree
from tensorflow.python.distribute.distribute_lib import _get_default_replica_context


def num_replicas() -> int:
    return int(tf.distribute.get_strategy().num_replicas_in_sync)


@contextmanager
def alone() -> Iterator[int]:
    """Inside, whoever asks is told of one replica, as losses that divide by their number do. Gives how many there are.

    TensorFlow 2.21 has no public way out of a strategy.
    """
    num = num_replicas()
    with _get_default_replica_context():
        yield num


def add_up(tensors: Any) -> Any:
    """The sums over all replicas, of one tensor or of a list of them (None stays None)."""
    if num_replicas() == 1:
        return tensors
    context = tf.distribute.get_replica_context()
    if not isinstance(tensors, list):
        return context.all_reduce(tf.distribute.ReduceOp.SUM, tensors)
    there = [tensor for tensor in tensors if tensor is not None]
    sums = iter(context.all_reduce(tf.distribute.ReduceOp.SUM, there) if there else [])
    return [None if tensor is None else next(sums) for tensor in tensors]


_users: dict[int, int] = {}


@contextmanager
def added_up_already(optimizer: Any) -> Iterator[None]:
    """Keeps an optimizer from adding up gradients over replicas, which it would do after clipping each one's own.

    Keras 3.15 has no switch for that, so the method is replaced, on this optimizer and only as long as one of the
    replicas, which come and go in threads that take turns, is in here.
    """
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if num_replicas() == 1:
        yield
        return
    key, name = id(optimizer), "_all_reduce_sum_gradients"
    _users[key] = _users.get(key, 0) + 1
    vars(optimizer)[name] = list
    try:
        yield
    finally:
        _users[key] -= 1
        if not _users[key]:
            del _users[key], vars(optimizer)[name]


def is_multi_worker(strategy: Any) -> bool:
    return isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)


def first_replica(strategy: Any, batch: Any) -> Any:
    """The part of a distributed batch that the first replica here gets."""
    return tree.map_structure(lambda value: strategy.experimental_local_results(value)[0], batch)


def as_vectors(logs: Any) -> Any:
    """Numbers as vectors of one: over several workers Keras 3.15 takes a mean along the first axis of each log."""
    return tree.map_structure(lambda value: tf.reshape(value, (1,)), logs)
