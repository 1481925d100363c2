"""What the steps of all backends share."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import keras

from ...core.errors import BigBatchWarning
from .. import checks
from ..loss import Batch, Form, wide
from ..verify.trial import Found, Trial, try_out


class FitStep:
    """The `train_step` of one model.

    It is set on the instance: the class stays what it is, and a saved model knows nothing of it.
    """

    replaces: tuple[str, ...] = ("train_step", "make_train_function")
    """The methods of the model that this object's methods of the same names stand in for."""

    def __init__(self, model: Any, micro_batch_size: int) -> None:
        self.model = model
        self.micro_batch_size = micro_batch_size
        self.has_told_batch_norm = False
        self._forms: dict[Any, Form] = {}
        self._compiled: Any = None
        self._found = Found()

    @staticmethod
    def of(model: Any) -> "FitStep | None":
        """The step that accumulate() set on this model, if any."""
        step = getattr(vars(model).get("train_step"), "__self__", None)
        return step if isinstance(step, FitStep) else None

    def attach(self) -> None:
        for name in self.replaces:
            setattr(self.model, name, getattr(self, name))

    def detach(self) -> None:
        for name in self.replaces:
            delattr(self.model, name)

    def check(self) -> None:
        """What only shows when the first step begins: compile() and building may come after accumulate()."""
        checks.check_optimizer(self.model.optimizer)
        checks.check_layers(self.model)
        if not self.has_told_batch_norm:
            self.has_told_batch_norm = True
            checks.tell_batch_norm(self.model)

    def call(self, x: Any, *, training: bool = True) -> Any:
        """The model's output, as Keras's own step asks for it."""
        return self.model(x, training=training) if self.model._call_has_training_arg else self.model(x)

    def scale(self, loss: Any) -> Any:
        """The loss as the optimizer wants it: larger with a LossScaleOptimizer."""
        return loss if self.model.optimizer is None else self.model.optimizer.scale_loss(loss)

    def form(self, specs: Any, look: Callable[[], Form]) -> Form:
        """The form of batches of these types, which is found once for each compile()."""
        compiled = (self.model._compile_loss, self.model._compile_metrics)
        if self._compiled is None or any(a is not b for a, b in zip(self._compiled, compiled, strict=True)):
            self._compiled = compiled
            self._forms.clear()
        key = str(specs)
        if key not in self._forms:
            self._forms[key] = look()
        return self._found.applied_to(self._forms[key])

    def make_train_function(self, force: bool = False) -> None:
        """Keras's own, but for the first batch, on which the loss is tried before the step."""
        model = self.model
        if model.train_function is not None and not force:
            return
        type(model).make_train_function(model, force)
        function = model.train_function
        is_tried = False

        def train_function(*args: Any) -> Any:
            nonlocal is_tried
            if not is_tried:
                is_tried = True
                data, args = self.peek(*args)
                self._found = self.try_out(keras.utils.unpack_x_y_sample_weight(data), *args)
            return function(*args)

        model.train_function = train_function

    def peek(self, *args: Any) -> tuple[Any, tuple[Any, ...]]:
        """The first batch in what a train_function is called with, and the same to call it with."""
        raise NotImplementedError

    def try_out(self, batch: Batch, *args: Any) -> Found:
        """Tries the loss on the first batch."""
        raise NotImplementedError

    def trial(
        self, batch: Batch, cut: Any, values: Any = None, alone: Callable[[], Any] = lambda: nullcontext(1)
    ) -> Found:
        """Tries the loss outside of what fit compiles, and leaves no trace.

        `values` are pairs of variables and values, where the variables do not hold them.
        `cut(batch, start, num)` takes rows; inside `alone()`, which gives the number of replicas, there is only one.
        """
        self.check()
        if not checks.is_even(batch):
            return Found()  # the step says what is wrong with it
        model = self.model
        trial = Trial(model, batch, self.micro_batch_size, self.call, cut, alone)
        if values is None:
            values = [(v, v.value) for v in model.trainable_variables]  # or regularizers would find none (Keras 3.15)
        with keras.StatelessScope(values, collect_losses=True):
            found = try_out(trial)
            model._clear_losses()
        for sentence in trial.told:
            warnings.warn(sentence, BigBatchWarning, stacklevel=2)
        return found

    @property
    def dtype(self) -> str:
        """The dtype in which losses and weights add up."""
        compiled = self.model._compile_loss
        return wide(keras.config.floatx() if compiled is None else compiled.dtype)

    def train_step(self, *args: Any) -> Any:
        raise NotImplementedError
