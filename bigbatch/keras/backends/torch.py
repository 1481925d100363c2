"""fit on the torch backend: a loop over micro-batches, each with its own backward pass."""

import copy
import warnings
from typing import Any

import keras
import torch
from keras import tree

from ...core.errors import BatchError
from ...core.window import cuts
from ...torch.gradient_buffer import part
from .. import checks, loss
from ..loss import Batch, Form
from ..verify.trial import Found
from .step import FitStep


class TorchStep:
    """Stands for

        model.zero_grad()
        model.compute_loss(x, y, model(x, training=True), sample_weight).backward()
        optimizer.apply([v.value.grad for v in weights], weights)

    with a loop over micro-batches in the place of the second line.
    """

    def __init__(self, step: FitStep) -> None:
        self.step = step
        self.model = step.model
        self.micro_batch_size = step.micro_batch_size
        self.replaces: dict[str, Any] = {}

    def train_step(self, data: Any) -> Any:
        model = self.model
        batch: Batch = keras.utils.unpack_x_y_sample_weight(data)
        x, y, sample_weight = batch
        self.step.check()
        size = num_samples(x)
        checks.check_not_empty(size)
        checks.check_rows(batch)
        model.zero_grad()
        value, added, y_pred, is_bound = self.accumulate(batch, size)
        if y_pred is not None and not is_bound:
            with torch.no_grad(), loss.losses_of(model, None if added is None else [added]):
                value = model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)
        model._loss_tracker.update_state(value, sample_weight=size)
        weights = model.trainable_weights[:]
        if weights:
            with torch.no_grad():
                model.optimizer.apply([self.gradient(v) for v in weights], weights)
        else:
            warnings.warn("The model does not have any trainable weights.", stacklevel=2)
        return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)

    def accumulate(self, batch: Batch, size: int) -> tuple[Any, Any, Any, bool]:
        """Leaves the gradient of the batch on the model.

        Returns the loss, what model.losses add, the outputs, and whether compute_loss makes no sense for all of them.
        """
        model = self.model
        self._sums: dict[int, Any] = {}
        value, added, kept = 0.0, None, []
        where = cuts(size, self.micro_batch_size)
        for k, rows in enumerate(where):
            micro_batch = cut(batch, rows)
            y_pred = self.step.call(micro_batch[0])
            losses = model.losses  # before counting, which calls the model again
            if k == 0:
                form = self.step.form(tree.map_structure(spec, batch), lambda: self.look(micro_batch, y_pred))  # noqa: B023
                shares = self.count(form, batch, where) if form.is_counted else [None] * len(where)
            share = keras.ops.convert_to_tensor((rows.stop - rows.start) / size, self.step.dtype)
            micro, extra = loss.micro_loss(model, form, micro_batch, y_pred, losses, share, shares[k])
            if model.trainable_weights:
                self.step.scale(micro).backward()
                part([v.value for v in model.trainable_weights])
            self.widen()
            value = value + micro.detach()
            if extra is not None:
                added = extra.detach() if added is None else added + extra.detach()
            kept.append([leaf.detach() for leaf in form.leaves(y_pred)])
        if not form.needs_outputs:
            return value, added, None, False
        y_pred = form.rebuild([torch.cat(leaves) for leaves in zip(*kept, strict=True)])
        return value, added, y_pred, form.is_bound

    def count(self, form: Form, batch: Batch, where: list[slice]) -> Any:
        """The shares of the losses in each micro-batch, where masks or sample weights decide.

        Masks come out of the model, so it runs once more, without gradients.
        """
        found = []
        with torch.no_grad():
            for rows in where:
                micro_batch = tree.map_structure(copied, cut(batch, rows))  # a model may write into its input
                parts = loss.parts(self.model, micro_batch, self.step.call(micro_batch[0], training=False))
                num = rows.stop - rows.start
                found.append(torch.stack([loss.weigh(*pair, num) for pair in zip(parts, form.kinds, strict=True)]))
        weights = torch.stack(found).to(getattr(torch, self.step.dtype))
        total = weights.sum(0)
        return loss.share(weights, total)

    def look(self, batch: Batch, y_pred: Any) -> Form:
        """The form of a batch, from the output for a micro-batch."""
        with torch.no_grad():
            return loss.look(self.model, batch, y_pred)

    def peek(self, data: Any) -> tuple[Any, tuple[Any]]:
        return data[0], (data,)

    def try_out(self, batch: Batch, *args: Any) -> Found:
        batch = tree.map_structure(as_tensor, batch)
        modes = [(module, module.training) for module in self.model.modules()]
        try:
            self.model.eval()
            with torch.no_grad(), torch.random.fork_rng(range(torch.cuda.device_count())):
                return self.step.trial(
                    batch,
                    lambda batch, start, num: tree.map_structure(copied, cut(batch, slice(start, start + num))),
                )
        finally:
            for module, training in modes:
                module.training = training

    def widen(self) -> None:
        """Moves gradients in float16 or bfloat16 into sums in float32; all others add up where they are."""
        for v in self.model.trainable_weights:
            gradient = v.value.grad
            if gradient is not None and loss.wide(v.dtype) != v.dtype:
                held = self._sums.get(id(v))
                self._sums[id(v)] = gradient.float() if held is None else held.add_(gradient)
                v.value.grad = None

    def gradient(self, v: Any) -> Any:
        held = self._sums.get(id(v))
        return v.value.grad if held is None else held.to(v.value.dtype)


def num_samples(x: Any) -> int:
    leaf = next((leaf for leaf in tree.flatten(x) if leaf is not None), None)
    if leaf is None or not len(leaf.shape):
        raise BatchError("x has no batch axis to cut along: give fit arrays of samples")
    return int(leaf.shape[0])


def cut(batch: Batch, rows: slice) -> Any:
    """The micro-batch of these samples; what has no axes goes to every micro-batch.

    Detached, so that a model that writes a parameter into its input (a mask token) leaves the other rows alone.
    """

    def leaf(value: Any) -> Any:
        if value is None or not len(value.shape):
            return value
        return value[rows].detach() if isinstance(value, torch.Tensor) else value[rows]

    x, y, sample_weight = tree.map_structure(leaf, batch)
    # Keras multiplies a mask into the sample weights in place (3.15, on torch alone)
    return x, y, tree.map_structure(copied, sample_weight)


def as_tensor(leaf: Any) -> Any:
    return None if leaf is None else keras.ops.convert_to_tensor(leaf)


def copied(value: Any) -> Any:
    """train_on_batch leaves sample weights as arrays."""
    return value.clone() if isinstance(value, torch.Tensor) else copy.copy(value)


def spec(leaf: Any) -> Any:
    return None if leaf is None else (tuple(leaf.shape)[1:], leaf.dtype)
