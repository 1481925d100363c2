"""How backward passes add to the gradient sums of a window."""

import operator
from collections.abc import Callable, Container, Iterable, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from .hooks import SetAside, dicts_of, running
from .precision import ALONE, num_users
from .sums import Sums, plain

GRAD = operator.attrgetter("grad")
LAYOUTS = (torch.strided, torch.sparse_coo)
HAS_GRAD_DTYPE = hasattr(Tensor, "grad_dtype")  # from torch 2.10 on, .grad may be wider than its parameter


class Collection:
    """The gradients of a window while backward passes add to them.

    try:
        collection.begun()
        …                   # the loss
        collection.put()
        …                   # its backward pass
        collection.added()
        collection.take()
        …                   # the next one
        collection.end()
    finally:
        collection.leave()

    The sums are in .grad during backward passes only. Code of the user's, such as a loss that calls `zero_grad()`,
    runs without them, as it does with the full batch.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        sums: Sums,
        wide: dict[Tensor, torch.dtype],
        are_views: Callable[[], bool],
        refuse_left_by_loss: Callable[[Sequence[Tensor]], None],
    ) -> None:
        self.parameters = parameters
        self._sums = sums
        self._are_views = are_views
        self._refuse_left_by_loss = refuse_left_by_loss
        self._wide = wide
        self._by_hook: Container[Tensor] = () if HAS_GRAD_DTYPE else wide
        self._own_hooks: list[Any] = []
        self._undo: list[Callable[[], None]] = []
        self._is_ended = False
        self._is_in_grad = False

    def begun(self) -> "Collection":
        """With the sums in .grad, and without the hooks of parameters."""
        self._set_hooks_aside()
        for p, dtype in self._wide.items():
            self._undo.append(_widen(p, dtype, self._sums, self._own_hooks))
        self._fill()
        self._held = grads_of(self.parameters)
        self._has_sparse = any(g.is_sparse for g in self._sums.values())
        return self

    def _set_hooks_aside(self) -> None:
        if dicts_of(self.parameters) and any(hook not in self._own_hooks for hook in running(self.parameters)):
            self._undo.append(SetAside(self.parameters, but=self._own_hooks).put_back)

    def _fill(self) -> None:
        for p, g in self._sums.items():
            if p not in self._by_hook:
                p.grad = g
        self._is_in_grad = True

    def take(self) -> None:
        """Before code of the user's: takes the sums out of .grad, where it could change them."""
        if self._is_in_grad:
            clear(self._sums)
            self._is_in_grad = False

    def put(self) -> None:
        """Before a backward pass: puts the sums back, unless the loss has left gradients there."""
        if not self._is_in_grad:
            if any(map(operator.is_not, map(GRAD, self.parameters), repeat(None))):
                self._refuse_left_by_loss(self.parameters)
            self._set_hooks_aside()  # a forward pass may have registered some
            self._fill()

    def end(self) -> None:
        """Sees to what is in .grad for the last time: ranks may have reduced it."""
        self.added()
        self._is_ended = True

    def leave(self) -> None:
        """After this, .grad is None; what did not come to its end is half added, and the sums are emptied."""
        if not self._is_ended:
            self._sums.clear()
        clear(self.parameters)
        for undo in self._undo:
            undo()

    def in_units_of(self, unit: Any) -> None:
        """Before a backward pass: what it adds counts `unit`, so what is there is brought to that measure."""
        before = self._sums.unit
        if unit is before or (isinstance(unit, float) and isinstance(before, float) and unit == before):
            return
        held = [self._sums.get(p) if p in self._by_hook else p.grad for p in self.parameters]
        if tensors := [plain(g) for g in held if g is not None]:
            torch._foreach_mul_(tensors, before / unit)
        self._sums.unit = unit

    def added(self) -> None:
        """After a backward pass: keeps gradients that were not there before. Dense ones are added to where they are."""
        held = grads_of(self.parameters)
        if self._has_sparse or any(map(operator.is_not, held, self._held)):
            self._has_sparse = any(g is not None and g.is_sparse for g in held)
            self.part()
            self._shorten()
            self._held = grads_of(self.parameters)
            self._sums.update([(p, g) for p, g in zip(self.parameters, self._held, strict=True) if g is not None])

    def part(self) -> None:
        if not self._are_views():
            part(self.parameters)

    def _shorten(self) -> None:
        """Keeps sparse gradients from growing with the number of micro-batches.

        Adding sparse gradients strings their entries together. Once there are more of them than rows, entries of
        the same row are added up. How many there are is known without asking the device.
        """
        for p in self.parameters:
            if (g := p.grad) is not None and g.is_sparse and g._nnz() > p.shape[0]:
                p.grad = g.coalesce()


def part(parameters: Sequence[Tensor]) -> None:
    """Gives every gradient memory of its own.

    Gradients that are views of one tensor are left in the same memory by torch (2.13), as with `a + b.view(-1)` or
    `stack([a, b]) + c`, and what is then added to one, or multiplied, would be so in the others too: in those of
    parameters that the optimizer does not hold, and in whatever a backward pass of the user's returned.
    """
    for p in parameters:
        if (g := p.grad) is not None and type(g) is Tensor and g.layout in LAYOUTS:
            num = num_users(g._values()) - 1 if g.is_sparse else num_users(g)  # _values() is a user itself
            if num > ALONE:
                p.grad = g.clone()


def grads_of(parameters: Sequence[Tensor]) -> list[Tensor | None]:
    return list(map(GRAD, parameters))


def clear(parameters: Iterable[Tensor]) -> None:
    for p in parameters:
        p.grad = None


def _widen(parameter: Tensor, dtype: torch.dtype, sums: Sums, own_hooks: list[Any]) -> Callable[[], None]:
    """Lets backward passes add up in this dtype; returns how to undo that."""
    if HAS_GRAD_DTYPE:
        return set_grad_dtype(parameter, dtype)

    def add_up(p: Tensor) -> None:
        assert p.grad is not None
        sums[p] = sums[p].add_(p.grad) if p in sums else p.grad.to(dtype)
        p.grad = None  # the low-precision gradient is freed at once

    own_hooks.append(add_up)
    handle = parameter.register_post_accumulate_grad_hook(add_up)
    return lambda: handle.remove()


def set_grad_dtype(parameter: Any, dtype: torch.dtype) -> Callable[[], None]:
    before = parameter.grad_dtype
    parameter.grad_dtype = dtype

    def undo() -> None:
        parameter.grad_dtype = before

    return undo


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
