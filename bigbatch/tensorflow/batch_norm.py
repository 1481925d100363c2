"""BatchNormalization under accumulation: moving statistics are updated once per step, with those of the whole batch."""

import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import tensorflow as tf

from ..core.errors import OptionError
from ..core.moments import Moments, over_ranks, pool
from ..core.weight import share
from .distributed import replicas
from .internals import current_graph, trace_apart
from .layers import dropout_off, with_value
from .weight import WEIGHT, where

BatchNorm = Literal["batch", "micro_batch", "frozen"]


class _Recorder:
    """What the BatchNormalization layers that run on this thread do, and what they saw."""

    def __init__(self, mode: str, only: Any = None) -> None:
        self.mode = mode
        """A `BatchNorm`, or "calibrate" to normalise as "frozen" does and record the layer `only`, or all if None."""
        self.only = only
        self.graph = current_graph()
        self.layers: list[Any] = []
        self.moments: list[Moments] = []


class _Here(threading.local):
    """The state of this thread. TensorFlow runs each replica on its own thread."""

    recorder: _Recorder | None = None


_here = _Here()
_patching = threading.Lock()


def _label() -> str:
    """A graph of the model's own that was traced with frozen layers is not for other passes."""
    is_as_always = _here.recorder is None or _here.recorder.mode == "batch"
    return "" if is_as_always else "frozen BatchNormalization"


trace_apart(_label)


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
        with _recording(_Recorder(self.mode)) as recorder:
            yield recorder.moments
        if recorder.layers:
            self._layers = tuple(recorder.layers)

    def start(self) -> list[Moments]:
        """The moments of no data, for `pool`. The layers are known once a micro-batch was recorded, or traced."""
        zero = tf.zeros([], WEIGHT)
        return [Moments(zero, *[tf.zeros(layer.moving_mean.shape, WEIGHT)] * 2) for layer in self._layers]

    def pool(self, pooled: Sequence[Moments], moments: Sequence[Moments]) -> list[Moments]:
        """The moments of both sets of data together."""
        return [pool(*pair, where) for pair in zip(pooled, moments, strict=True)]

    def update(self, pooled: Sequence[Moments]) -> None:
        """On a replica: updates the moving statistics, unless the new ones are not finite or there is no data."""
        if replicas.is_shared() and pooled:
            pooled = _over_replicas(pooled)
        for layer, moments in zip(self._layers, pooled, strict=True):
            variance = moments.variance(where)
            is_good = (moments.count > 0) & tf.reduce_all(tf.math.is_finite(moments.mean + variance))
            keep = tf.where(is_good, tf.constant(layer.momentum, WEIGHT), tf.ones([], WEIGHT))
            for variable, value in ((layer.moving_mean, moments.mean), (layer.moving_variance, variance)):
                old = tf.cast(replicas.as_tf_variable(variable), WEIGHT)
                new = old * keep + tf.math.multiply_no_nan(value, 1 - keep)
                replicas.as_tf_variable(variable).assign(tf.cast(new, variable.dtype))


def recalibrate(model: Any, batches: Iterable[Any], forward: Callable[[Any, Any], Any] | None = None) -> None:
    """Sets the moving statistics of all BatchNormalization layers to those of the data, before evaluation.

        recalibrate(model, [x for x, y in dataset])

    The result does not depend on where the data are cut: the first layer gets the mean and the variance of its input
    over all batches, then the second layer that of its own, computed with the first as it is now, and so on. This takes
    one pass over the data for each layer, without gradients. Dropout is off.

    Args:
        model: A model of Keras, or a tf.Module with layers of Keras.
        batches: The data, the same each time they are iterated: a list or a tf.data.Dataset.
        forward: `forward(model, batch)` calls the model with training=True. None for
            `lambda model, batch: model(batch, training=True)`, with the first part of a batch that is a tuple.
    """
    if iter(batches) is batches:
        raise OptionError("recalibrate() iterates over the batches several times: pass a list or a Dataset")
    forward = _forward if forward is None else forward
    _patched()
    with dropout_off(model):
        layers: dict[int, Any] = {}
        for batch in batches:
            with _recording(_Recorder("calibrate")) as recorder:
                forward(model, batch)
            layers = {id(layer): layer for layer in recorder.layers}
            break
        else:
            raise OptionError("recalibrate() got no batch: pass at least one")
        if not layers:
            raise OptionError(
                "forward calls no BatchNormalization layer of Keras 3 that is trainable, in training mode, and outside "
                "of a tf.function: call model(batch, training=True)"
            )
        for layer in layers.values():
            pooled: Moments | None = None
            for batch in batches:
                with _recording(_Recorder("calibrate", layer)) as recorder:
                    forward(model, batch)
                for moments in recorder.moments:
                    pooled = moments if pooled is None else pool(pooled, moments, where)
            if pooled is not None:
                layer.moving_mean.assign(pooled.mean)
                layer.moving_variance.assign(pooled.variance(where))


def _forward(model: Any, batch: Any) -> Any:
    return model(batch[0] if isinstance(batch, tuple) else batch, training=True)


@contextmanager
def _recording(recorder: _Recorder) -> Iterator[_Recorder]:
    """Inside, on this thread, layers ask this recorder."""
    before, _here.recorder = _here.recorder, recorder
    try:
        yield recorder
    finally:
        _here.recorder = before


def _over_replicas(own: Sequence[Moments]) -> list[Moments]:
    """On a replica: pooled over all of them."""
    context = tf.distribute.get_replica_context()
    return over_ranks(own, lambda values: context.all_reduce(tf.distribute.ReduceOp.SUM, values), where)


def _patched() -> bool:
    """Makes the layers of Keras 3 and tf_keras ask `_here` what to do; whether one of the two is in use.

    The class is changed, not a layer, so layers are found wherever the model keeps them, and can be copied and saved.
    """
    wraps = {"keras.layers": _asking, "tf_keras.layers": _asking_in_tf_keras}
    found = [(sys.modules[name], wrap) for name, wrap in wraps.items() if name in sys.modules]
    with _patching:
        for module, wrap in found:
            cls: Any = module.BatchNormalization
            if not hasattr(cls.call, "is_of_bigbatch"):
                cls.call = wrap(cls.call)
                cls.call.is_of_bigbatch = True
    return bool(found)


def _asking(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def call(self: Any, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        recorder = _here.recorder
        if recorder is None or not training or not self.trainable:
            return plain(self, inputs, training=training, mask=mask)
        # moments that are computed in a graph of the model's own cannot be used outside of it
        can_record = recorder.graph is current_graph() and not getattr(self, "renorm", False)
        if recorder.mode == "batch":
            if can_record:
                return _recorded(recorder, plain, self, inputs, mask)
            return plain(self, inputs, training=training, mask=mask)
        if recorder.mode == "calibrate" and can_record and recorder.only in (None, self):
            _recorded(recorder, plain, self, inputs, mask)
        return plain(self, inputs, training=False, mask=mask)

    return call


def _asking_in_tf_keras(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Only "frozen" is supported. tf_keras looks at the arguments of `call`, so they are the same."""

    @functools.wraps(plain)
    def call(self: Any, inputs: Any, training: Any = None) -> Any:
        is_frozen = _here.recorder is not None and _here.recorder.mode == "frozen"
        return plain(self, inputs, training=False if is_frozen else training)

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
