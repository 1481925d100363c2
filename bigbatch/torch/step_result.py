"""What became of a step: known at once, or when the device has got there."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks


class Outcome:
    """The norm of the gradient, and whether it was applied: only if it is finite, and the loss if that matters."""

    def __init__(self, norm: float, *, is_applied: bool) -> None:
        self._norm = norm
        self._is_applied = is_applied

    def norm(self) -> float:
        return self._norm

    def is_applied(self) -> bool:
        return self._is_applied


class Later(Outcome):
    """On its way from the device. Whoever asks waits for that step, not for what was started after it."""

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
        """Says once what became of it: of one that is not finite, which parameter was the first with such a norm."""
        if self._waiting is not None:
            on_host, arrived = self._waiting
            arrived.synchronize()
            *norms, self._norm = on_host.tolist()
            self._waiting = None
            if math.isfinite(self._norm):
                self._if_applied()
            else:
                self._if_skipped(next((number for number, norm in enumerate(norms) if not math.isfinite(norm)), None))
        return self._norm

    def is_applied(self) -> bool:
        return math.isfinite(self.norm())


def can_be_skipped_on_device(optimizer: Any, parameters: Iterable[Tensor]) -> bool:
    """Whether the optimizer itself leaves out a step that a tensor on the device tells it to leave out.

    Torch's fused ones do, for the sake of GradScaler. Hooks would be called all the same.
    """
    return (
        getattr(optimizer, "_step_supports_amp_scaling", False)
        and type(optimizer).__module__.startswith("torch.optim.")
        and all(group.get("fused") for group in optimizer.param_groups)
        and not has_hooks(optimizer)
        and not lacks_momentum(optimizer, parameters)
    )


def lacks_momentum(optimizer: Any, parameters: Iterable[Tensor]) -> bool:
    """Whether this step makes the momentum of fused SGD: left out, that is memory nobody wrote (torch 2.13)."""
    if type(optimizer) is not torch.optim.SGD or not any(group["momentum"] for group in optimizer.param_groups):
        return False
    state = optimizer.state
    return any(p not in state or state[p].get("momentum_buffer") is None for p in parameters)


def has_hooks(optimizer: Any) -> bool:
    """Whether anybody wants to know of each step."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
    )
