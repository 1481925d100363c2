"""Random numbers that do not depend on how a batch is cut: drawn once for the whole batch, then cut like it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..internals import TorchDispatchMode

_DROPOUT = torch.ops.aten.native_dropout.default
_MULTINOMIAL = torch.ops.aten.multinomial.default


class Recording(TorchDispatchMode):
    """Records every random draw inside its block, in order; None for a draw that cannot be cut like the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[Tensor | None] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if _is_random(func, args, kwargs or {}):
            drawn = out[1] if func is _DROPOUT else out
            self.draws.append(drawn.clone() if func is _DROPOUT or _is_all(func, args, out) else None)
        return out


class Replay(TorchDispatchMode):
    """Replaces the draws for a micro-batch by its part of the draws for the whole batch.

    Args:
        draws: What `Recording` recorded for the whole batch.
        batch_size: The number of samples in the whole batch.
    """

    def __init__(self, draws: list[Tensor | None], batch_size: int) -> None:
        super().__init__()
        self._draws = draws
        self._batch_size = batch_size
        self._rows: Sequence[int] | None = range(batch_size)
        self._next = 0
        self.is_faithful = True
        """False once a draw could not be replaced: it cannot be cut, or the number of draws depends on the data."""

    def start(self, rows: Sequence[int] | None) -> None:
        """From here on, draws are for these samples of the batch; None leaves them unchanged."""
        self._rows = rows
        self._next = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._rows is None or not _is_random(func, args, kwargs or {}):
            return out
        fresh = out[1] if func is _DROPOUT else out
        drawn = self._draws[self._next] if self._next < len(self._draws) else None
        self._next += 1
        mine = _part_of(drawn, fresh, self._rows, self._batch_size)
        if mine is None:
            self.is_faithful = False
            return out
        fresh.copy_(mine)
        if func is _DROPOUT:
            source, probability = args[0], args[1]
            return source * fresh / (1 - probability) if probability < 1 else out[0], fresh
        return out


def _part_of(drawn: Tensor | None, fresh: Any, rows: Sequence[int], batch_size: int) -> Tensor | None:
    """The part of `drawn` that belongs to these samples, along the only axis that grows with their number."""
    if drawn is None or not isinstance(fresh, Tensor) or drawn.ndim != fresh.ndim:
        return None
    differing = [axis for axis in range(drawn.ndim) if drawn.shape[axis] != fresh.shape[axis]]
    if not differing:
        if len(rows) != batch_size or not drawn.ndim or drawn.shape[0] % batch_size:
            return drawn  # does not depend on the batch
        differing = [0]  # all samples, perhaps in another order
    axis = differing[0]
    each = drawn.shape[axis] // batch_size  # an axis may hold batch times heads, batch times tokens
    if len(differing) > 1 or each * batch_size != drawn.shape[axis] or each * len(rows) != fresh.shape[axis]:
        return None
    index = torch.as_tensor(rows, device=drawn.device)
    found: Tensor = drawn.unflatten(axis, (batch_size, each)).index_select(axis, index).flatten(axis, axis + 1)
    return found


def _is_random(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the call draws random numbers. Dropout of zero, in attention say, does not."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for number, argument in enumerate(func._schema.arguments):
        if argument.name in ("p", "dropout_p"):
            given = args[number] if number < len(args) else kwargs.get(argument.name, argument.default_value)
            return not isinstance(given, float | int) or given != 0
    return True


def _is_all(func: Any, args: Any, out: Any) -> bool:
    """Whether the output is everything that was drawn, and can be cut like the batch.

    It is not if noise is also written into another argument. A permutation, and samples picked from the whole batch,
    cannot be cut.
    """
    if func.overloadpacket is torch.ops.aten.randperm or (func is _MULTINOMIAL and args[0].ndim == 1):
        return False
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
    return isinstance(out, Tensor) and writes == (func._schema.returns[0].alias_info is not None)
