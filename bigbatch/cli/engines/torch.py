"""PyTorch tasks."""

import copy
import inspect
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import default_convert

from ...core.errors import OptionError
from ...core.step import Step
from ...core.verify.result import Verification
from ...core.weight import as_terms
from ...torch import Accumulator
from ...torch import batch as nest
from ...torch.arrays import from_array, to_array
from ...torch.checkpoints import load_state, parts_of, state_of
from ..config import Config
from ..errors import TaskError
from ..run import randomness
from ..run.memory import HostPeak
from ..run.ranks import Launch
from ..task import Task, call_with, task_errors
from .engine import EPSILON, Engine, check_kind, scores_of


class TorchEngine(Engine):
    """The engine of PyTorch tasks."""

    to_array = staticmethod(to_array)
    from_array = staticmethod(from_array)

    def __init__(self, task: Task, config: Config, ranks: Launch) -> None:
        self.task, self.ranks, self.seed = task, ranks, config.seed
        self._device = ranks.join(_device_of(config.device))
        self.device = str(self._device)
        torch.manual_seed(config.seed)
        with task_errors():
            self.model = task.model()
        check_kind(task, self.model, nn.Module)
        self.model.to(self._device)
        self._optimizers = self._make_optimizers(config.scaled_lr)
        self._lrs = [group["lr"] / config.scaled_lr for group in self._groups()]
        self.micro_batch_size = config.micro_batch_size
        self.accumulator = Accumulator(
            ranks.wrap(self.model),
            self._optimizers,
            task.loss,
            micro_batch_size=config.micro_batch_size,
            weight=task.weight,
            **task.aux_options(),
            **config.for_framework(),
        )
        self._parts = {**parts_of(self.accumulator), "model": self.model}
        self._peak: HostPeak | None = None

    def _make_optimizers(self, lr: float) -> list[torch.optim.Optimizer]:
        if self.task.optimizer is None:
            return [torch.optim.AdamW(self.model.parameters(), lr, eps=EPSILON)]
        with task_errors():
            made = call_with(self.task.optimizer, {"model": self.model, "lr": lr})
        optimizers = list(made) if isinstance(made, list | tuple) else [made]
        for optimizer in optimizers:
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise TaskError(
                    f"optimizer() of {self.task.name} returned a {type(optimizer).__name__}: return a "
                    "torch.optim.Optimizer, or a list of several"
                )
            if "lr" not in inspect.signature(self.task.optimizer).parameters:
                for group in optimizer.param_groups:
                    group["lr"] = lr
        return optimizers

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def step(self, batch: Any) -> Step:
        batch = self._on_device(self.ranks.own_part(default_convert(batch)))
        if self._peak is None:
            if batch is not None:
                self._warm_up(batch)
            self._peak = HostPeak()
            if self._device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self._device)
                self._before = torch.cuda.memory_allocated(self._device)
        with task_errors(), self.ranks.own_random(self.seed, self.accumulator.num_steps):
            return self.accumulator.step(batch)

    def _warm_up(self, batch: Any) -> None:
        """Runs two samples through a copy of the model, so that what libraries allocate once is not counted."""
        with suppress(Exception), randomness.preserved():  # an error will show in the step
            loss = self.task.loss(copy.deepcopy(self.model), nest.cut(batch, 2)[0][0])
            torch.autograd.backward(list(as_terms(loss[0] if self.task.has_aux else loss)))

    def _on_device(self, batch: Any) -> Any:
        return nest.map_tensors(lambda tensor: tensor.to(self._device, non_blocking=True), batch)

    def set_lr(self, lr: float) -> None:
        """Sets the rate; groups with different rates keep their ratios."""
        for group, ratio in zip(self._groups(), self._lrs, strict=True):
            group["lr"] = lr * ratio

    def num_samples(self, batch: Any) -> int:
        return nest.batch_size(default_convert(batch))

    def weights(self) -> dict[str, np.ndarray]:
        values = self.model.state_dict()
        return {name: _weight_of(value) for name, value in values.items() if isinstance(value, torch.Tensor)}

    def scores(self) -> dict[str, float]:
        self.model.eval()
        try:
            with torch.no_grad():
                return scores_of(self.task, self.model)
        finally:
            self.model.train()

    def peak_bytes(self) -> int | None:
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device) - self._before)
        return None if self._peak is None else self._peak.num_bytes()

    def state(self) -> Any:
        return state_of(self._parts)

    def load(self, state: Any) -> None:
        load_state(self._parts, state)

    def interrupt(self) -> None:
        self.accumulator.interrupt()

    @property
    def is_stopped(self) -> bool:
        return self.accumulator.is_stopped

    def verify(self, batch: Any) -> Verification:
        batch = self._on_device(default_convert(batch))
        with task_errors():
            return self.accumulator.verify(batch)


def _weight_of(tensor: torch.Tensor) -> np.ndarray:
    """A weight for the file: dense, and in a dtype that NumPy and safetensors have."""
    tensor = tensor.detach().cpu().to_dense()
    if tensor.dtype is torch.complex128:
        return torch.view_as_real(tensor.resolve_conj()).numpy()
    is_known = not tensor.is_floating_point() or tensor.dtype in (torch.float16, torch.float32, torch.float64)
    return (tensor if is_known else tensor.float()).numpy()


def _device_of(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise OptionError(f"--device {name} cannot be used here ({str(error).splitlines()[0]}): pass cpu") from error
    return device
