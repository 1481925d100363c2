"""Mixed precision: in which dtype the loss is computed, and how small gradients are kept from vanishing."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from ..core.errors import OptionError
from ..core.weight import Terms, as_terms
from .sums import Sums

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LOW = (torch.bfloat16, torch.float16)
MAX_SEEDS = 64
RUN_ENGINE: Any = getattr(torch.autograd.graph, "_engine_run_backward", None)


class Precision:
    """Autocast around the loss and, for float16, a GradScaler around the step.

    with precision.autocast():
        loss = …
    precision.backward((loss,), (scale,))   # for every micro-batch
    precision.unscale(optimizer, sums)      # once a step
    precision.step(optimizer)               # once a step, if the gradient is finite
    precision.update()                      # once a step
    """

    def __init__(
        self,
        precision: str | None,
        scaler: GradScaler | None,
        parameters: Sequence[Tensor],
        is_widened: Callable[[Tensor], bool],
    ) -> None:
        if precision is not None and precision not in DTYPES:
            raise OptionError(f'precision={precision!r} is unknown: pass None, "bf16" or "fp16"')
        if scaler is not None and not callable(getattr(scaler, "is_enabled", None)):
            raise OptionError(f"scaler is {scaler!r}: pass a torch.amp.GradScaler, or None")
        self.device = parameters[0].device.type
        self.dtype = None if precision is None else DTYPES[precision]
        self._full_precision = nullcontext()
        if scaler is not None and not scaler.is_enabled():
            scaler = None  # does nothing, like none
        self.scaler = GradScaler(self.device) if precision == "fp16" and scaler is None else scaler
        self._seeds: dict[Any, Tensor] = {}
        """What backward passes started from: most micro-batches count the same."""
        if self.scaler is not None and (wide := [p for p in parameters if is_widened(p)]):
            raise OptionError(
                f"a GradScaler wants parameters whose gradients add up in their own dtype but {len(wide)} of "
                f"{len(parameters)} are {wide[0].dtype}: call model.float() and leave accumulate_dtype out"
            )

    def terms(self, loss: Callable[[Any, Any], Any], model: Any, micro_batch: Any) -> Terms:
        """The loss of a micro-batch, term by term."""
        if self.dtype is None:
            return as_terms(loss(model, micro_batch))
        with self.autocast():
            return as_terms(loss(model, micro_batch))

    def autocast(self) -> AbstractContextManager[Any]:
        return self._full_precision if self.dtype is None else torch.autocast(self.device, self.dtype)

    def backward(self, losses: Terms, scales: Terms, *, keep_graph: bool = False) -> None:
        """Adds the gradient of sum_t scale_t * loss_t to .grad; a term with scale 0 counts nothing.

        The scale enters as the gradient that backward starts from, which saves the multiplication and its
        own backward pass. Backward passes belong outside of autocast.
        """
        counted = []
        seeds = []
        for t, loss in enumerate(losses):
            if loss.requires_grad and (isinstance(scales[t], Tensor) or scales[t]):
                counted.append(loss)
                seeds.append(self.seed(scales[t], loss))
        if not counted:
            return
        if torch.is_autocast_enabled(self.device):
            with torch.autocast(self.device, enabled=False):
                _run_backward(counted, seeds, keep_graph=keep_graph)
        else:
            _run_backward(counted, seeds, keep_graph=keep_graph)

    def seed(self, scale: Any, loss: Tensor) -> Tensor:
        """The gradient that a backward pass from this loss starts from."""
        if isinstance(scale, Tensor):
            seed = scale.expand(loss.shape)
        else:
            key = (scale, loss.shape, loss.dtype, loss.device)
            known = self._seeds.get(key)
            if known is None or known._version or num_users(known) > ALONE:  # by a hook; by .grad
                known = self._seeds[key] = torch.full(loss.shape, scale, dtype=loss.dtype, device=loss.device)
            seed = known
        if self.scaler is not None:
            seed = self.scaler.scale(seed)
        return seed if seed.dtype == loss.dtype else seed.to(loss.dtype)

    def unscale(self, optimizer: torch.optim.Optimizer, sums: Sums) -> None:
        if self.scaler is not None:
            for parameter, gradient in sums.items():
                parameter.grad = gradient
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)

    def update(self) -> None:
        """Ends the window: lets the scaler raise or lower its scale."""
        if len(self._seeds) > MAX_SEEDS:
            self._seeds.clear()
        if self.scaler is not None:
            self.scaler.update()

    def forget(self, optimizer: torch.optim.Optimizer) -> None:
        """After an error in the middle of a step: torch's scaler would take the next one for a second unscaling."""
        if self.scaler is not None:
            self.scaler._per_optimizer_states.pop(id(optimizer), None)

    def loss_scale(self) -> Tensor | None:
        """What the scaler multiplies losses by now, without waiting for it."""
        return None if self.scaler is None else self.scaler.scale(torch.ones((), device=self.device))


def _run_backward(losses: list[Tensor], seeds: list[Tensor], *, keep_graph: bool) -> None:
    """torch.autograd.backward; for plain tensors its last line alone, since seeds are known to fit their losses.

    What comes before that line takes a twentieth of a small model's step (torch 2.13).
    """
    try:
        if RUN_ENGINE is None or set(map(type, losses)) != {Tensor}:
            torch.autograd.backward(losses, seeds, retain_graph=keep_graph)
        else:
            RUN_ENGINE(tuple(losses), tuple(seeds), keep_graph, False, (), allow_unreachable=True, accumulate_grad=True)
    except RuntimeError as error:
        if keep_graph and "donated buffers" in str(error):  # torch 2.13: its compiler lets a pass overwrite its inputs
            raise OptionError(
                "the backward pass of a compiled model cannot run once for each term of the loss: pass the batch or a "
                "window to step() and return the terms in float32, or set torch._functorch.config.donated_buffer = "
                "False before the model is compiled"
            ) from error
        raise


def is_low(loss: Tensor) -> bool:
    """Whether a scale would be rounded to the loss's dtype."""
    return loss.dtype in LOW


def num_users(tensor: Tensor) -> int:
    """How many tensors lie in this one's memory, and one more."""
    users: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return users


ALONE = num_users(torch.zeros(()))
