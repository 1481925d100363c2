"""The gradients of what the optimizers hold: added up outside of .grad, then handed over as one gradient."""

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from ..core.errors import GradientError, OptionError
from ..core.exclusive import Exclusive
from . import hooks
from .distributed.shards import is_sharded
from .internals import ALONE, HOOKS_AFTER, HOOKS_BEFORE, RUN_ENGINE, STORAGE_USERS, VERSION
from .optimizers import Optimizers
from .sums import Sums, plain

_LAYOUTS = (torch.strided, torch.sparse_coo)
_GRAD, _DTYPE, _IS_SPARSE = map(operator.attrgetter, ("grad", "dtype", "is_sparse"))

_promoted = functools.cache(torch.promote_types)


class Gradients:
    """The gradients of the optimizers' parameters: their dtypes, their checks and their hooks.

    Args:
        optimizers: The optimizers. Their groups may grow while they train.
        names: The names of the model's parameters, for error messages.
        dtype: Gradients add up in at least this dtype; float32 if None.
    """

    def __init__(self, optimizers: Optimizers, names: dict[Tensor, str], dtype: torch.dtype | None = None) -> None:
        self._optimizers = optimizers
        self.parameters = optimizers.parameters  # a call less, many times per step
        self.exclusive = Exclusive(self.parameters)
        self._names = names
        self._dtype = dtype or torch.float32
        self._listed: Sequence[Any] = ()
        self._unmoved: list[Any] = []
        """Those of the parameters in `_listed` that stay where they are; shards may be moved."""
        self.ddp_model: Any = None
        """The model, if DDP makes gradients views of the memory in which it reduces them."""

    def name(self, parameter: Tensor) -> str:
        """What error messages call this parameter."""
        return self._names.get(parameter, f"one of shape {tuple(parameter.shape)}")

    def versions(self) -> list[int]:
        """Numbers that differ from those before if parameters were stepped, changed in place, moved or replaced.

        The first is how many parameters there are.
        """
        parameters = self.exclusive.held
        if parameters is not self._listed:
            self._listed = parameters
            self._unmoved = [p for p in parameters if type(p) is torch.nn.Parameter and not p.is_sparse]
        found = [*map(VERSION, parameters), *map(Tensor.data_ptr, self._unmoved)]
        if self._optimizers.has_fused:
            found += self._optimizers.fused_steps()
        return self.exclusive.num_changes() + found

    # --- dtypes ------------------------------------------------------------------------------------------

    def wide_dtype(self, parameter: Tensor) -> torch.dtype:
        """The dtype in which this parameter's gradients add up: at least float32."""
        return _promoted(parameter.dtype, self._dtype)

    def is_widened(self, parameter: Tensor) -> bool:
        """Whether this parameter's gradients add up in a wider dtype than its own."""
        return self.wide_dtype(parameter) != parameter.dtype

    def widened(self, parameters: Sequence[Tensor]) -> dict[Tensor, torch.dtype]:
        """The dtype in which gradients add up, for those of these parameters for which it is wider than their own."""
        if all(_promoted(dtype, self._dtype) is dtype for dtype in set(map(_DTYPE, parameters))):
            return {}
        return {p: self.wide_dtype(p) for p in parameters if self.is_widened(p)}

    # --- before a window ---------------------------------------------------------------------------------

    def check_empty(self) -> list[Any]:
        """Returns the parameters; raises GradientError if one holds a gradient that is not of this window.

        Zeros (`zero_grad(set_to_none=False)`) are dropped.
        """
        parameters = self.parameters()
        if nonzero := _not_zero(parameters):
            raise GradientError(
                f"{len(nonzero)} of {len(parameters)} parameters hold a gradient that is not of this window "
                f"({self.name(nonzero[0])} first): call optimizer.zero_grad() to drop it, or include that "
                "term in the loss"
            )
        return parameters

    def check_left_by_loss(self, parameters: Sequence[Tensor]) -> None:
        """Raises GradientError if the loss that has just run left a gradient in .grad that is not zero."""
        if nonzero := _not_zero(parameters):
            remedy = "leave backward() out of the loss, use torch.autograd.grad, or call zero_grad() after it"
            if is_sharded(nonzero[0]):
                remedy = "with fully_shard a loss that runs a backward pass of its own works with micro_batch() only"
            raise GradientError(
                f"{len(nonzero)} of {len(parameters)} gradients ({self.name(nonzero[0])} first) were changed by the "
                f"loss in the middle of a window, or by another thread, so they are not those of the batch: {remedy}"
            )

    def check_hooks(self) -> int:
        """Returns how many hooks the parameters have; raises GradientError for those that need a whole batch."""
        parameters = self.parameters()
        if not _has_hooks(parameters):
            return 0
        for p in parameters:
            hooks.check_no_multi_grad(p, self.name(p))
        return sum(map(len, hooks.dicts_of(parameters)))

    # --- the finished gradient ---------------------------------------------------------------------------

    @torch.no_grad()  # not a with statement: Ctrl-C at its end would leave gradients disabled
    def run_hooks(self, sums: Sums) -> bool:
        """Runs the hooks on the finished gradient, in the order of a backward pass; returns whether any changed it.

        All gradients are in .grad meanwhile, wider than their parameter if the sums are. What is in .grad afterwards
        is the gradient: hooks may replace it, or set it to None.
        """
        has_changed = False
        parameters = self.parameters()
        with self.handed_over(sums, keeps_dtype=True):
            for p in reversed(parameters):
                if p.grad is not None:
                    has_changed |= hooks.run(p, self.name(p))
            left = [(p, p.grad) for p in parameters if p.grad is not None]
        sums.update(left)
        return has_changed

    def first_not_finite(self, sums: Sums) -> str | None:
        """The name of the first parameter whose gradient has an infinity or a NaN in it."""
        return next((self.name(p) for p, g in sums.items() if not bool(torch.isfinite(plain(g)).all())), None)

    @contextmanager
    def handed_over(self, sums: Sums, *, keeps_dtype: bool = False) -> Iterator[None]:
        """Inside, .grad holds the sums; after, .grad is None and `sums` empty.

        A sum that is wider than its parameter is rounded once, one parameter at a time, unless the optimizer can take
        it as it is, or with `keeps_dtype`.
        """
        restore = []
        try:
            while sums:
                p, g = sums.popitem()
                if g.dtype != p.dtype:
                    if keeps_dtype or self._optimizers.take_wide(p, g.dtype):
                        restore.append(_set_grad_dtype(p, g.dtype))
                    else:
                        g = _rounded(g, p)
                p.grad = g
            yield
        finally:
            clear(self.parameters())
            for undo in restore:
                undo()

    def leave(self, sums: Sums) -> None:
        """Leaves the finished gradient in .grad, in the dtype that a backward pass would give it; empties `sums`."""
        while sums:
            p, g = sums.popitem()
            p.grad = g if g.dtype == p.dtype else _rounded(g, p)


class GradientBuffer:
    """The gradient sums of a window while backward passes add to them.

        with GradientBuffer(gradients, sums) as buffer:
            for micro_batch in window:
                …                              # the loss
                buffer.add(losses, seeds)      # its backward pass

    The sums are in .grad during backward passes only: code of the user's, such as a loss that calls `zero_grad()`, runs
    without them, as it does with the full batch. Inside, the hooks of parameters do nothing. After, .grad is None. If
    anything is raised, the sums may be half added to, so they are emptied.
    """

    def __init__(self, gradients: Gradients, sums: Sums) -> None:
        self.sums = sums
        self.parameters = gradients.parameters()
        self.is_in_grad = False
        self._gradients = gradients
        self._wide = gradients.widened(self.parameters)
        self._undo: list[Callable[[], None]] = []
        self._before: list[Tensor | None] = []
        """What was in .grad before the backward pass; empty before the first."""
        self._has_hooks = self._has_sparse = False

    def __enter__(self) -> "GradientBuffer":
        for p, dtype in self._wide.items():
            self._undo.append(_set_grad_dtype(p, dtype))
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        is_done = False
        try:
            if kind is None:
                self.unload()
            is_done = kind is None
        finally:
            if not is_done:
                self.sums.clear()
                self._before = []
                clear(self.parameters)
            while self._undo:
                self._undo.pop()()
            if self._has_hooks:
                hooks.put_back(self.parameters)

    def add(
        self, losses: Sequence[Tensor], seeds: Sequence[Tensor], unit: Any = 1.0, *, keep_graph: bool = False
    ) -> None:
        """Runs a backward pass from these losses, which adds to the sums; `unit` is that of `load`."""
        self.load(unit)
        run_backward(losses, seeds, keep_graph=keep_graph)
        self.unload()

    def load(self, unit: Any = 1.0) -> None:
        """Before a backward pass: puts the sums into .grad, unless the loss has left gradients there.

        Args:
            unit: What the gradient of this pass is to be multiplied by at the end. The sums are brought to the same.
        """
        if not self.is_in_grad:
            self._gradients.check_left_by_loss(self.parameters)
            if _has_hooks(self.parameters):  # each time: a forward pass may have registered some
                hooks.set_aside(self.parameters, self)
                self._has_hooks = True
            for p, g in self.sums.items():
                p.grad = g
            if not self._before:
                self._before = list(map(_GRAD, self.parameters))
                self._has_sparse = any(map(_IS_SPARSE, self.sums.values()))
            self.is_in_grad = True
        before = self.sums.unit
        if unit is before or (isinstance(unit, float) and isinstance(before, float) and unit == before):
            return
        if self.sums:
            torch._foreach_mul_([plain(g) for g in self.sums.values()], before / unit)
        self.sums.unit = unit

    def unload(self) -> None:
        """After a backward pass: stores the sums, and sets .grad to None."""
        if self.is_in_grad:
            self.store_new()
            clear(self.parameters)
            self.is_in_grad = False

    def store_new(self) -> None:
        """After a backward pass: puts gradients that are new into the sums. The others were added to in place."""
        now = list(map(_GRAD, self.parameters))
        if self._has_sparse or any(map(operator.is_not, now, self._before)):
            self._has_sparse = any(g is not None and g.is_sparse for g in now)
            self.unalias()
            self._shorten()
            self._before = list(map(_GRAD, self.parameters))
            self.sums.update([(p, g) for p, g in zip(self.parameters, self._before, strict=True) if g is not None])

    def unalias(self) -> None:
        """Gives every gradient memory of its own, but not while DDP needs them to be views of its buckets."""
        model = self._gradients.ddp_model
        if model is None or not model.require_backward_grad_sync:
            unalias(self.parameters)

    def _shorten(self) -> None:
        """Keeps sparse gradients from growing with the number of micro-batches.

        Adding sparse gradients appends their entries. Once there are more of them than rows, entries of the same row
        are added up. How many there are is known without asking the device.
        """
        for p in self.parameters:
            if (g := p.grad) is not None and g.is_sparse and g._nnz() > p.shape[0]:
                p.grad = g.coalesce()


def unalias(parameters: Iterable[Tensor]) -> None:
    """Gives every gradient memory of its own.

    Gradients that are views of one tensor are left in the same memory by torch (2.13), as with `a + b.view(-1)` or
    `stack([a, b]) + c`. What is then added to one, or multiplied, would be so in the others too: in those of parameters
    that the optimizer does not hold, and in whatever a backward pass of the user's returned.
    """
    for p in parameters:
        if (g := p.grad) is not None and type(g) is Tensor and g.layout in _LAYOUTS:
            storage = (g._values() if g.is_sparse else g).untyped_storage()
            if STORAGE_USERS(storage._cdata) > ALONE:
                p.grad = g.clone()


def clear(parameters: Iterable[Tensor]) -> None:
    """Sets every .grad to None."""
    for p in parameters:
        p.grad = None


def run_backward(losses: Sequence[Tensor], seeds: Sequence[Tensor], *, keep_graph: bool = False) -> None:
    """torch.autograd.backward, outside of autocast; for plain tensors only its last line, since their seeds fit."""
    if not losses:
        return
    device = losses[0].device.type
    if torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):
            run_backward(losses, seeds, keep_graph=keep_graph)
        return
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


def _has_hooks(parameters: Sequence[Tensor]) -> bool:
    return any(map(HOOKS_BEFORE, parameters)) or any(map(HOOKS_AFTER, parameters))


def _not_zero(parameters: Sequence[Tensor]) -> list[Tensor]:
    """The parameters that hold a gradient. If all gradients are zero, they are dropped."""
    if not any(map(operator.is_not, map(_GRAD, parameters), repeat(None))):
        return []
    held = [p for p in parameters if p.grad is not None]
    with torch.no_grad():
        nonzero = [p for p in held if p.grad is not None and bool((plain(p.grad) != 0).any())]
    if not nonzero:
        clear(held)
    return nonzero


def _rounded(gradient: Tensor, parameter: Any) -> Tensor:
    return gradient.to(parameter.grad_dtype or parameter.dtype)


def _set_grad_dtype(parameter: Any, dtype: torch.dtype) -> Callable[[], None]:
    before = parameter.grad_dtype
    parameter.grad_dtype = dtype

    def undo() -> None:
        parameter.grad_dtype = before

    return undo
