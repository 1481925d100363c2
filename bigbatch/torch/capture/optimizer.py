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
    """Replays the step for as long as nothing that it was recorded with changes.

    The learning rate and the like are numbers that a recording fixes. So a step is recorded when the one before it had
    the same: never under a schedule that changes a number each time, once under one that changes a tensor.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device, pool: Callable[[], Any]) -> None:
        self._optimizer: Any = optimizer
        self._device = device
        self._pool = pool
        self._before: list[Hashable] = []
        self._graph: torch.cuda.CUDAGraph | None = None
        self._has_failed = False

    def step(self) -> bool:
        """Whether the step was made."""
        if not self._can_be_recorded():
            return False
        now = self._fingerprint()
        if now != self._before:
            self._before = now
            self._graph = None
            return False
        if self._graph is None and not self._has_failed:
            try:
                with marked_capturable(self._optimizer.param_groups):
                    self._graph = record(self._optimizer.step, self._device, self._pool())
            except CaptureError:  # nothing was run, so the step can still be made
                self._has_failed = True
        if self._graph is None:
            return False
        self._graph.replay()
        return True

    def _can_be_recorded(self) -> bool:
        """SGD has no state on the host, nor have others of torch's that are fused or made with capturable=True.

        Hooks would not be called.
        """
        optimizer = self._optimizer
        kind = type(optimizer)
        return (
            kind.__module__.startswith("torch.optim.")
            and all(
                group["capturable"] or group.get("fused") if "capturable" in group else is_plain_sgd(kind, group)
                for group in optimizer.param_groups
            )
            and not has_step_hooks(optimizer)
        )

    def _fingerprint(self) -> list[Hashable]:
        found: list[Hashable] = [_seen(getattr(self._optimizer, "found_inf", None))]
        state = self._optimizer.state
        for group in self._optimizer.param_groups:
            found += [_seen(value) for name, value in group.items() if name != "params"]
            for p in group["params"]:
                found += (p.data_ptr(), None if (g := p.grad) is None else g.data_ptr())
                found += [_seen(value) for value in state[p].values()] if p in state else ()
        return found


def is_plain_sgd(kind: type, group: dict[str, Any]) -> bool:
    """One that has no state on the host, unless it reads its learning rate from a tensor."""
    return kind is torch.optim.SGD and not isinstance(group["lr"], Tensor)


@contextmanager
def marked_capturable(groups: list[dict[str, Any]]) -> Iterator[None]:
    """Torch insists on the mark, which changes nothing for those that are fused (2.11, 2.13)."""
    unmarked = [group for group in groups if group.get("capturable") is False]
    for group in unmarked:
        group["capturable"] = True
    try:
        yield
    finally:
        for group in unmarked:
            group["capturable"] = False


def _seen(value: Any) -> Hashable:
    """A number as it is, on the host too; a tensor by its place, since its value is read when the step is replayed."""
    if isinstance(value, Tensor):
        return value.item() if value.is_cpu and value.numel() == 1 else value.data_ptr()
    if type(value) is tuple:
        return tuple(map(_seen, value))
    return value if type(value) in PLAIN else id(value)
