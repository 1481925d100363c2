"""`accumulate`: `fit` in micro-batches."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar, get_args

import keras

from ..core.errors import OptionError
from ..core.options import check_choice, check_size
from . import checks
from .backends.step import Backend, FitStep
from .batch_norm import Mode
from .loss import Own
from .windows.step import WindowStep

Model = TypeVar("Model")


def accumulate(
    model: Model,
    micro_batch_size: int | None = None,
    *,
    accumulation_steps: int | None = None,
    batch_norm: Mode = "batch",
    loss: Callable[[Any, Any, Any, Any], Any] | None = None,
    weight: Callable[[Any, Any, Any], Any] | None = None,
) -> Model:
    """Makes `fit` accumulate gradients, with the weights and the history of `fit` on the full batch.

        model.compile("adam", "mse")
        model.fit(x, y, batch_size=64)        # does not fit into memory

    becomes

        accumulate(model, micro_batch_size=8)
        model.compile("adam", "mse")
        model.fit(x, y, batch_size=64)        # the same weights, the same history

    The step of `fit` then stands for this loop:

        for micro_batch, share in cut(batch):               # share = w_k / W: samples, unmasked values or weights
            gradient += share * grad(loss(micro_batch))
        optimizer.apply(gradient)                           # once
        metrics.update(batch)                               # once, with the outputs of the whole batch

    If your dataset already yields micro-batches, say how many of them make up a step instead:

        accumulate(model, accumulation_steps=4)
        model.compile("adam", "mse")
        model.fit(dataset)                                  # micro-batches of any sizes

    which stands for

        for window in every_four(dataset):                  # the last window of an epoch may have fewer
            for micro_batch in window:
                gradient += share * grad(loss(micro_batch)) # share = w_k / W, where W is that of the whole window
                metrics.update(micro_batch)
            optimizer.apply(gradient)                       # once

    `train_on_batch` is cut in the first way; in the second its batch is a step of its own. `evaluate`, `predict` and
    the saved model do not change.

    Args:
        model: A Sequential, Functional or subclassed model of Keras 3, compiled or not. If its class has a `train_step`
            of its own, pass `loss`.
        micro_batch_size: The number of samples in memory at one time; the last micro-batch of a batch may have fewer.
            Call `accumulate` again to change it. `accumulate(model, None)` takes it back: `fit` is Keras's own again.
        accumulation_steps: The number of micro-batches in a step, if the data of `fit` come in micro-batches.
        batch_norm: What BatchNormalization layers do in training. With "batch" they normalise each micro-batch by
            itself, and update their moving statistics once per step, with mean and variance of the whole batch. With
            "micro_batch" each micro-batch updates them. With "frozen" they normalise with the moving statistics, which
            stay as they are; then the gradient is exact.
        loss: For a model whose class has a `train_step` of its own, the part of it that computes the loss:
            `loss(model, x, y, sample_weight)` calls the model with training=True, updates the metrics it likes, and
            returns the mean (or the sum) over the micro-batch. bigbatch does the rest of the step.
        weight: For `loss`: `weight(x, y, sample_weight)` returns over how many values the loss is a mean, if these are
            not the samples.

    Returns:
        The same model.

    Raises:
        OptionError: The model or its optimizer cannot be used in micro-batches, both numbers are given, or one of them
            is not a whole number of at least 1.
    """
    checks.check_model(model)
    micro_batch_size = check_size("micro_batch_size", micro_batch_size)
    accumulation_steps = check_size("accumulation_steps", accumulation_steps)
    if micro_batch_size is not None and accumulation_steps is not None:
        raise OptionError(
            f"accumulate() got micro_batch_size={micro_batch_size} and accumulation_steps={accumulation_steps}: pass "
            "micro_batch_size if fit() gets the batches you want, or accumulation_steps if it gets micro-batches"
        )
    if micro_batch_size is None and accumulation_steps is None and (loss is not None or batch_norm != "batch"):
        raise OptionError(
            "accumulate() got neither micro_batch_size nor accumulation_steps, which takes it back, but other options: "
            "pass one of the two numbers"
        )
    fitted: Any = model
    step = FitStep.of(fitted)
    checks.check_nnx()
    checks.check_loss(loss, weight)
    if loss is None and (micro_batch_size is not None or accumulation_steps is not None):
        checks.check_train_step(fitted, is_ours=step is not None and step.replaces("train_step"))
    if fitted.compiled:
        checks.check_optimizer(fitted.optimizer)
    check_choice("batch_norm", batch_norm, get_args(Mode))
    backend = _backend(is_windowed=accumulation_steps is not None)
    own = None if loss is None else Own(loss, weight)
    new = FitStep(fitted, backend, micro_batch_size or 0, accumulation_steps or 0, batch_norm, own)
    if step is not None:
        step.detach()
    if micro_batch_size is not None or accumulation_steps is not None:
        new.attach()
    fitted.train_function = fitted.test_function = None  # compiled with the old step
    return model


def _backend(*, is_windowed: bool) -> Callable[[FitStep], Backend]:
    """The part of the step for Keras's backend, imported here so that no other framework is imported."""
    name = keras.backend.backend()
    if name not in ("tensorflow", "jax", "torch"):
        raise OptionError(f"Keras runs on {name}, which cannot train: set KERAS_BACKEND to tensorflow, jax or torch")
    cut: Callable[[FitStep], Backend] = import_module(f".backends.{name}", __package__).BackendStep
    if not is_windowed:
        return cut
    passes = import_module(f".windows.{name}", __package__).BackendPasses
    return lambda step: WindowStep(step, passes, cut)
