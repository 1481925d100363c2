"""BatchNormalization under accumulation: moving statistics are updated once per step, with those of the whole batch."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import keras
from keras import ops
from keras.src.backend import in_stateless_scope
from keras.src.backend.common.stateless_scope import get_stateless_scope

from ..core.moments import Moments, pool
from . import loss

Mode = Literal["batch", "micro_batch", "frozen"]


class BatchNorms:
    """The BatchNormalization layers of a model, in the micro-batches of a step.

        pooled = norms.start()                          # the layers are known once a micro-batch was traced
        for micro_batch in batch:
            with norms.recording() as moments:
                model(micro_batch, training=True)       # leaves moving statistics alone
            pooled = norms.pool(pooled, moments)
        norms.updated(pooled)                           # the new moving statistics

    Together that is what one call of the model with the whole batch does to the moving statistics:

        layer.moving_mean = momentum * layer.moving_mean + (1 - momentum) * mean
        layer.moving_variance = momentum * layer.moving_variance + (1 - momentum) * variance

    The variance is the biased one, as in Keras, and the variance between micro-batches is in it. A layer that is called
    several times in a step is updated for each of its calls, in their order.

    Args:
        model: The model.
        mode: "batch"; "micro_batch" to let each micro-batch update them; "frozen" to normalise with the moving
            statistics, which then stay as they are.
    """

    def __init__(self, model: Any, mode: Mode) -> None:
        self.model = model
        self.mode = mode
        self.called: Sequence[Any] = ()
        """The layer of each call in a pass. The same for all micro-batches."""
        self._layers: list[Any] | None = None
        self._thread = threading.local()  # replicas of a strategy take turns
        self._num_passes = 0

    @property
    def moments(self) -> list[Moments]:
        """What the last pass of this thread has recorded."""
        return getattr(self._thread, "moments", [])

    def find(self) -> bool:
        """Finds the layers that normalise by the batch: once per step, since that takes a while in a large model.

        Layers with renorm are left alone, because what they do in a step depends on their statistics. Returns whether
        the layers are others than before.
        """
        before = self._layers or []
        self._layers = [
            layer
            for layer in self.model._flatten_layers()
            if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable and not _renorms(layer)
        ]
        return [*map(id, before)] != [*map(id, self._layers)]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, layers do what `mode` says; `moments` is then what they saw."""
        self._thread.moments = []
        if self._layers is None:
            self.find()
        layers = self._layers if self.mode != "micro_batch" else None
        if not layers:
            yield
            return
        found: list[tuple[Any, Moments]] = []
        self._thread.found = found
        self._num_passes += 1
        for layer in layers:
            vars(layer)["call"] = self._call_of(layer)
        try:
            yield
        finally:
            self._thread.found = None
            self._num_passes -= 1
            for layer in layers if not self._num_passes else ():
                vars(layer).pop("call", None)
        self._thread.moments = [moments for _, moments in found]
        if found:
            self.called = [layer for layer, _ in found]

    def _call_of(self, layer: Any) -> Callable[..., Any]:
        plain = type(layer).call

        def call(inputs: Any, training: Any = None, mask: Any = None) -> Any:
            found = getattr(self._thread, "found", None)
            if not training or found is None:
                return plain(layer, inputs, training=training, mask=mask)
            if self.mode == "frozen":
                return plain(layer, inputs, training=False, mask=mask)

            def moments(inputs: Any, mask: Any) -> tuple[Any, Any]:
                mean, variance = type(layer)._moments(layer, inputs, mask)
                found.append((layer, _from_layer(layer, inputs, mask, mean, variance)))
                return mean, variance

            vars(layer)["_moments"] = moments
            try:
                with _without_updates():
                    return plain(layer, inputs, training=training, mask=mask)
            finally:
                del vars(layer)["_moments"]

        return call

    def start(self) -> list[Moments]:
        """The moments of no values, for `pool`."""
        return [Moments(*[ops.zeros(v.shape, loss.wide(v.dtype)) for _ in range(3)]) for v in self._means()]

    def _means(self) -> list[Any]:
        return [layer.moving_mean for layer in self.called]

    def pool(self, pooled: Sequence[Moments], moments: Sequence[Moments]) -> list[Moments]:
        """The moments of both sets of values together."""
        return [pool(*pair, ops.where) for pair in zip(pooled, moments, strict=True)]

    def updated(self, pooled: Sequence[Moments]) -> list[tuple[Any, Any]]:
        """Pairs of each moving statistic and its new value: the old one without values, or if one is not finite."""
        new: dict[int, tuple[Any, Any]] = {}
        for layer, moments in zip(self.called, pooled, strict=True):
            mean, variance = moments.mean, moments.variance(ops.where)
            is_good = ops.all(ops.isfinite(mean) & ops.isfinite(variance) & (moments.count > 0))
            for variable, value in ((layer.moving_mean, mean), (layer.moving_variance, variance)):
                _, old = new.get(id(variable), (None, ops.cast(variable, value.dtype)))
                value = ops.where(is_good, old * layer.momentum + value * (1 - layer.momentum), old)
                new[id(variable)] = variable, value
        return [(variable, ops.cast(value, variable.dtype)) for variable, value in new.values()]


def moments_of(layer: Any, inputs: Any, mask: Any) -> Moments:
    """The moments of the inputs of a layer."""
    inputs = ops.cast(inputs, keras.backend.result_type(inputs.dtype, "float32"))
    return _from_layer(layer, inputs, mask, *type(layer)._moments(layer, inputs, mask))


def _from_layer(layer: Any, inputs: Any, mask: Any, mean: Any, variance: Any) -> Moments:
    """The moments from those that the layer computed. With a mask, it divides by the count + epsilon (Keras 3.15)."""
    dtype = loss.wide(layer.moving_mean.dtype)
    mean, variance = (ops.cast(ops.stop_gradient(value), dtype) for value in (mean, variance))
    if mask is None:
        shape = ops.shape(inputs)
        number = 1
        for axis in layer._reduction_axes:
            number = number * shape[axis]
        count = ops.zeros_like(mean) + ops.cast(number, dtype)
        return Moments(count, mean, variance * count)
    is_counted = ops.broadcast_to(ops.expand_dims(mask, -1), ops.shape(inputs))
    count = ops.sum(ops.cast(is_counted, dtype), layer._reduction_axes)
    divisor = count + keras.config.epsilon()
    center = loss.share(mean * divisor, count)
    return Moments(count, center, variance * divisor - count * ops.square(center - mean))


@contextmanager
def _without_updates() -> Iterator[None]:
    """Inside, what is assigned to variables is dropped, and they have the values that they have outside."""
    values = get_stateless_scope().state_mapping if in_stateless_scope() else {}
    with keras.StatelessScope() as scope:
        scope.state_mapping.update(values)
        yield


def _renorms(layer: Any) -> bool:
    return bool(getattr(layer, "renorm", False))
