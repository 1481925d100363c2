"""What the steps of all backends share."""

from collections.abc import Callable
from typing import Any

import keras

from . import checks
from .loss import Form, wide


class FitStep:
    """The `train_step` of one model.

    It is set on the instance: the class stays what it is, and a saved model knows nothing of it.
    """

    replaces: tuple[str, ...] = ("train_step",)
    """The methods of the model that this object's methods of the same names stand in for."""

    def __init__(self, model: Any, micro_batch_size: int) -> None:
        self.model = model
        self.micro_batch_size = micro_batch_size
        self.has_told_batch_norm = False
        self._forms: dict[Any, Form] = {}
        self._compiled: Any = None

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
        return self._forms[key]

    @property
    def dtype(self) -> str:
        """The dtype in which losses and weights add up."""
        compiled = self.model._compile_loss
        return wide(keras.config.floatx() if compiled is None else compiled.dtype)

    def train_step(self, *args: Any) -> Any:
        raise NotImplementedError
