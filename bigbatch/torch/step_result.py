"""The result of a step, now or once the device has finished it; and which optimizers can skip a step by themselves."""

import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .internals import has_step_hooks


class StepResult(NamedTuple):
    """What is known once a step is finished: the norm of its gradient, and whether it was applied."""

    norm: float
    is_applied: bool


class PendingResult:
    """A StepResult that is on its way from the device: here `norm` and `is_applied` are methods, which wait.

    Reading it waits for that step, not for what was started after it, and calls `if_applied`, or `if_skipped` with the
    number of the first parameter whose norm is not finite.
    """

    def __init__(
        self, norms: Tensor, total: Tensor, *, if_applied: Callable[[], None], if_skipped: Callable[[int | None], None]
    ) -> None:
        on_device = torch.cat([norms, total.reshape(1)])
        on_host = torch.empty(on_device.shape, dtype=on_device.dtype, pin_memory=True)
        on_host.copy_(on_device, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(on_device.device))  # the current device may be another one
        self._waiting: tuple[Tensor, Any] | None = (on_host, arrived)
        self._if_applied, self._if_skipped = if_applied, if_skipped

    def norm(self) -> float:
        """The norm; the first call also reports whether the step was applied."""
        if self._waiting is not None:
            on_host, arrived = self._waiting
            arrived.synchronize()
            *norms, total = on_host.tolist()
            self._norm: float = total
            self._waiting = None
            if math.isfinite(self._norm):
                self._if_applied()
            else:
                self._if_skipped(next((number for number, norm in enumerate(norms) if not math.isfinite(norm)), None))
        return self._norm

    def is_applied(self) -> bool:
        return math.isfinite(self.norm())


def can_be_skipped_on_device(optimizer: Any, parameters: Collection[Tensor]) -> bool:
    """Whether the optimizer itself skips a step if a tensor on the device says so.

    Torch's fused optimizers do, for GradScaler. Their hooks would still be called.
    """
    return (
        getattr(optimizer, "_step_supports_amp_scaling", False)
        and type(optimizer).__module__.startswith("torch.optim.")
        and all(group.get("fused") for group in optimizer.param_groups)
        and not has_step_hooks(optimizer)
        and not _lacks_momentum(optimizer, parameters)
    )


def _lacks_momentum(optimizer: Any, parameters: Collection[Tensor]) -> bool:
    """Whether this step creates the momentum of fused SGD: skipped, that is uninitialised memory (torch 2.13)."""
    if type(optimizer) is not torch.optim.SGD or not any(group["momentum"] for group in optimizer.param_groups):
        return False
    state = optimizer.state
    stepped = [p for group in optimizer.param_groups for p in group["params"] if p in parameters]
    return any(p not in state or state[p].get("momentum_buffer") is None for p in stepped)
