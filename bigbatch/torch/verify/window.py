"""The full batch of a `Window`: its micro-batches, concatenated."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core.errors import BatchError
from ...core.window import Window
from .. import batch as nest
from ..cutting import Cutting

_REMEDY = "so verify() cannot concatenate them to the full batch: verify a batch with micro_batch_size=…"


def joined(window: Window[Any], cutting: Cutting) -> tuple[Any, list[int]]:
    """The full batch, and how many samples each micro-batch has; raises BatchError if they cannot be concatenated.

    Args:
        window: The micro-batches.
        cutting: How a batch like them would be cut.
    """
    if not window:
        raise BatchError("the window has 0 micro-batches: pass one with data")
    sizes = [cutting.size(part, f"micro_batch[{k}]") for k, part in enumerate(window)]
    if cutting.cut == "list" and all(isinstance(part, list) for part in window):
        return [sample for part in window for sample in part], sizes
    if cutting.cut is not None:
        kind = 'tuples or dicts of lists by cut="list"' if cutting.cut == "list" else "those of a function by cut="
        raise BatchError(f"the micro-batches of the window are {kind}, {_REMEDY}")
    rows = [nest.axes(part, cutting.batch_axis, "") for part in window]
    for k, row in enumerate(rows):
        if [(name, axis) for name, _, axis in row] != [(name, axis) for name, _, axis in rows[0]]:
            raise BatchError(f"micro_batch[{k}] has other parts than micro_batch[0], {_REMEDY}")
    leaves = zip(*([leaf for _, leaf, _ in row] for row in rows), strict=True)
    columns = [_joined(name, column, axis) for (name, _, axis), column in zip(rows[0], leaves, strict=True)]
    tensors: Iterator[Tensor] = iter([column for column in columns if isinstance(column, Tensor)])
    return nest.map_tensors(lambda _: next(tensors), window[0]), sizes


def _joined(name: str, leaves: tuple[Any, ...], axis: int | None) -> Any:
    """One part of the full batch. What has no samples must be the same in all micro-batches."""
    first = leaves[0]
    if axis is not None and all(isinstance(leaf, Tensor) for leaf in leaves):
        kinds = {(leaf.shape[:axis] + leaf.shape[axis + 1 :], leaf.dtype, leaf.device) for leaf in leaves}
        if len(kinds) > 1:
            texts = " and ".join(sorted(f"{tuple(shape)} of {dtype} on {device}" for shape, dtype, device in kinds))
            raise BatchError(f"the samples of micro_batch{name} differ ({texts}), {_REMEDY}")
        return torch.cat(leaves, axis)
    for k, leaf in enumerate(leaves):
        are_tensors = isinstance(leaf, Tensor) and isinstance(first, Tensor)
        if not (torch.equal(leaf, first) if are_tensors else np.array_equal(leaf, first)):
            raise BatchError(f"micro_batch[{k}]{name} has no samples but is not that of micro_batch[0], {_REMEDY}")
    return first
