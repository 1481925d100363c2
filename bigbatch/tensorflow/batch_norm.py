"""BatchNormalization under accumulation: moving statistics are updated once per step, with those of the whole batch."""

import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import tensorflow as tf

from ..core.errors import OptionError, warn
from ..core.moments import Moments, over_ranks, pool
from ..core.weight import share
from .distributed import replicas
from .internals import current_graph, trace_apart
from .layers import all_batch_norms, batch_norms, dropout_off, with_value
from .weight import WEIGHT, where

BatchNorm = Literal["batch", "micro_batch", "frozen"]


class _Recorder:
    """What the BatchNormalization layers that run on this thread do, and what they saw."""

    def __init__(self, mode: str, only: Any = None, is_known: Callable[[Any], bool] | None = None) -> None:
        self.mode = mode
        """A `BatchNorm`, or "calibrate" to normalise as "frozen" does and record the layer `only`, or all if None."""
        self.only = only
        self.is_known = is_known
        """Whether the moments of a layer can be kept; None if those of all layers can."""
        self.graph = current_graph()
        self.layers: list[Any] = []
        self.moments: list[Moments] = []
        self.missed: list[str] = []
        """The layers that did their own update although the mode is "batch"."""

    def can_record(self, layer: Any) -> bool:
        # moments that are computed in a graph of the model's own cannot be used outside of it
        is_plain = self.graph is current_graph() and not getattr(layer, "renorm", False)
        return is_plain and (self.is_known is None or self.is_known(layer))


class _Here(threading.local):
    """The state of this thread. TensorFlow runs each replica on its own thread."""

    recorder: _Recorder | None = None


_here = _Here()
_patching = threading.Lock()


def _label() -> str:
    """A graph of the model's own that was traced with frozen layers is not for other passes.

    In "batch" it is traced once more even if the same layers run in it, so that we learn which layers do.
    """
    if _here.recorder is None:
        return ""
    return "pooled BatchNormalization" if _here.recorder.mode == "batch" else "frozen BatchNormalization"


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
        missed: Is told of the layers that do their own update although the mode is "batch".
    """

    def __init__(self, mode: BatchNorm, missed: "Missed | None" = None) -> None:
        self.mode = mode
        self._missed = Missed() if missed is None else missed
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
        self._missed.warn(recorder.missed)
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
        _update(self._layers, pooled)


class MomentSums(tf.Module):
    """The statistics of the window that `micro_batch()` fills, in variables that outlive a call.

        with moment_sums.recording() as moments:
            loss(model, micro_batch)                               # the user's block
        moment_sums.add(moments, weight)
        …
        moment_sums.update()                                       # at the end of the window

    Every replica has its own. A checkpoint holds the sum over replicas, as for gradients. That is why these are plain
    sums and not pooled as in `BatchNorms`: the number of values, their sum and that of their squares, channel by
    channel. In float64 the difference of squares is exact enough: even if the mean is 10,000 times the deviation, the
    variance has eight digits. All calls of one layer are pooled together.

    Args:
        model: The model; only its own layers are known, since a checkpoint must find them again.
        strategy: The strategy that the model was made under.
        missed: Is told of the layers that do their own update.
    """

    def __init__(self, model: Any, strategy: tf.distribute.Strategy, missed: "Missed") -> None:
        super().__init__(name="moment_sums")
        self._model, self._strategy, self._missed = model, strategy, missed
        self._layers = _Numbered()
        self.sums: dict[str, tf.Variable] = {}
        """By the number of the layer in the model."""
        with strategy.scope():
            self.has_any = tf.Variable(False, trainable=False, name="has_any")

    def prepare(self) -> None:
        """Across replicas: creates the variables of all layers that are built."""
        for layer in all_batch_norms(self._model):
            number = self._layers.of(layer, self._model)
            if number is not None and number not in self.sums and layer.built:
                with tf.init_scope(), self._strategy.scope():
                    self.sums[number] = replicas.own_sum([3, *layer.moving_mean.shape], WEIGHT, self._strategy)

    @contextmanager
    def recording(self) -> Iterator[list[tuple[Any, Moments]]]:
        """Around the user's block, on a replica; the list that it yields is filled at the end of the block."""
        found: list[tuple[Any, Moments]] = []
        if not _patched():
            yield found
            return
        with _recording(_Recorder("batch", is_known=self._is_known)) as recorder:
            yield found
        self._missed.warn(recorder.missed)
        found.extend(zip(recorder.layers, recorder.moments, strict=True))

    def begin(self, layers: Sequence[Any]) -> None:
        """Across replicas, before `add` on each of them. So what was added before Ctrl-C is cleared, too."""
        if layers:
            if any(self._layers.of(layer, self._model) not in self.sums for layer in layers):
                self.prepare()
            self.has_any.assign(True)

    def add(self, found: Sequence[tuple[Any, Moments]], weight: tf.Tensor | None) -> None:
        """On a replica: adds the moments of a micro-batch. If it has a weight and that is 0, it does not count."""
        counts = tf.ones([], WEIGHT) if weight is None else tf.cast(weight > 0, WEIGHT)
        for layer, (count, mean, squares) in found:
            own = tf.stack([count * tf.ones_like(mean), count * mean, squares + count * mean * mean])
            number = self._layers.of(layer, self._model)
            assert number is not None  # else the layer would not have been recorded
            self.sums[number].assign_add(tf.math.multiply_no_nan(own, counts))

    def update(self) -> None:
        """Across replicas, at the end of a window: updates the moving statistics, if there is anything."""
        if self.sums:
            tf.cond(tf.identity(self.has_any), lambda: self._strategy.run(self._update), lambda: None)

    def clear(self) -> None:
        """Across replicas: forgets the window."""
        if self.sums:
            tf.cond(tf.identity(self.has_any), self._clear, lambda: None)

    def _update(self) -> None:
        pooled = []
        for own in self.sums.values():
            counts, summed, squared = tf.unstack(tf.identity(own))
            mean = share(summed, counts, where)
            pooled.append(Moments(counts[0], mean, tf.maximum(squared - summed * mean, 0)))
        _update([self._layers.layers[number] for number in self.sums], pooled)

    def _clear(self) -> None:
        def on_replica() -> None:
            for own in self.sums.values():
                own.assign(tf.zeros(own.shape, own.dtype))

        self._strategy.run(on_replica)
        self.has_any.assign(False)

    def _is_known(self, layer: Any) -> bool:
        return self._layers.of(layer, self._model) is not None


class _Numbered:
    """The layers of a model by their number. (A tf.Module would save them in checkpoints once more.)"""

    def __init__(self) -> None:
        self.layers: dict[str, Any] = {}
        self._numbers: dict[int, str] = {}

    def of(self, layer: Any, model: Any) -> str | None:
        """The number of a layer; None if it is not one of the model's. The model may get layers later."""
        if id(layer) not in self._numbers:
            for each in all_batch_norms(model):
                number = self._numbers.setdefault(id(each), str(len(self._numbers)))
                self.layers[number] = each
        return self._numbers.get(id(layer))


class Missed:
    """Warns, once, of layers whose moving statistics are not pooled over micro-batches."""

    def __init__(self) -> None:
        self._has_warned = self._has_seen_add = False

    def warn(self, names: Sequence[str]) -> None:
        """Of layers that ran and did their own update."""
        if names and not self._has_warned:
            self._has_warned = True
            warn(
                f"{_counted(names)} update moving statistics with every micro-batch, because they run where bigbatch "
                "cannot pool them (in a tf.function or tf.cond of the model, in tf_keras, with renorm, or outside of "
                "the model's layers): call recalibrate(model, batches) before evaluation, or pass "
                'batch_norm="micro_batch" if this is what you want'
            )

    def warn_in_add(self, model: Any, mode: BatchNorm) -> None:
        """Of all layers in training mode, since with `add()` the user's code runs the model."""
        if self._has_seen_add or mode == "micro_batch":
            return
        self._has_seen_add = True
        names = [layer.name for layer in batch_norms(model)]
        if names and mode == "batch":
            warn(
                f"add() cannot pool the moving statistics of {_counted(names)}, because your own code runs the model, "
                "so they are updated with every micro-batch: use micro_batch(), call recalibrate(model, batches) "
                'before evaluation, or pass batch_norm="micro_batch" if this is what you want'
            )
        elif names:
            warn(
                f"add() cannot freeze {_counted(names)}, because your own code runs the model: use micro_batch(), or "
                "call the model with training=False"
            )


def _counted(names: Sequence[str]) -> str:
    names = list(dict.fromkeys(names))
    return f"{len(names)} BatchNormalization layer{'s' * (len(names) != 1)} ({', '.join(names)})"


def _update(layers: Sequence[Any], pooled: Sequence[Moments]) -> None:
    """On a replica: updates the moving statistics with the moments of all replicas."""
    if replicas.is_shared() and pooled:
        pooled = _over_replicas(pooled)
    for layer, moments in zip(layers, pooled, strict=True):
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
        can_record = recorder.can_record(self)
        if recorder.mode == "batch":
            if can_record:
                return _recorded(recorder, plain, self, inputs, mask)
            recorder.missed.append(self.name)
            return plain(self, inputs, training=training, mask=mask)
        if recorder.mode == "calibrate" and can_record and recorder.only in (None, self):
            _recorded(recorder, plain, self, inputs, mask)
        return plain(self, inputs, training=False, mask=mask)

    return call


def _asking_in_tf_keras(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Only "frozen" is supported. tf_keras looks at the arguments of `call`, so they are the same."""

    @functools.wraps(plain)
    def call(self: Any, inputs: Any, training: Any = None) -> Any:
        recorder = _here.recorder
        is_frozen = recorder is not None and recorder.mode == "frozen"
        is_training = tf.is_tensor(training) or bool(training)
        if recorder is not None and recorder.mode == "batch" and is_training and self.trainable:
            recorder.missed.append(self.name)
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
