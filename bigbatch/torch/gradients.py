"""The gradients of what an optimizer holds: collected out of the way of .grad, then handed over as one gradient."""

import functools
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..core.errors import GradientError
from . import hooks
from .distributed.shards import is_sharded
from .gradient_buffer import HAS_GRAD_DTYPE, Collection, clear, set_grad_dtype
from .sums import Sums, plain

_promoted = functools.cache(torch.promote_types)
VERSION = operator.attrgetter("_version")
FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128)


class Gradients:
    """Collects what backward passes leave, in at least float32 whatever the parameters are."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, names: dict[Tensor, str], dtype: torch.dtype | None = None
    ) -> None:
        self._optimizer = optimizer
        self._names = names
        self._dtype = dtype or torch.float32
        self._wide_enough = {dtype for dtype in FLOATING if _promoted(dtype, self._dtype) is dtype}
        self._takes_wide: bool | None = None
        self.holder: Any = None
        """A model whose gradients are views of the memory that it reduces them in."""

    @property
    def parameters(self) -> list[Any]:
        """What the optimizer holds now: groups may be added while training."""
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    @property
    def is_fused(self) -> bool:
        return bool(self._optimizer.defaults.get("fused"))

    def held(self) -> list[Any]:
        """The same, for those who ask more than once."""
        return self.parameters

    def marks(self) -> list[int]:
        """Differs from what it was before if the parameters were changed in place, moved or replaced."""
        parameters = self.parameters
        plain = [p for p in parameters if type(p) is torch.nn.Parameter and not p.is_sparse]  # shards may be moved
        found = [*map(VERSION, parameters), *map(Tensor.data_ptr, plain)]
        return found + self.steps_seen() if self.is_fused else found

    def steps_seen(self) -> list[int]:
        """Counts that a fused optimizer leaves with its own steps, since it leaves none on parameters (torch 2.13)."""
        steps = [state.get("step") for state in self._optimizer.state.values()]
        return [step._version for step in steps if isinstance(step, Tensor)]

    def wide_dtype(self, parameter: Tensor) -> torch.dtype:
        """The dtype in which this parameter's gradients are added up: at least float32."""
        return _promoted(parameter.dtype, self._dtype)

    def is_widened(self, parameter: Tensor) -> bool:
        return self.wide_dtype(parameter) != parameter.dtype

    @contextmanager
    def collecting(self, sums: Sums) -> Iterator[Collection]:
        """Inside, backward passes add to `sums`; before (see `refuse_foreign`) and after, .grad is None.

        Keeping the sums away from .grad between the blocks of a window makes a stray `optimizer.zero_grad()` in the
        user's loop harmless. If anything is raised inside, the sums are half added to: they are emptied.
        """
        collection = self.collection(sums)
        try:
            yield collection.begun()
            collection.end()
        finally:
            collection.leave()

    def collection(self, sums: Sums) -> Collection:
        """The same in parts, for what is called so often that entering a block counts."""
        parameters = self.parameters
        wide = [p for p in parameters if p.dtype not in self._wide_enough]
        return Collection(
            parameters, sums, {p: self.wide_dtype(p) for p in wide}, self.are_views, self.refuse_left_by_loss
        )

    def are_views(self) -> bool:
        """Whether gradients are the model's now: DistributedDataParallel makes them so when it reduces."""
        return self.holder is not None and self.holder.require_backward_grad_sync

    def refuse_foreign(self) -> list[Any]:
        """Refuses gradients that somebody else left. Zeros (`zero_grad(set_to_none=False)`) are let go."""
        parameters = self.parameters
        if nonzero := not_zero(parameters):
            raise GradientError(
                f"{len(nonzero)} of {len(parameters)} parameters hold a gradient that is not of this window "
                f"({self.name(nonzero[0])} first): call optimizer.zero_grad() to drop it, or add what it is "
                "the gradient of to the loss"
            )
        return parameters

    def refuse_left_by_loss(self, parameters: Sequence[Tensor]) -> None:
        """The same between a loss and its backward pass."""
        if nonzero := not_zero(parameters):
            remedy = "leave backward() out of the loss, use torch.autograd.grad, or call zero_grad() after it"
            if is_sharded(nonzero[0]):
                remedy = "with fully_shard a loss that runs a backward pass of its own works with micro_batch() only"
            raise GradientError(
                f"{len(nonzero)} of {len(parameters)} gradients ({self.name(nonzero[0])} first) were changed by the "
                f"loss in the middle of a window, or by another thread, so they are not those of the batch: {remedy}"
            )

    @contextmanager
    def handed_over(self, sums: Sums) -> Iterator[None]:
        """Inside, .grad holds the sums, as the optimizer wants them; after, .grad is None and `sums` empty.

        A sum that is wider than its parameter is rounded once, one parameter at a time, unless the optimizer
        can take it as it is.
        """
        restore = []
        while sums:
            p, g = sums.popitem()
            if g.dtype == p.dtype:
                p.grad = g
            elif self._optimizer_takes_wide(p, g.dtype):
                restore.append(set_grad_dtype(p, g.dtype))
                p.grad = g
            else:
                p.grad = g.to((p.grad_dtype if HAS_GRAD_DTYPE else None) or p.dtype)
        try:
            yield
        finally:
            clear(self.parameters)
            for undo in restore:
                undo()

    def refuse_multi_grad_hooks(self) -> None:
        for p in self.parameters if hooks.dicts_of(self.parameters) else ():
            hooks.refuse_multi_grad(p, self.name(p))

    def num_hooks(self) -> int:
        return sum(map(len, hooks.dicts_of(self.parameters)))

    def run_hooks(self, sums: Sums) -> bool:
        """Runs the hooks of parameters on the finished gradient, those of the last parameter first.

        That is the order of a backward pass. All gradients are in .grad meanwhile, wider than their parameter if the
        sums are, and what is in .grad afterwards is the gradient: hooks may replace it, or set it to None.
        Returns whether any hook changed anything.
        """
        has_changed = False
        parameters = self.parameters
        restore = []
        try:
            while sums:
                p, g = sums.popitem()
                if g.dtype != p.dtype and HAS_GRAD_DTYPE:
                    restore.append(set_grad_dtype(p, g.dtype))
                p.grad = g if HAS_GRAD_DTYPE else g.to(p.dtype)
            with torch.no_grad():
                for p in reversed(parameters):
                    if p.grad is not None:
                        has_changed |= hooks.run(p, self.name(p))
            sums.update((p, p.grad) for p in parameters if p.grad is not None)
            return has_changed
        finally:
            clear(parameters)
            for undo in restore:
                undo()

    def _optimizer_takes_wide(self, parameter: Tensor, dtype: torch.dtype) -> bool:
        if self._takes_wide is None:
            self._takes_wide = HAS_GRAD_DTYPE and takes_wide(self._optimizer, parameter, dtype)
        return self._takes_wide

    def name(self, parameter: Tensor) -> str:
        return self._names.get(parameter, f"one of shape {tuple(parameter.shape)}")

    def first_not_finite(self, sums: Sums) -> str | None:
        """The name of the first parameter whose gradient has an infinity or a NaN in it."""
        for p, g in sums.items():
            if not bool(torch.isfinite(plain(g)).all()):
                return self.name(p)
        return None


def not_zero(parameters: Sequence[Tensor]) -> list[Tensor]:
    """The parameters that hold a gradient. One that is all zero is dropped."""
    held = [p for p in parameters if p.grad is not None]
    if not held:
        return held
    with torch.no_grad():
        nonzero = [p for p in held if p.grad is not None and bool((plain(p.grad) != 0).any())]
    if not nonzero:
        clear(held)
    return nonzero


def takes_wide(optimizer: torch.optim.Optimizer, parameter: Tensor, dtype: torch.dtype) -> bool:
    """Whether the optimizer steps on a gradient wider than its parameter, and keeps no wider state for it.

    Tried out on an optimizer of the same kind with one small parameter: SGD without momentum can, Adam in
    torch 2.13 cannot. Wider state would be narrowed by `optimizer.load_state_dict`.
    """
    for group in optimizer.param_groups:
        trial: Any = torch.nn.Parameter(torch.zeros(2, 2, dtype=parameter.dtype, device=parameter.device))
        trial.grad_dtype = dtype
        trial.grad = torch.zeros(2, 2, dtype=dtype, device=parameter.device)
        try:
            twin: Any = type(optimizer)
            twin = twin([trial], **{name: group[name] for name in optimizer.defaults})
            twin.step()
        except Exception:  # whatever a foreign optimizer raises means no
            return False
        state = twin.state[trial].values()
        if any(isinstance(s, Tensor) and s.ndim and s.dtype != trial.dtype for s in state):
            return False
    return True
