"""Windows on the tensorflow backend: a graph for each part of a step, called once for each micro-batch."""

from typing import Any

import keras
import tensorflow as tf
from keras import tree

from ...tensorflow.batch import Layout, num_samples
from .. import loss
from ..backends.step import FitStep
from ..backends.tensorflow import BackendStep, as_tensor, without_optional
from ..loss import Batch, LossSpec
from .step import track_loss, update_metrics


class BackendPasses:
    """See `Passes`. Variables hold the state, so there is none to pass."""

    def __init__(self, step: FitStep, cut: BackendStep) -> None:
        self.step = step
        self.model = step.model
        self.cut = cut

    def make(self) -> None:
        self._has_gradient: set[int] = set()
        self.weigh = self._compiled(self._weigh)
        self.backward = self._compiled(self._backward)
        self.finish = self._compiled(self._finish)

    def _compiled(self, function: Any) -> Any:
        if self.model.run_eagerly:
            return function
        return tf.function(function, reduce_retracing=True, jit_compile=self.model.jit_compile, autograph=False)

    def batch(self, data: Any) -> Batch:
        batch: Batch = keras.utils.unpack_x_y_sample_weight(
            tree.map_structure(lambda leaf: as_tensor(without_optional(leaf)), data)
        )
        return batch

    def inspect(self, state: None, batch: Batch) -> LossSpec:
        return self.cut.inspect(batch)

    def _spec(self, batch: Batch) -> LossSpec:
        return self.step.spec(batch, lambda: self.cut.inspect(batch))

    def _weigh(self, state: None, batch: Batch) -> Any:
        y_pred = self.step.call(batch[0], training=False)
        num = num_samples(Layout(batch).tensors)
        return loss.weights(self.model, self._spec(batch), batch, y_pred, num, self.step.dtype)

    def begin(self, state: None, spec: LossSpec) -> Any:
        zero = tf.zeros((), self.step.dtype)
        gradients = [tf.zeros(v.shape, loss.wide(v.dtype)) for v in self.model.trainable_weights]
        return gradients, zero, [zero] * len(spec.kinds), self.step.norms.start()

    def _backward(self, sums: Any, state: None, batch: Batch, sample_share: Any, term_shares: Any) -> Any:
        model = self.model
        weights = model.trainable_weights
        sums, value, terms, pooled = sums
        shares = None if term_shares is None else tf.unstack(term_shares)
        with tf.GradientTape() as tape:
            y_pred = self.step.call(batch[0])
            micro = loss.micro_loss(
                model, self._spec(batch), batch, y_pred, model.losses, sample_share, shares, keeps_updates=True
            )
            scaled = self.step.scale(micro.value)
        moments = self.step.norms.moments
        gradients = tape.gradient(scaled, weights)
        self._has_gradient.update(i for i, gradient in enumerate(gradients) if gradient is not None)
        sums = [
            s if g is None else tf.ensure_shape(s + tf.cast(g, s.dtype), s.shape)
            for s, g in zip(sums, gradients, strict=True)
        ]
        x, y, sample_weight = batch
        logs = update_metrics(self.step, x, y, y_pred, sample_weight)
        terms = [a + b for a, b in zip(terms, micro.terms, strict=False)]
        return (sums, value + micro.value, terms, self.step.norms.pool(pooled, moments)), logs

    def _finish(self, sums: Any, state: None, size: Any, logs: Any) -> Any:
        model = self.model
        weights = model.trainable_weights
        sums, value, terms, pooled = sums
        self.step.update_norms(pooled)
        track_loss(model, value, terms, size)
        gradients = [
            tf.cast(s, v.dtype) if i in self._has_gradient else None
            for i, (s, v) in enumerate(zip(sums, weights, strict=True))
        ]
        if weights:
            self.step.update(
                gradients,
                value,
                lambda gradients: model.optimizer.apply_gradients(zip(gradients, weights, strict=True)),
            )
        return {**logs, **model.get_metrics_result()}
