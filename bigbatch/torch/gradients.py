"""The gradient sums of a window: collected out of the way of .grad, then finished as one gradient."""

import functools
import math
import operator
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..core.errors import GradientError
from .shards import is_sharded, local, norm_over_ranks


class Sums(dict[Tensor, Tensor]):
    """By parameter; a parameter that got no gradient is not in it. All are to be multiplied by `unit` at the end."""

    unit: Any = 1.0


_promoted = functools.cache(torch.promote_types)
FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128)
HAS_GRAD_DTYPE = hasattr(Tensor, "grad_dtype")  # from torch 2.10 on, .grad may be wider than its parameter


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

    @property
    def parameters(self) -> list[Any]:
        """What the optimizer holds now: groups may be added while training."""
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    @property
    def num_groups(self) -> int:
        """Changes when parameters come."""
        return len(self._optimizer.param_groups)

    @property
    def is_fused(self) -> bool:
        return bool(self._optimizer.defaults.get("fused"))

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
    def collecting(self, sums: Sums) -> Iterator["Collection"]:
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

    def collection(self, sums: Sums) -> "Collection":
        """The same in parts, for what is called so often that entering a block counts."""
        parameters = self.parameters
        wide = [p for p in parameters if p.dtype not in self._wide_enough]
        return Collection(parameters, sums, {p: self.wide_dtype(p) for p in wide})

    def refuse_foreign(self) -> list[Any]:
        """Refuses gradients that somebody else left. Zeros (`zero_grad(set_to_none=False)`) are let go."""
        parameters = self.parameters
        foreign = [p for p in parameters if p.grad is not None]
        if not foreign:
            return parameters
        with torch.no_grad():
            nonzero = [p for p in foreign if bool((_values(p.grad) != 0).any())]
        if nonzero:
            raise GradientError(
                f"{len(nonzero)} of {len(parameters)} parameters hold a gradient that is not of this window "
                f"({self.name(nonzero[0])} first): call optimizer.zero_grad() to drop it, or add what it is "
                "the gradient of to the loss"
            )
        clear(foreign)
        return parameters

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
                restore.append(_set_grad_dtype(p, g.dtype))
                p.grad = g
            else:
                p.grad = g.to(p.grad_dtype if HAS_GRAD_DTYPE else p.dtype)
        try:
            yield
        finally:
            clear(self.parameters)
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
            if not bool(torch.isfinite(_values(g)).all()):
                return self.name(p)
        return None


def grads_of(parameters: Sequence[Tensor]) -> list[Tensor | None]:
    return [p.grad for p in parameters]


def clear(parameters: Sequence[Tensor]) -> None:
    for p in parameters:
        p.grad = None


def values(sums: Sums) -> list[Tensor]:
    """The sums as real, dense tensors that share their memory."""
    for p, g in sums.items():
        if g.is_sparse and not g.is_coalesced():
            sums[p] = g.coalesce()
    return [_values(g) for g in sums.values()]


def scale(sums: Sums, factor: Any) -> None:
    if sums and (isinstance(factor, Tensor) or factor != 1.0):
        torch._foreach_mul_(values(sums), factor)


def add(sums: Sums, others: Sums) -> None:
    for p, g in others.items():
        if p not in sums:
            sums[p] = g
        else:  # torch adds a sparse tensor to a dense one, not the other way round
            sums[p] = g + sums[p] if sums[p].is_sparse else sums[p] + g


def norm(sums: Sums) -> float:
    """The norm over all of them. Reading it is the one moment in a step that waits for the device."""
    tensors = values(sums)
    if not tensors:
        return 0.0
    if any(map(is_sharded, sums.values())):
        return norm_over_ranks(list(sums.values()))
    total = _norm(torch._foreach_norm(tensors))
    if not math.isfinite(total) and all(bool(torch.isfinite(t).all()) for t in tensors):
        # finite numbers whose squares are too large
        largest = max(float(t.abs().max()) for t in tensors if t.numel())
        total = largest * _norm(torch._foreach_norm([t.double() / largest for t in tensors]))
    return total


def _norm(norms: Sequence[Tensor]) -> float:
    if all(n.is_cpu for n in norms):
        return math.hypot(*[n.item() for n in norms])
    device = norms[0].device
    wide = torch.float64 if any(n.dtype == torch.float64 for n in norms) else torch.float32
    return float(torch.linalg.vector_norm(torch.stack([n.to(device, wide) for n in norms])))


def clip(sums: Sums, total_norm: float, clip_norm: float | None, clip_value: float | None) -> None:
    """By norm as torch.nn.utils.clip_grad_norm_ does it, then by value."""
    if clip_norm is not None:
        scale(sums, min(clip_norm / (total_norm + 1e-6), 1.0))
    if clip_value is not None and sums:
        tensors = values(sums)
        torch._foreach_clamp_min_(tensors, -clip_value)
        torch._foreach_clamp_max_(tensors, clip_value)


def norm_on_device(sums: Sums) -> tuple[Tensor, Tensor]:
    """The norm of each of them and over all, which nobody waits for. Squares that overflow float32 make it infinite."""
    norms = torch._foreach_norm(values(sums))
    is_mixed = len({norm.dtype for norm in norms}) > 1
    stacked = torch.stack([norm.double() for norm in norms] if is_mixed else list(norms)).double()
    return stacked, torch.linalg.vector_norm(stacked)


def clip_on_device(sums: Sums, total_norm: Tensor, clip_norm: float | None, clip_value: float | None) -> None:
    """As `clip`, by a norm that is not on the host."""
    if clip_norm is not None:
        tensors = values(sums)
        wide = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
        torch._foreach_mul_(tensors, (clip_norm / (total_norm + 1e-6)).clamp(max=1.0).to(wide))
    clip(sums, math.nan, None, clip_value)


def _values(gradient: Tensor) -> Tensor:
    gradient = local(gradient)
    gradient = gradient._values() if gradient.is_sparse else gradient
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


class Collection:
    """The gradients of a window while backward passes add to them.

    try:
        collection.begun()
        …                   # backward passes
        collection.end()
    finally:
        collection.leave()
    """

    def __init__(self, parameters: Sequence[Tensor], sums: Sums, wide: dict[Tensor, torch.dtype]) -> None:
        self.parameters = parameters
        self._sums = sums
        self._wide = wide
        self._by_hook: Container[Tensor] = () if HAS_GRAD_DTYPE else wide
        self._undo: list[Callable[[], None]] = []
        self._is_ended = False
        self._has_new = False
        self._watched: Tensor | None = None
        self._seen: tuple[Tensor | None, int] = (None, 0)

    def begun(self) -> "Collection":
        """With the sums in .grad."""
        for p, dtype in self._wide.items():
            self._undo.append(_widen(p, dtype, self._sums))
        for p, g in self._sums.items():
            if p not in self._by_hook:
                p.grad = g
        self._held = grads_of(self.parameters)
        self._has_sparse = any(g.is_sparse for g in self._sums.values())
        self.watch()
        return self

    def end(self) -> None:
        """Puts what is in .grad into the sums."""
        self._look()
        if self._has_new:
            self._sums.update([(p, g) for p, g in zip(self.parameters, self._held, strict=True) if g is not None])
        self._is_ended = True

    def leave(self) -> None:
        """After this, .grad is None; what did not come to its end is half added, and the sums are emptied."""
        if not self._is_ended:
            self._sums.clear()
        clear(self.parameters)
        for undo in self._undo:
            undo()

    def check(self) -> None:
        """Before a backward pass: what was added up so far must still be there."""
        if self._watched is None:
            is_changed = any(p.grad is not None for p in self.parameters)
        else:
            gradient, version = self._seen
            is_changed = self._watched.grad is not gradient or (gradient is not None and gradient._version != version)
        if is_changed:
            raise GradientError(
                "gradients were zeroed or changed by the loss in the middle of a window, or by another thread, so they "
                "are not those of the batch: leave zero_grad() and backward() out of the loss"
            )

    def in_units_of(self, unit: Any) -> None:
        """Before a backward pass: what it adds counts `unit`, so what is there is brought to that measure."""
        before = self._sums.unit
        if unit is before or (isinstance(unit, float) and isinstance(before, float) and unit == before):
            return
        held = [self._sums.get(p) if p in self._by_hook else p.grad for p in self.parameters]
        if tensors := [_values(g) for g in held if g is not None]:
            torch._foreach_mul_(tensors, before / unit)
        self._sums.unit = unit
        self.watch()

    def added(self) -> None:
        """After a backward pass."""
        self._look()
        self.watch()

    def _look(self) -> None:
        """Sees to gradients that were not there before: those that were have been added to where they are."""
        is_new = any(map(operator.is_not, held := grads_of(self.parameters), self._held))
        if is_new:
            self.part()
            self._has_sparse = any(g is not None and g.is_sparse for g in held)
        if self._has_sparse:
            self._shorten()
        if is_new or self._has_sparse:
            self._held = grads_of(self.parameters)
            self._has_new = True

    def part(self) -> None:
        """Gives every gradient memory of its own.

        Two that are views of one tensor are left in the same memory by torch (2.13), as with `a.view(-1) + b.view(-1)`,
        and what the next backward pass adds to the one it would add to the other.
        """
        taken: set[int] = set()
        for p in self.parameters:
            if (g := p.grad) is not None and type(g) is Tensor and g.layout is torch.strided:
                if (place := g.data_ptr()) in taken:
                    p.grad = g.clone()
                taken.add(place)

    def _shorten(self) -> None:
        """Keeps sparse gradients from growing with the number of micro-batches.

        Adding sparse gradients strings their entries together. Once there are more of them than rows, entries of
        the same row are added up. How many there are is known without asking the device.
        """
        for p in self.parameters:
            if (g := p.grad) is not None and g.is_sparse and g._nnz() > p.shape[0]:
                p.grad = g.coalesce()

    def watch(self) -> None:
        """What is there now is what `check` wants. Zeroing touches all alike, so watching one of them is enough."""
        if self._watched is None:
            self._watched = next((p for p in self.parameters if p.grad is not None), None)
        if self._watched is not None:
            gradient = self._watched.grad
            self._seen = (gradient, 0 if gradient is None else gradient._version)


def _widen(parameter: Tensor, dtype: torch.dtype, sums: Sums) -> Callable[[], None]:
    """Lets backward passes add up in this dtype; returns how to undo that."""
    if HAS_GRAD_DTYPE:
        return _set_grad_dtype(parameter, dtype)

    def add_up(p: Tensor) -> None:
        assert p.grad is not None
        sums[p] = sums[p].add_(p.grad) if p in sums else p.grad.to(dtype)
        p.grad = None  # the low-precision gradient is freed at once

    handle = parameter.register_post_accumulate_grad_hook(add_up)
    return lambda: handle.remove()


def _set_grad_dtype(parameter: Any, dtype: torch.dtype) -> Callable[[], None]:
    before = parameter.grad_dtype
    parameter.grad_dtype = dtype

    def undo() -> None:
        parameter.grad_dtype = before

    return undo


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


def leaves_of(*losses: Tensor) -> set[Tensor]:
    """The tensors that a backward pass would leave gradients on."""
    found: set[Tensor] = set()
    seen: set[Any] = set()
    waiting = [loss.grad_fn for loss in losses]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if hasattr(node, "variable"):
                found.add(node.variable)
            waiting += [following for following, _ in node.next_functions]
    return found
