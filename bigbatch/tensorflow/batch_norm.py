"""BatchNormalization under accumulation: moving statistics are updated once per step, with those of the whole batch."""

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import tensorflow as tf

from ..core.weight import share
from .distributed import replicas
from .internals import current_graph
from .layers import with_value
from .weight import WEIGHT, where

BatchNorm = Literal["batch", "micro_batch", "frozen"]


class Moments(NamedTuple):
    """The statistics of one call of a layer, per channel, in float64."""

    count: tf.Tensor
    """How many values each channel has."""
    mean: tf.Tensor
    squares: tf.Tensor
    """The sum of the squared differences from the mean."""


class _Recorder:
    """What the BatchNormalization layers that run on this thread do, and what they saw."""

    def __init__(self, mode: BatchNorm) -> None:
        self.mode = mode
        self.graph = current_graph()
        self.layers: list[Any] = []
        self.moments: list[Moments] = []


class _Here(threading.local):
    """The state of this thread. TensorFlow runs each replica on its own thread."""

    recorder: _Recorder | None = None


_here = _Here()


class BatchNorms:
    """Pools the statistics of BatchNormalization layers over micro-batches and replicas.

        batch_norms = BatchNorms("batch")
        for micro_batch in batch:                              # tf.while_loop
            with batch_norms.recording() as moments:
                loss(model, micro_batch)
            pooled = batch_norms.pool(pooled, moments)         # from batch_norms.start() on
        batch_norms.update(pooled)

    stands for what one forward pass of the whole batch does to the moving statistics:

        layer.moving_mean.assign(momentum * layer.moving_mean + (1 - momentum) * mean)
        layer.moving_variance.assign(momentum * layer.moving_variance + (1 - momentum) * variance)

    The variance is the biased one, as in Keras. It has the variance between micro-batches in it.

    Args:
        mode: "batch"; "micro_batch" to let each micro-batch do its own update; "frozen" to normalise with the moving
            statistics, which then stay as they are.
    """

    def __init__(self, mode: BatchNorm) -> None:
        self.mode = mode
        self._layers: Sequence[Any] = ()
        """The layer of each call that was recorded, in order. The same for every micro-batch."""

    @contextmanager
    def recording(self) -> Iterator[list[Moments]]:
        """Inside, on this thread, layers do what `mode` says; yields a list that gets the moments of each call."""
        if self.mode == "micro_batch" or not _patched():
            yield []
            return
        before, _here.recorder = _here.recorder, _Recorder(self.mode)
        try:
            yield _here.recorder.moments
        finally:
            if _here.recorder.layers:
                self._layers = tuple(_here.recorder.layers)
            _here.recorder = before

    def start(self) -> list[Moments]:
        """The moments of no data, for `pool`. The layers are known once a micro-batch was recorded, or traced."""
        zero = tf.zeros([], WEIGHT)
        return [Moments(zero, *[tf.zeros(layer.moving_mean.shape, WEIGHT)] * 2) for layer in self._layers]

    def pool(self, pooled: Sequence[Moments], moments: Sequence[Moments]) -> list[Moments]:
        """The moments of both sets of data together."""
        return [_pooled(*pair) for pair in zip(pooled, moments, strict=True)]

    def update(self, pooled: Sequence[Moments]) -> None:
        """On a replica: updates the moving statistics, unless the new ones are not finite or there is no data."""
        if replicas.is_shared() and pooled:
            pooled = _over_replicas(pooled)
        for layer, moments in zip(self._layers, pooled, strict=True):
            variance = share(moments.squares, moments.count, where)
            is_good = (moments.count > 0) & tf.reduce_all(tf.math.is_finite(moments.mean + variance))
            keep = tf.where(is_good, tf.constant(layer.momentum, WEIGHT), tf.ones([], WEIGHT))
            for variable, value in ((layer.moving_mean, moments.mean), (layer.moving_variance, variance)):
                old = tf.cast(replicas.as_tf_variable(variable), WEIGHT)
                new = old * keep + tf.math.multiply_no_nan(value, 1 - keep)
                replicas.as_tf_variable(variable).assign(tf.cast(new, variable.dtype))


def _pooled(one: Moments, other: Moments) -> Moments:
    """Chan's formula, which does not cancel as the difference of E(x²) and E(x)² does."""
    count = one.count + other.count
    part = share(other.count, count, where)
    is_empty = tf.equal(other.count, 0)  # the mean over nothing may be NaN
    apart = tf.where(is_empty, tf.zeros([], WEIGHT), other.mean - one.mean)
    squares = tf.where(is_empty, tf.zeros([], WEIGHT), other.squares)
    return Moments(count, one.mean + apart * part, one.squares + squares + apart**2 * part * one.count)


def _over_replicas(own: Sequence[Moments]) -> list[Moments]:
    """On a replica: pooled over all of them, with two reductions for all layers together."""
    context = tf.distribute.get_replica_context()

    def added(values: list[tf.Tensor]) -> Any:
        return context.all_reduce(tf.distribute.ReduceOp.SUM, values)

    sums = added([m.count for m in own] + [m.mean * m.count for m in own])
    counts, means = sums[: len(own)], [share(s, n, where) for n, s in zip(sums, sums[len(own) :], strict=False)]
    squares = added([m.squares + m.count * (m.mean - mean) ** 2 for m, mean in zip(own, means, strict=True)])
    return [Moments(*each) for each in zip(counts, means, squares, strict=True)]


def _patched() -> bool:
    """Makes Keras's layer ask `_here` what to do; whether there is such a layer at all.

    The class is changed, not a layer, so layers are found wherever the model keeps them, and can be copied and saved.
    """
    layers = [sys.modules.get(name) for name in ("keras.layers", "tf_keras.layers")]
    for module in filter(None, layers):
        cls: Any = module.BatchNormalization
        if not hasattr(cls.call, "is_of_bigbatch"):
            is_keras_3 = not module.__name__.startswith("tf_keras")
            cls.call = _asking(cls.call, _recorded if is_keras_3 else None)
    return any(layers)


def _asking(plain: Callable[..., Any], recorded: Callable[..., Any] | None) -> Callable[..., Any]:
    @functools.wraps(plain)
    def call(self: Any, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        recorder = _here.recorder
        if recorder is None or not training or not self.trainable:
            return plain(self, inputs, training=training, mask=mask)
        if recorder.mode == "frozen":
            return plain(self, inputs, training=False, mask=mask)
        # moments that are computed in a graph of the model's own cannot be used outside of it
        if recorded is None or getattr(self, "renorm", False) or recorder.graph is not current_graph():
            return plain(self, inputs, training=training, mask=mask)
        return recorded(recorder, plain, self, inputs, mask)

    call.is_of_bigbatch = True  # type: ignore[attr-defined]
    return call


def _recorded(recorder: _Recorder, plain: Callable[..., Any], layer: Any, inputs: Any, mask: Any) -> Any:
    """Calls the layer of Keras 3 so that it normalises as always, but leaves its moving statistics alone.

    With a momentum of 0 it assigns the moments of this call, which the scope keeps from the variables. A `synchronized`
    layer would wait for the other replicas, which may have other numbers of micro-batches.
    """
    import keras

    with (
        keras.StatelessScope() as scope,
        with_value([layer], "momentum", 0.0),
        with_value([layer], "synchronized", False),
    ):
        outputs = plain(layer, inputs, training=True, mask=mask)
        found = [scope.get_current_value(v) for v in (layer.moving_mean, layer.moving_variance)]
    mean, variance = (tf.stop_gradient(tf.cast(value, WEIGHT)) for value in found)
    if mask is None:
        shape = tf.cast(tf.shape(inputs), WEIGHT)
        count = tf.reduce_prod(shape) / shape[layer.axis]
    else:
        # Keras divides by count + epsilon
        count = tf.cast(tf.math.count_nonzero(mask), WEIGHT)
        factor = share(count + keras.config.epsilon(), count, where)
        mean, variance = mean * factor, variance * factor
    recorder.layers.append(layer)
    recorder.moments.append(Moments(count, mean, variance * count))
    return outputs
