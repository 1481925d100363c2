"""fit on the torch backend: a loop over micro-batches, each with its own backward pass."""

import warnings
from collections.abc import Callable
from typing import Any

import keras
import torch
from keras import tree
from torch import Tensor

from ...core.weight import share
from ...torch.batch import cut, map_tensors
from ...torch.gradients import unalias
from ...torch.random import random_state_kept
from .. import checks, loss
from ..loss import Batch, LossSpec, Reductions
from .step import Apply, Backend, FitStep


class BackendStep(Backend):
    """Stands for

        model.zero_grad()
        model.compute_loss(x, y, model(x, training=True), sample_weight).backward()
        optimizer.apply([v.value.grad for v in weights], weights)

    with a loop over micro-batches in place of the second line.
    """

    def __init__(self, step: FitStep) -> None:
        self.step = step
        self.replaces: dict[str, Any] = {"train_step": self.train_step}

    def train_step(self, data: Any) -> Any:
        model = self.step.model
        batch: Batch = tree.map_structure(as_tensor, keras.utils.unpack_x_y_sample_weight(data))
        x, y, sample_weight = batch
        self.step.check()
        size = checks.batch_size(batch)
        self.zero_gradients()
        value, y_pred = self._accumulate(batch, size)
        model._loss_tracker.update_state(value, sample_weight=size)
        if weights := model.trainable_weights[:]:
            with torch.no_grad():
                gradients = [self.gradient(v) for v in weights]
                self.step.update(gradients, value, lambda gradients: model.optimizer.apply(gradients, weights))
        else:
            warnings.warn("The model does not have any trainable weights.", stacklevel=2)
        return self.step.logs(x, y, y_pred, sample_weight)

    def zero_gradients(self) -> None:
        self.step.model.zero_grad()
        self._wide: dict[int, Tensor] = {}

    def _accumulate(self, batch: Batch, size: int) -> tuple[Any, Any]:
        """Adds up the gradient of the batch; returns its loss, and the outputs if anything needs them."""
        step, model = self.step, self.step.model
        value, layer_losses, kept = 0.0, 0.0, []
        pooled: Any = None
        micro_batches, sizes = cut(batch, step.micro_batch_size)
        for k, (micro_batch, num) in enumerate(zip(micro_batches, sizes, strict=True)):
            micro_batch = with_own_weights(micro_batch)
            y_pred = step.call(micro_batch[0])
            losses = None if step.own else model.losses  # before counting, which calls the model again
            moments = step.norms.moments
            if k == 0:
                spec = step.spec(batch, lambda: self._inspect(micro_batch, y_pred, losses))  # noqa: B023
                term_shares: Any = [None] * len(sizes)
                if spec.needs_model_for_weights:
                    term_shares = self._term_shares(spec, micro_batches, sizes)
            sample_share = keras.ops.convert_to_tensor(share(num, size), step.dtype)
            micro, micro_layer_losses, _ = loss.micro_loss(
                model, spec, micro_batch, y_pred, losses, sample_share, term_shares[k]
            )
            moments = step.norms.moments if step.own else moments
            if model.trainable_weights:
                step.scale(micro).backward()
                self.widen_gradients()
            with torch.no_grad():
                value, layer_losses = value + micro, layer_losses + micro_layer_losses
                pooled = moments if pooled is None else step.norms.pool(pooled, moments)
            kept.append([leaf.detach() for leaf in spec.leaves(y_pred)])
        y_pred = spec.rebuild([torch.cat(leaves) for leaves in zip(*kept, strict=True)]) if spec.needs_outputs else None
        with torch.no_grad():
            step.update_norms(pooled)
            return step.loss_of_batch(spec, batch, y_pred, layer_losses, value), y_pred

    def _term_shares(self, spec: LossSpec, micro_batches: list[Batch], sizes: list[int]) -> Tensor:
        """For each micro-batch, the shares of its terms: w_tk / W_t.

        Masks come out of the model, so it runs once more, without gradients.
        """
        found = []
        with torch.no_grad():
            for micro_batch, num in zip(micro_batches, sizes, strict=True):
                copy = map_tensors(Tensor.clone, micro_batch)  # a model may write into its input
                y_pred = self.step.call(copy[0], training=False)
                found.append(loss.weights(self.step.model, spec, copy, y_pred, num, self.step.dtype))
        weights = torch.stack(found)
        return loss.share(weights, weights.sum(0))

    def _inspect(self, *args: Any) -> LossSpec:
        if self.step.own is not None:
            return self.step.own.spec
        with torch.no_grad():
            return loss.inspect(self.step.model, *args)

    def widen_gradients(self) -> None:
        """After a backward pass: adds float16 and bfloat16 gradients to sums in float32; others add up in place."""
        weights = self.step.model.trainable_weights
        unalias([v.value for v in weights])
        for v in weights:
            gradient = v.value.grad
            if gradient is not None and loss.wide(v.dtype) != v.dtype:
                held = self._wide.get(id(v))
                self._wide[id(v)] = gradient.float() if held is None else held.add_(gradient)
                v.value.grad = None

    def gradient(self, v: Any) -> Any:
        held = self._wide.get(id(v))
        return v.value.grad if held is None else held.to(v.value.dtype)

    def if_finite(self, checked: list[Any], gradients: list[Any], apply: Apply, skip: Callable[[], Any]) -> Any:
        return apply(gradients) if _are_finite(checked) else skip()

    def first_batch(self, data: Any) -> tuple[Any, tuple[Any]]:
        return data[0], (data,)

    def infer_reductions(self, batch: Batch, *args: Any) -> Reductions:
        model = self.step.model
        modes = [(module, module.training) for module in model.modules()]
        try:
            model.eval()
            with torch.no_grad(), random_state_kept(model):
                return self.step.infer_eagerly(tree.map_structure(as_tensor, batch), _rows)
        finally:
            for module, training in modes:
                module.training = training


def _are_finite(tensors: list[Tensor]) -> bool:
    """Whether all numbers are finite. Adding them up is faster than isfinite(), but large ones may overflow."""
    sums = torch.stack([tensor.sum() for tensor in tensors])
    return bool(sums.isfinite().all()) or all(bool(tensor.isfinite().all()) for tensor in tensors)


def as_tensor(leaf: Any) -> Any:
    """train_on_batch passes arrays, not tensors."""
    return leaf if leaf is None or isinstance(leaf, Tensor) else keras.ops.convert_to_tensor(leaf)


def with_own_weights(batch: Batch) -> Batch:
    """With a copy of the sample weights: Keras multiplies masks into them in place (3.15, only on torch)."""
    x, y, sample_weight = batch
    return x, y, map_tensors(Tensor.clone, sample_weight)


def _rows(tensor: Tensor, start: int, stop: int) -> Tensor:
    """A copy of some rows; a model may write into its input."""
    return tensor[start:stop].clone()
