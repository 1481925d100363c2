"""Keras tasks: a compiled model that is fitted, step by step."""

import inspect
import math
from typing import Any

import keras
import numpy as np

from ...core.errors import OptionError
from ...core.nonfinite import NonFinite, place_in
from ...core.step import Step
from ...core.verify.result import Verification
from ...keras import accumulate, verify
from ...keras.backends.step import FitStep
from ..config import Config
from ..errors import TaskError
from ..run import randomness
from ..run.memory import HostPeak
from ..task import Task, call_with, task_errors
from .engine import EPSILON, Engine, check_kind
from .keras_state import load_variables, state_of_variables

POLICIES = {"float32": "float32", "bf16": "mixed_bfloat16", "fp16": "mixed_float16"}


class KerasEngine(Engine):
    """The engine of Keras tasks. A step is a step of `fit`."""

    def __init__(self, task: Task, config: Config) -> None:
        self.task = task
        if config.device not in (None, "cpu"):
            raise OptionError(
                f"--device {config.device} does not work for Keras tasks, which use the device of their backend: "
                "leave it out"
            )
        self.device = f"chosen by {keras.backend.backend()}"
        keras.utils.set_random_seed(config.seed)
        randomness.seed_keras(config.seed)
        keras.config.set_dtype_policy(POLICIES[config.precision])
        self.micro_batch_size = config.micro_batch_size
        with task_errors():
            self.model = task.model()
        check_kind(task, self.model, keras.Model)
        if not self.model.compiled:
            self.model.compile(optimizer=make_optimizer(task, self.model, config), loss=task.loss)
        self._set_clipping(config.for_framework())
        with task_errors():
            accumulate(self.model, config.micro_batch_size, batch_norm=config.batch_norm)  # type: ignore[arg-type]
        self._nonfinite = NonFinite(config.on_nonfinite)  # type: ignore[arg-type]
        step: Any = FitStep.of(self.model)
        step.needs_finite_gradient, step.needs_finite_loss = True, self._nonfinite.needs_finite_loss
        self._num_steps = 0
        self._peak = HostPeak()

    def _set_clipping(self, options: dict[str, float]) -> None:
        """Sets what --clip-norm asks for, also if the task compiled the model itself."""
        optimizer = inner(self.model.optimizer)
        for name, value in options.items():
            for own in ("clipnorm", "clipvalue"):
                if (limit := getattr(optimizer, own, None)) is not None:
                    raise OptionError(
                        f"the optimizer of {self.task.name} has {own}={limit}, and Keras clips in one way only: "
                        "leave out --clip-norm, or the argument of the optimizer"
                    )
            setattr(optimizer, name, value)

    def step(self, batch: Any) -> Step:
        num = self.num_samples(batch)
        before = self._num_applied()
        with task_errors():
            self.model.reset_metrics()
            loss = float(self.model.train_on_batch(*batch, return_dict=True)["loss"])
        self._num_steps += 1
        is_applied = self._num_applied() > before
        if is_applied:
            self._nonfinite.applied()
        elif self.model.trainable_variables:
            is_overflow = inner(self.model.optimizer) is not self.model.optimizer and math.isfinite(loss)
            self._nonfinite.skipped(self._num_steps, place_in((loss,)) or "the gradient", is_overflow=is_overflow)
            self._nonfinite.check(self._num_steps)
        return Step(
            terms=(loss,),
            weight=num,
            grad_norm=None,
            num_micro_batches=-(-num // self.micro_batch_size),
            micro_batch_size=self.micro_batch_size,
            is_applied=is_applied,
        )

    def _num_applied(self) -> int:
        """How many steps the optimizer has made."""
        return int(inner(self.model.optimizer).iterations.numpy())

    @property
    def is_stopped(self) -> bool:
        return self._nonfinite.is_stopped

    def set_lr(self, lr: float) -> None:
        set_rate(self.task, self.model.optimizer, lr)

    def num_samples(self, batch: Any) -> int:
        if not isinstance(batch, tuple) or not 2 <= len(batch) <= 3:
            raise TaskError(
                f"batches() of {self.task.name} gives a {type(batch).__name__}: give (x, y) or (x, y, sample_weight)"
            )
        return len(keras.tree.flatten(batch[0])[0])

    def weights(self) -> dict[str, np.ndarray]:
        return weights_of(self.model)

    def peak_bytes(self) -> int | None:
        return self._peak.num_bytes()

    def state(self) -> dict[str, Any]:
        variables = state_of_variables(self.model, self.model.optimizer)
        return {**variables, "num_steps": self._num_steps, "skipped": self._nonfinite.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        skipped = NonFinite.read(state["skipped"])
        load_variables(state, self.model, self.model.optimizer)
        self._num_steps = state["num_steps"]
        self._nonfinite.load_state_dict(skipped)

    def verify(self, batch: Any) -> Verification:
        self.num_samples(batch)  # raises unless it is (x, y) or (x, y, sample_weight)
        with task_errors():
            return verify(self.model, *batch, micro_batch_size=self.micro_batch_size)


def make_optimizer(task: Task, model: Any, config: Config) -> Any:
    """The task's optimizer, or Adam; wrapped in a LossScaleOptimizer for float16."""
    lr = config.scaled_lr
    if task.optimizer is None:
        optimizer = keras.optimizers.Adam(lr, epsilon=EPSILON)
    else:
        with task_errors():
            optimizer = call_with(task.optimizer, {"model": model, "lr": lr})
        if "lr" not in inspect.signature(task.optimizer).parameters:
            set_rate(task, optimizer, lr)
    if config.precision == "fp16" and not hasattr(optimizer, "inner_optimizer"):
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    return optimizer


def set_rate(task: Task, optimizer: Any, lr: float) -> None:
    """Sets the learning rate; raises TaskError if the optimizer has a schedule of its own."""
    try:
        inner(optimizer).learning_rate = lr
    except TypeError as error:  # Keras 3.15
        raise TaskError(
            f"the optimizer of {task.name} has a learning rate schedule of its own: give it a number, and pass "
            "--schedule"
        ) from error


def inner(optimizer: Any) -> Any:
    """The optimizer inside of a LossScaleOptimizer, or the optimizer itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def weights_of(model: Any) -> dict[str, np.ndarray]:
    """The weights of a model by their path, without the seeds of random layers."""
    return {getattr(v, "path", v.name): np.asarray(v) for v in getattr(model, "weights", model.variables)}
