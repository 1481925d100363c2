"""The interface of an engine, and what all engines share."""

import importlib
import random
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from ...core.checkpoint.serialize import Array, as_array
from ...core.step import Step
from ...core.verify.result import Verification
from ..config import Config
from ..errors import TaskError
from ..run.ranks import Launch
from ..task import Task, missing_extras, task_errors

EPSILON = 1e-5
"""Adam's epsilon if the task has no optimizer. With the usual 1e-8, rounding would move weights without a gradient."""

_CLASSES = {"torch": "TorchEngine", "tensorflow": "TensorFlowEngine", "keras": "KerasEngine", "jax": "JaxEngine"}


class Engine(Protocol):
    """A model, its optimizer and its accumulator: one class for each framework."""

    task: Task
    model: Any
    device: str

    def step(self, batch: Any) -> Step:
        """Makes one step on a batch of the task."""

    def set_lr(self, lr: float) -> None:
        """Sets the learning rate of the next step."""

    def num_samples(self, batch: Any) -> int:
        """How many samples a batch of the task has."""

    def weights(self) -> dict[str, np.ndarray]:
        """The weights of the model, by name."""

    def scores(self) -> dict[str, float]:
        """What the task's evaluate() returns."""
        return scores_of(self.task, self.model)

    def peak_bytes(self) -> int | None:
        """What training added to the memory in use, at its peak; None if that is not known."""

    def state(self) -> Any:
        """Everything needed to resume, except the global random numbers."""

    def load(self, state: Any) -> None:
        """Loads what `state` returned; raises StateError before anything is changed if it does not fit."""

    def verify(self, batch: Any) -> Verification:
        """Compares the accumulated gradient of a batch with that of the full batch."""

    @staticmethod
    def to_array(value: Any) -> Array | None:
        """An array of the framework, on the host; None if it is something else."""
        return as_array(value)

    @staticmethod
    def from_array(array: Array) -> Any:
        """The array as `load` expects it."""
        return array.numpy()

    def interrupt(self) -> None:
        """Makes the current step raise `Interrupted`, if the framework can resume in the middle of a step."""
        return

    @property
    def is_stopped(self) -> bool:
        """Whether the run must end, as `--on-nonfinite stop` asks for."""
        return False


def make_engine(task: Task, config: Config, ranks: Launch) -> Engine:
    """Creates the engine of the task. Its framework is imported here and not before."""
    random.seed(config.seed)
    np.random.seed(config.seed)
    with missing_extras(task.name, task.framework):
        module = importlib.import_module(f".{task.framework}", __package__)
    kind = getattr(module, _CLASSES[task.framework])
    engine: Engine = kind(task, config, ranks) if task.framework == "torch" else kind(task, config)
    return engine


def scores_of(task: Task, model: Any) -> dict[str, float]:
    """What the task's evaluate() returns, as plain numbers."""
    if task.evaluate is None:
        return {}
    with task_errors():
        scores = task.evaluate(model)
    if not isinstance(scores, Mapping):
        raise TaskError(
            f"evaluate() of {task.name} returned a {type(scores).__name__}: return a dict such as {{'accuracy': 0.98}}"
        )
    return {_name_of(task, name): _number_of(task, name, value) for name, value in scores.items()}


def _name_of(task: Task, name: Any) -> str:
    if not isinstance(name, str):
        raise TaskError(f"evaluate() of {task.name} returned {name!r} as the name of a score: return text as names")
    return name


def _number_of(task: Task, name: str, value: Any) -> float:
    """A score as a plain number, which may be NaN; raises TaskError for anything that is no number."""
    try:
        if isinstance(value, str | bytes):
            raise TypeError("text is not a number")
        return float(value)
    except Exception as error:  # each framework has its own for an array of several numbers
        shape = f" of shape {list(value.shape)}" if hasattr(value, "shape") else ""
        raise TaskError(
            f"evaluate() of {task.name} returned a {type(value).__name__}{shape} as {name!r}: return one number for "
            "each name"
        ) from error


def check_kind(task: Task, model: Any, kind: type) -> None:
    """Raises TaskError unless model() returned a model of this type."""
    if not isinstance(model, kind):
        raise TaskError(
            f"model() of {task.name} returned a {type(model).__name__}: return a {kind.__module__.split('.')[0]} "
            f"{kind.__name__}"
        )
