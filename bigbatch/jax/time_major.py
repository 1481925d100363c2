"""Whether a loss scans through time along the leading axis of its batch, which is the axis that is cut."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from ..core.errors import warn
from .internals import scans

_ADDING = ("add", "add_any", "sub", "scatter-add")
_WRITING = ("scatter", "dynamic_update_slice")
_SAME_KIND = {name: names for names in (_ADDING, _WRITING, ("max",), ("min",), ("mul",)) for name in names}
_UNCHANGED = ("convert_element_type", "reshape", "broadcast_in_dim", "squeeze")


def warn_if_recurrent(trace: Callable[[int], Any], size: int) -> None:
    """Warns if each row depends on the rows before it.

    A scan that maps over samples, or adds up over them, can be cut anywhere. A scan that is as long as the micro-batch
    by accident keeps its length when the micro-batch is longer. `trace(size)` returns the jaxpr of the loss for `size`
    rows.
    """
    if not (num := _recurrent_lengths(trace(size)).count(size)):
        return
    try:
        longer = _recurrent_lengths(trace(2 * size)).count(2 * size)
    except Exception:  # the loss works with this size alone
        return
    if longer >= num:
        warn(
            "the loss scans over the leading axis of the batch, and what it does with a row depends on the rows before "
            "it: if that axis is time, cutting it cuts sequences; put the samples first, and swap the axes in the loss"
        )


def _recurrent_lengths(jaxpr: Any) -> list[int]:
    """The lengths of all scans that carry a floating-point value that is more than a running sum or a buffer."""
    return [
        length
        for length, body, before, after in scans(jaxpr)
        if any(
            jnp.issubdtype(old.aval.dtype, jnp.inexact) and not _is_accumulated(body, old, new)
            for old, new in zip(before, after, strict=True)
        )
    ]


def _is_accumulated(body: Any, old: Any, new: Any) -> bool:
    """Whether a step only passes the old value on, or applies one kind of operation to it, such as adding."""
    kinds = set()
    while old is not new:
        uses = [equation for equation in body.eqns for var in equation.invars if var is old]
        if len(uses) != 1 or any(var is old for var in body.outvars):
            return not uses and not any(var is old for var in body.outvars)
        (equation,) = uses
        name = equation.primitive.name
        if name not in _UNCHANGED:
            kinds.add(_SAME_KIND.get(name))
        old = equation.outvars[0]
    is_read = any(var is new for equation in body.eqns for var in equation.invars)
    num_returned = sum(var is new for var in body.outvars)
    return not kinds or (len(kinds) == 1 and None not in kinds and not is_read and num_returned == 1)
