"""Random numbers that do not depend on how a batch is cut: drawn once for the batch, handed out in parts."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

DROPOUT = torch.ops.aten.native_dropout.default
MULTINOMIAL = torch.ops.aten.multinomial.default


class Recording(TorchDispatchMode):
    """Remembers every random draw made inside, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[Tensor | None] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if is_random(func, args, kwargs or {}):
            drawn = out[1] if func is DROPOUT else out
            self.draws.append(drawn.clone() if func is DROPOUT or is_whole(func, args, out) else None)
        return out


class Replay(TorchDispatchMode):
    """Hands out, for a part of the batch, that part of what was drawn for the whole.

    `is_faithful` is false once a draw had no counterpart: a kind of draw that cannot be cut, or a number of
    draws that depends on the data.
    """

    def __init__(self, draws: list[Tensor | None], batch_size: int) -> None:
        super().__init__()
        self._draws = draws
        self._batch_size = batch_size
        self._rows: Sequence[int] | None = range(batch_size)
        self._next = 0
        self.is_faithful = True

    def start(self, rows: Sequence[int] | None) -> None:
        """From here on the draws are for these samples of the batch; None if they are no concern of this."""
        self._rows = rows
        self._next = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._rows is None or not is_random(func, args, kwargs or {}):
            return out
        fresh = out[1] if func is DROPOUT else out
        drawn = self._draws[self._next] if self._next < len(self._draws) else None
        self._next += 1
        mine = part_of(drawn, fresh, self._rows, self._batch_size)
        if mine is None:
            self.is_faithful = False
            return out
        fresh.copy_(mine)
        if func is DROPOUT:
            source, probability = args[0], args[1]
            return source * fresh / (1 - probability) if probability < 1 else out[0], fresh
        return out


def part_of(drawn: Tensor | None, fresh: Any, rows: Sequence[int], batch_size: int) -> Tensor | None:
    """What was drawn for these samples: along the one axis that scales with their number."""
    if drawn is None or not isinstance(fresh, Tensor) or drawn.ndim != fresh.ndim:
        return None
    differing = [axis for axis in range(drawn.ndim) if drawn.shape[axis] != fresh.shape[axis]]
    if not differing:
        if len(rows) != batch_size or not drawn.ndim or drawn.shape[0] % batch_size:
            return drawn  # nothing to do with the batch
        differing = [0]  # all samples, in another order perhaps
    axis = differing[0]
    each = drawn.shape[axis] // batch_size  # an axis may hold batch times heads, batch times tokens
    if len(differing) > 1 or each * batch_size != drawn.shape[axis] or each * len(rows) != fresh.shape[axis]:
        return None
    index = torch.as_tensor(rows, device=drawn.device)
    found: Tensor = drawn.unflatten(axis, (batch_size, each)).index_select(axis, index).flatten(axis, axis + 1)
    return found


def is_random(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the call draws anything: dropout of zero, in attention say, does not."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for number, argument in enumerate(func._schema.arguments):
        if argument.name in ("p", "dropout_p"):
            given = args[number] if number < len(args) else kwargs.get(argument.name, argument.default_value)
            return not isinstance(given, float | int) or given != 0
    return True


def is_whole(func: Any, args: Any, out: Any) -> bool:
    """Whether the output is all that a draw leaves: not where noise is written into an argument on the side.

    A part of a permutation is not one for a part of the batch, nor is a part of what was picked from all samples.
    """
    if func.overloadpacket is torch.ops.aten.randperm or (func is MULTINOMIAL and args[0].ndim == 1):
        return False
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
    return isinstance(out, Tensor) and writes == (func._schema.returns[0].alias_info is not None)
