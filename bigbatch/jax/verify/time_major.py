"""Whether a loss runs through time along the leading axis of its batch, which is the axis that is cut."""

import warnings
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from ...core.errors import BigBatchWarning
from ..distributed import inner_jaxprs

ADDING = ("add", "add_any", "sub", "scatter-add")
WRITING = ("scatter", "dynamic_update_slice")
SAME_KIND = {name: names for names in (ADDING, WRITING, ("max",), ("min",), ("mul",)) for name in names}
AS_IT_IS = ("convert_element_type", "reshape", "broadcast_in_dim", "squeeze")


def warn_if_recurrent(trace: Callable[[int], Any], size: int) -> None:
    """Warns if each row depends on the rows before it; `trace(size)` gives the jaxpr of a loss of so many rows.

    A scan that maps over samples, or adds up over them, is right however it is cut. One over time that happens to be
    as long as the micro-batch stays so when the micro-batch is longer.
    """
    if not (num := lengths(trace(size)).count(size)):
        return
    try:
        longer = lengths(trace(2 * size)).count(2 * size)
    except Exception:  # a loss for this size alone
        return
    if longer >= num:
        warnings.warn(
            "the loss scans over the leading axis of the batch, and what it does with a row depends on the rows before "
            "it: if that axis is time, cutting it cuts sequences; put the samples first, and swap the axes in the loss",
            BigBatchWarning,
            stacklevel=2,
        )


def lengths(jaxpr: Any) -> list[int]:
    """The lengths of all scans in which a step depends on the one before."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan" and is_recurrent(**scan_of(equation.params)):
            found.append(equation.params["length"])
        for inner in inner_jaxprs(equation):
            found += lengths(inner)
    return found


def scan_of(params: dict[str, Any]) -> dict[str, Any]:
    body, first, num = params["jaxpr"].jaxpr, params["num_consts"], params["num_carry"]
    return {"body": body, "before": body.invars[first : first + num], "after": body.outvars[:num]}


def is_recurrent(body: Any, before: list[Any], after: list[Any]) -> bool:
    """Whether any floating-point part of the carry is more than a sum or a buffer that is written to."""
    return any(
        not is_accumulated(body, old, new)
        for old, new in zip(before, after, strict=True)
        if jnp.issubdtype(old.aval.dtype, jnp.inexact)
    )


def is_accumulated(body: Any, old: Any, new: Any) -> bool:
    """Whether the old value goes into the new one alone, by additions (or writes, or the like), or unchanged."""
    kinds = set()
    while old is not new:
        uses = [equation for equation in body.eqns for var in equation.invars if var is old]
        if len(uses) != 1 or any(var is old for var in body.outvars):
            return not uses and not any(var is old for var in body.outvars)
        (equation,) = uses
        name = equation.primitive.name
        if name not in AS_IT_IS:
            kinds.add(SAME_KIND.get(name))
        old = equation.outvars[0]
    is_read = any(var is new for equation in body.eqns for var in equation.invars)
    num_returned = sum(var is new for var in body.outvars)
    return not kinds or (len(kinds) == 1 and None not in kinds and not is_read and num_returned == 1)
