"""Windows on the torch backend: a forward and a backward pass for each micro-batch."""

import warnings
from typing import Any

import keras
import torch
from keras import tree
from torch import Tensor

from ...torch.batch import map_tensors
from ...torch.random import random_state_kept
from .. import checks, loss
from ..backends.step import FitStep
from ..backends.torch import BackendStep, as_tensor, with_own_weights
from ..loss import Batch, LossSpec
from .step import track_loss, update_metrics


class BackendPasses:
    """See `Passes`. Variables hold the state, and their `grad` the sums."""

    def __init__(self, step: FitStep, cut: BackendStep) -> None:
        self.step = step
        self.model = step.model
        self.cut = cut

    def make(self) -> None:
        """There is nothing to compile."""

    def batch(self, data: Any) -> Batch:
        batch: Batch = tree.map_structure(as_tensor, keras.utils.unpack_x_y_sample_weight(data))
        return batch

    def inspect(self, state: None, batch: Batch) -> LossSpec:
        values = [(v, v.value) for v in self.model.trainable_variables]  # or regularizers would find none (Keras 3.15)
        if self.step.own is not None:
            return self.step.own.spec
        with torch.no_grad(), random_state_kept(self.model), keras.StatelessScope(values, collect_losses=True):
            y_pred = self.step.call(map_tensors(Tensor.clone, batch)[0], training=False)
            spec = loss.inspect(self.model, batch, y_pred, self.model.losses)
            self.model._clear_losses()
        return spec

    def weigh(self, state: None, batch: Batch) -> Tensor:
        copy = map_tensors(Tensor.clone, batch)  # a model may write into its input
        with torch.no_grad():
            y_pred = self.step.call(copy[0], training=False)
            spec = self._spec(batch)
            return loss.weights(self.model, spec, copy, y_pred, checks.batch_size(batch), self.step.dtype)

    def _spec(self, batch: Batch) -> LossSpec:
        return self.step.spec(batch, lambda: self.inspect(None, batch))

    def begin(self, state: None, spec: LossSpec) -> Any:
        self.cut.zero_gradients()
        return 0.0, [0.0] * len(spec.kinds), None

    def backward(self, sums: Any, state: None, batch: Batch, sample_share: Any, term_shares: Any) -> Any:
        model = self.model
        x, y, sample_weight = with_own_weights(batch)
        y_pred = self.step.call(x)
        micro = loss.micro_loss(
            model,
            self._spec(batch),
            (x, y, sample_weight),
            y_pred,
            None if self.step.own else model.losses,
            sample_share,
            term_shares,
            keeps_updates=True,
        )
        moments = self.step.norms.moments
        if model.trainable_weights:
            self.step.scale(micro.value).backward()
            self.cut.widen_gradients()
        with torch.no_grad():
            value, terms, pooled = sums
            pooled = moments if pooled is None else self.step.norms.pool(pooled, moments)
            sums = value + micro.value, [a + b for a, b in zip(terms, micro.terms, strict=False)], pooled
            logs = update_metrics(self.step, x, y, y_pred, batch[2])  # without masks
        return sums, logs

    def finish(self, sums: Any, state: None, size: Tensor, logs: Any) -> Any:
        model = self.model
        value, terms, pooled = sums
        with torch.no_grad():
            self.step.update_norms(pooled)
            track_loss(model, value, terms, size)
            if weights := model.trainable_weights[:]:
                gradients = [self.cut.gradient(v) for v in weights]
                self.step.update(gradients, value, lambda gradients: model.optimizer.apply(gradients, weights))
            else:
                warnings.warn("The model does not have any trainable weights.", stacklevel=2)
        return {**logs, **model.get_metrics_result()}
