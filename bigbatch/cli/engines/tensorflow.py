"""TensorFlow tasks."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ...core.errors import OptionError
from ...core.step import Step
from ...core.verify.result import Verification
from ...tensorflow import Accumulator
from ...tensorflow.batch import Layout, batch_size
from ..config import Config
from ..run import randomness
from ..run.memory import HostPeak
from ..task import Task, task_errors
from .engine import Engine, check_kind
from .keras import POLICIES, make_optimizer, set_rate, weights_of
from .keras_state import load_variables, state_of_variables


class TensorFlowEngine(Engine):
    """The engine of TensorFlow tasks."""

    def __init__(self, task: Task, config: Config) -> None:
        self.task = task
        self.device = _device_of(config.device)
        keras.utils.set_random_seed(config.seed)
        randomness.seed_keras(config.seed)
        tf.random.set_global_generator(tf.random.Generator.from_seed(config.seed))  # else its seed is another each time
        keras.config.set_dtype_policy(POLICIES[config.precision])
        with tf.device(self.device), task_errors():
            self.model = task.model()
        check_kind(task, self.model, tf.Module if not isinstance(self.model, keras.Model) else keras.Model)
        self.optimizer = make_optimizer(task, self.model, config)
        self.micro_batch_size = config.micro_batch_size
        with tf.device(self.device):
            self.accumulator = Accumulator(
                self.model,
                self.optimizer,
                task.loss,
                micro_batch_size=config.micro_batch_size,
                weight=task.weight,
                **task.aux_options(),
                **config.for_framework(),
            )
        self._peak = HostPeak()

    def step(self, batch: Any) -> Step:
        with tf.device(self.device), task_errors():
            return self.accumulator.step(batch)

    def set_lr(self, lr: float) -> None:
        set_rate(self.task, self.optimizer, lr)

    def num_samples(self, batch: Any) -> int:
        return batch_size(Layout(batch))

    def weights(self) -> dict[str, np.ndarray]:
        return weights_of(self.model)

    def peak_bytes(self) -> int | None:
        if "GPU" in self.device:
            return int(tf.config.experimental.get_memory_info(self.device)["peak"])
        return self._peak.num_bytes()

    def state(self) -> dict[str, Any]:
        return state_of_variables(self.model, self.optimizer, accumulator=self._own_variables())

    def load(self, state: dict[str, Any]) -> None:
        load_variables(state, self.model, self.optimizer, accumulator=self._own_variables())

    def _own_variables(self) -> list[Any]:
        """The variables of the accumulator alone: how many steps it made, and how many in a row were skipped."""
        others = {id(variable) for part in (self.model, self.optimizer) for variable in part.variables}
        return [variable for variable in self.accumulator.variables if id(variable) not in others]

    @property
    def is_stopped(self) -> bool:
        return self.accumulator.is_stopped

    def verify(self, batch: Any) -> Verification:
        with tf.device(self.device), task_errors():
            return self.accumulator.verify(batch)


def _device_of(name: str | None) -> str:
    names = {device.device_type: device.name for device in tf.config.list_logical_devices()}
    if name is None:
        return names.get("GPU", names["CPU"]).replace("/device:", "/")
    wanted = {"cuda": "GPU", "gpu": "GPU", "cpu": "CPU"}.get(name.lower(), name)
    if wanted not in names:
        raise OptionError(f"--device {name} cannot be used here: TensorFlow sees {', '.join(sorted(names))}")
    return names[wanted].replace("/device:", "/")
