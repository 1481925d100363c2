"""What accumulate() puts in place of the step of `fit`: the part that all backends share."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Protocol

import keras

from ...core.errors import warn
from .. import checks, loss
from ..batch_norm import BatchNorms, Mode
from ..infer_reduction import Rows, infer_reduction
from ..loss import Batch, LossSpec, Own, Reductions, wide

Apply = Callable[[list[Any]], Any]


class Backend(Protocol):
    """What each backend adds: a step in micro-batches, and how to try the loss on the first batch."""

    replaces: dict[str, Any]
    """The methods of the model to replace, by name."""

    def before_fit(self) -> None:
        """Called whenever `fit` or `train_on_batch` asks for the train_function."""
        return

    def make_function(self, model: Any, force: bool) -> Callable[..., Any]:
        """Makes the train_function: by default Keras's own, which calls `train_step`."""
        type(model).make_train_function(model, force)
        function: Callable[..., Any] = model.train_function
        return function

    def first_batch(self, *args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, ...]]:
        """Reads the first batch, and returns it with arguments for the train_function that still yield it."""

    def if_finite(self, checked: list[Any], gradients: list[Any], apply: Apply, skip: Callable[[], Any]) -> Any:
        """Returns `apply(gradients)` if all numbers in `checked` are finite, else `skip()`."""

    def infer_reductions(self, batch: Batch, *args: Any, **kwargs: Any) -> Reductions:
        """Infers what the loss divides by; `args` are the arguments of the train_function."""


class FitStep:
    """The step of one model. It is set on the instance, so the class and saved models do not know about it."""

    def __init__(
        self,
        model: Any,
        backend: Callable[["FitStep"], Backend],
        micro_batch_size: int,
        accumulation_steps: int,
        batch_norm: Mode,
        own: Own | None,
    ) -> None:
        self.model = model
        self.micro_batch_size = micro_batch_size
        """0 if the data come in micro-batches."""
        self.accumulation_steps = accumulation_steps
        """0 if batches are cut."""
        self.norms = BatchNorms(model, batch_norm)
        self.options = {"batch_norm": batch_norm, **({} if own is None else own._asdict())}
        """What accumulate() was called with, besides the numbers."""
        self.own = None if own is None else own._replace(loss=self._recorded(own.loss))
        """The loss function that takes the place of the model's train_step, if any."""
        self.needs_finite_gradient = self.needs_finite_loss = False
        """What must be finite for a step to be applied. In `fit` nothing must, as without accumulate()."""
        self._has_warned = False
        self._specs: dict[Any, LossSpec] = {}
        self._compiled: tuple[Any, Any] | None = None
        self._reductions = Reductions()
        self._backend = backend(self)
        self._methods = {"make_train_function": self.make_train_function, **self._backend.replaces}

    @staticmethod
    def of(model: Any) -> "FitStep | None":
        """The step that accumulate() has set on this model, if any."""
        step = getattr(vars(model).get("make_train_function"), "__self__", None)
        return step if isinstance(step, FitStep) else None

    def replaces(self, name: str) -> bool:
        """Whether it takes the place of this method of the model."""
        return name in self._methods

    def attach(self) -> None:
        self._before = {name: vars(self.model)[name] for name in self._methods if name in vars(self.model)}
        for name, method in self._methods.items():
            setattr(self.model, name, method)

    def detach(self) -> None:
        for name in self._methods:
            delattr(self.model, name)
        for name, method in self._before.items():
            setattr(self.model, name, method)

    # --- what Keras calls -------------------------------------------------------------------------------------

    def make_train_function(self, force: bool = False) -> None:
        """The backend's, except that what the loss divides by is inferred before the first step."""
        model = self.model
        self._backend.before_fit()
        if model.train_function is not None and not force:
            return
        function = self._backend.make_function(model, force)
        is_first = True

        def train_function(*args: Any) -> Any:
            nonlocal is_first
            if is_first:
                is_first = False
                data, args = self._backend.first_batch(*args)
                self._reductions = self._backend.infer_reductions(keras.utils.unpack_x_y_sample_weight(data), *args)
            return function(*args)

        model.train_function = train_function

    # --- what backends call -----------------------------------------------------------------------------------

    def check(self) -> None:
        """Checks what is not known before the first step: compile() and building may come after accumulate()."""
        checks.check_optimizer(self.model.optimizer)
        checks.check_layers(self.model)
        self.norms.find()
        if not self._has_warned:
            self._has_warned = True
            checks.warn_of_layers(self.model, self.norms.mode)

    def call(self, x: Any, *, training: bool = True) -> Any:
        """The model's output, as Keras's own step asks for it; in training, `norms` records.

        None if there is a loss function, which calls the model itself.
        """
        if self.own is not None:
            return None
        options = {"training": training} if self.model._call_has_training_arg else {}
        with self.norms.recording() if training else nullcontext():
            return self.model(x, **options)

    def _recorded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def loss(*args: Any) -> Any:
            with self.norms.recording():
                return function(*args)

        return loss

    def logs(self, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> Any:
        """Updates the metrics with a batch, unless the loss function does, and returns their values."""
        if self.own is not None:
            return self.model.get_metrics_result()
        return self.model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)

    def update_norms(self, pooled: Any) -> None:
        """Updates moving statistics with those of the whole batch."""
        for variable, value in self.norms.updated(pooled):
            variable.assign(value)

    def scale(self, loss: Any) -> Any:
        """The loss times the optimizer's loss scale."""
        return loss if self.model.optimizer is None else self.model.optimizer.scale_loss(loss)

    def update(self, gradients: list[Any], loss: Any, apply: Apply, skip: Callable[[], Any] = lambda: None) -> Any:
        """Returns `apply(gradients)`; or `skip()`, if something is not finite that must be.

        A LossScaleOptimizer checks the gradient itself, and lowers its scale.
        """
        checked = [loss] if self.needs_finite_loss else []
        if self.needs_finite_gradient and not hasattr(self.model.optimizer, "inner_optimizer"):
            checked += [gradient for gradient in gradients if gradient is not None]
        if not checked:
            return apply(gradients)
        return self._backend.if_finite(checked, gradients, apply, skip)

    @property
    def dtype(self) -> str:
        """The dtype in which losses and weights add up."""
        compiled = self.model._compile_loss
        return wide(keras.config.floatx() if compiled is None else compiled.dtype)

    def spec(self, batch: Batch, inspect: Callable[[], LossSpec]) -> LossSpec:
        """The spec for batches like this one; `inspect()` finds it, once for each compile().

        Micro-batches that the user cuts may differ in all axes, and only the number of axes matters there.
        """
        compiled = (self.model._compile_loss, self.model._compile_metrics)
        if self._compiled is None or any(a is not b for a, b in zip(self._compiled, compiled, strict=True)):
            self._compiled = compiled
            self._specs.clear()

        def leaf_type(leaf: Any) -> Any:
            return None if leaf is None else (leaf.shape[1:] if self.micro_batch_size else len(leaf.shape), leaf.dtype)

        key = str(keras.tree.map_structure(leaf_type, batch))
        if key not in self._specs:
            self._specs[key] = inspect()
        return self._specs[key].with_reductions(self._reductions)

    def loss_of_batch(self, spec: LossSpec, batch: Batch, y_pred: Any, layer_losses: Any, value: Any) -> Any:
        """The loss of the whole batch for the history, from its outputs; updates the metrics that belong to the loss.

        Args:
            spec: The spec of the batch.
            batch: The whole batch.
            y_pred: The model's outputs for it, if anything needs them.
            layer_losses: The part of the loss that comes from model.losses.
            value: The loss that the micro-batches add up to.
        """
        if not spec.needs_outputs or spec.reductions.is_bound:
            return value
        x, y, sample_weight = batch
        with loss.losses_of(self.model, [layer_losses] if spec.has_layer_losses else []):
            return self.model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)

    def infer_eagerly(self, batch: Batch, rows: Rows, values: Any = None) -> Reductions:
        """Infers what the loss divides by, outside of what fit compiles; restores everything that this changes.

        Args:
            batch: The batch to take samples from.
            rows: `rows(tensor, start, stop)` returns rows of a tensor.
            values: Pairs of variables and values, if the variables do not hold their values themselves.
        """
        self.check()
        model = self.model
        if values is None:
            values = [(v, v.value) for v in model.trainable_variables]  # or regularizers would find none (Keras 3.15)
        with keras.StatelessScope(values, collect_losses=True):
            size = self.micro_batch_size or checks.batch_size(batch)
            reductions, messages = infer_reduction(
                model, batch, size, self.call, rows, self.own, is_cut=self.micro_batch_size > 0
            )
            model._clear_losses()
        for message in messages:
            warn(message)
        return reductions
