"""Mixed precision: the dtype in which the loss is computed, and the GradScaler."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from ..core.errors import OptionError
from ..core.options import check_choice
from .internals import forget_unscaling
from .sums import Sums

_DTYPES = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16}
LOW = (torch.bfloat16, torch.float16)


class Precision:
    """Autocast around the loss and, for float16, a GradScaler around the step."""

    def __init__(
        self,
        precision: str | None,
        scaler: GradScaler | None,
        parameters: Sequence[Tensor],
        is_widened: Callable[[Tensor], bool],
    ) -> None:
        check_choice("precision", precision, tuple(_DTYPES))
        if scaler is not None and not callable(getattr(scaler, "is_enabled", None)):
            raise OptionError(f"scaler is {scaler!r}: pass a torch.amp.GradScaler, or None")
        self.device = parameters[0].device.type
        self.dtype = _DTYPES[precision]
        if scaler is not None and not scaler.is_enabled():
            scaler = None  # does nothing, like none
        self.scaler = GradScaler(self.device) if precision == "fp16" and scaler is None else scaler
        if self.scaler is not None and (wide := [p for p in parameters if is_widened(p)]):
            raise OptionError(
                f"a GradScaler wants parameters whose gradients add up in their own dtype but {len(wide)} of "
                f"{len(parameters)} are {wide[0].dtype}: call model.float() and leave accumulate_dtype out"
            )

    def autocast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.dtype is None else torch.autocast(self.device, self.dtype)

    def loss_scale(self) -> Tensor | None:
        """What the GradScaler multiplies losses by, as a tensor that is not waited for."""
        return None if self.scaler is None else self.scaler.scale(torch.ones((), device=self.device))

    def unscale(self, optimizers: Iterable[torch.optim.Optimizer], sums: Sums) -> None:
        """Divides the finished gradient by that scale."""
        assert self.scaler is not None
        self.forget(optimizers)  # a `backward` that no `scaler.update()` followed
        for parameter, gradient in sums.items():
            parameter.grad = gradient
        for optimizer in optimizers:
            self.scaler.unscale_(optimizer)
        for parameter in sums:
            parameter.grad = None

    def forget(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Lets the next gradient be unscaled anew, after an error in the middle of a step."""
        if self.scaler is not None:
            for optimizer in optimizers:
                forget_unscaling(self.scaler, optimizer)
