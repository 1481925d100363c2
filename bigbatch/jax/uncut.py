"""Arrays and lists that are passed whole to every micro-batch although they are part of the batch."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from ..core.errors import BatchError
from ..core.window import check_lists
from .arguments import ArgumentLayout, Arrays, name_of


def check_uncut(layout: ArgumentLayout, arrays: Arrays, num_samples: int, trace: Callable[[int], Any]) -> None:
    """Raises BatchError for an uncut argument with as many rows as the batch, if the loss works with no other number.

    If the argument is a table that has as many rows by accident, the loss works with any number of samples.
    `trace(num_samples)` traces the loss with so many.
    """
    if (error := _uncut_error(layout, arrays, num_samples)) is None:
        return
    try:
        trace(num_samples)
    except Exception:  # another mistake: calling the loss will raise it
        return
    try:
        trace(2 * num_samples)
    except Exception as reason:
        raise error from reason


def _uncut_error(layout: ArgumentLayout, arrays: Arrays, num_samples: int) -> BatchError | None:
    """The error for an array or a list of numbers with as many rows as the batch; None if there is none."""
    if num_samples < 2:
        return None
    try:
        check_lists(list(layout.bind(arrays)), num_samples)
    except BatchError as error:
        return error
    for path, role, leaf in layout.leaves(arrays):
        if role == "whole" and jnp.shape(leaf)[:1] == (num_samples,):
            return BatchError(
                f"{name_of(path)} is passed whole to every micro-batch, and has {num_samples} rows, as many as the "
                "batch: to cut it like the batch, pass it by position, or name it in batch_argnums"
            )
    return None
