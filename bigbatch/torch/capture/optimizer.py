"""The optimizer's step as a CUDA graph, where the optimizer allows it."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...core.errors import CaptureError
from ..internals import has_step_hooks
from .fingerprint import PLAIN
from .graph import record


class CapturedOptimizer:
    """Replays the optimizer's step for as long as nothing changes that it was recorded with.

    A recording fixes hyperparameters that are Python numbers. So a step is recorded when the one before had the same
    ones: never if a schedule changes a number each time, and once if it changes a tensor.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device, pool: Callable[[], Any]) -> None:
        self._optimizer: Any = optimizer
        self._device = device
        self._pool = pool
        self._fingerprint: list[Hashable] = []
        self._graph: torch.cuda.CUDAGraph | None = None
        self._has_failed = False

    def step(self) -> bool:
        """Makes the step if it can be captured; returns whether it was made."""
        if self._has_failed or not self._can_be_recorded():
            return False
        now = self._seen()
        if now != self._fingerprint:
            self._fingerprint, self._graph = now, None
            return False
        if self._graph is None:
            try:
                with _marked_capturable(self._optimizer.param_groups):
                    self._graph = record(self._optimizer.step, self._device, self._pool())
            except CaptureError:  # nothing was run, so the step can still be made
                self._has_failed = True
                return False
        self._graph.replay()
        return True

    def _can_be_recorded(self) -> bool:
        """Whether the optimizer keeps no state on the host, and has no hooks, which a replay would not call."""
        kind = type(self._optimizer)
        for group in self._optimizer.param_groups:
            if "capturable" in group:
                is_on_device = group["capturable"] or group.get("fused")
            else:
                is_on_device = kind is torch.optim.SGD and not isinstance(group["lr"], Tensor)
            if not is_on_device:
                return False
        return kind.__module__.startswith("torch.optim.") and not has_step_hooks(self._optimizer)

    def _seen(self) -> list[Hashable]:
        """Everything that a recorded step depends on besides the values of tensors."""
        found = [_constant(getattr(self._optimizer, "found_inf", None))]
        state = self._optimizer.state
        for group in self._optimizer.param_groups:
            found += [_constant(value) for name, value in group.items() if name != "params"]
            for p in group["params"]:
                found += (p.data_ptr(), None if p.grad is None else p.grad.data_ptr())
                found += [_constant(value) for value in state[p].values()] if p in state else ()
        return found


def _constant(value: Any) -> Hashable:
    """What a recording fixes: a number, also one in a tensor on the host, and the place of any other tensor."""
    if isinstance(value, Tensor):
        return value.item() if value.is_cpu and value.numel() == 1 else value.data_ptr()
    if type(value) is tuple:
        return tuple(map(_constant, value))
    return value if type(value) in PLAIN else id(value)


@contextmanager
def _marked_capturable(groups: list[dict[str, Any]]) -> Iterator[None]:
    """Torch requires the mark, although it changes nothing for fused optimizers (2.11, 2.13)."""
    unmarked = [group for group in groups if group.get("capturable") is False]
    for group in unmarked:
        group["capturable"] = True
    try:
        yield
    finally:
        for group in unmarked:
            group["capturable"] = False
