"""The full batch of a `Window`: its micro-batches, concatenated."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core.errors import BatchError
from ...core.window import Window
from .. import batch as nest

_REMEDY = "so verify() cannot concatenate them to the full batch: verify a batch with micro_batch_size=…"


def joined(window: Window[Any]) -> tuple[Any, list[int]]:
    """The full batch, and how many samples each micro-batch has; raises BatchError if they cannot be concatenated."""
    if not window:
        raise BatchError("the window has 0 micro-batches: pass one with data")
    sizes = [nest.batch_size(part, f"micro_batch[{k}]") for k, part in enumerate(window)]
    rows = [list(nest.leaves(part, "")) for part in window]
    for k, row in enumerate(rows):
        if [name for name, _ in row] != [name for name, _ in rows[0]]:
            raise BatchError(f"micro_batch[{k}] has other parts than micro_batch[0], {_REMEDY}")
    names = [name for name, _ in rows[0]]
    leaves = zip(*([leaf for _, leaf in row] for row in rows), strict=True)
    columns = [_joined(name, column) for name, column in zip(names, leaves, strict=True)]
    tensors: Iterator[Tensor] = iter([column for column in columns if isinstance(column, Tensor)])
    return nest.map_tensors(lambda _: next(tensors), window[0]), sizes


def _joined(name: str, leaves: tuple[Any, ...]) -> Any:
    """One part of the full batch. What has no samples must be the same in all micro-batches."""
    first = leaves[0]
    if all(isinstance(leaf, Tensor) and leaf.ndim for leaf in leaves):
        if len(kinds := {(leaf.shape[1:], leaf.dtype, leaf.device) for leaf in leaves}) > 1:
            texts = " and ".join(sorted(f"{tuple(shape)} of {dtype} on {device}" for shape, dtype, device in kinds))
            raise BatchError(f"the samples of micro_batch{name} differ ({texts}), {_REMEDY}")
        return torch.cat(leaves)
    for k, leaf in enumerate(leaves):
        are_tensors = isinstance(leaf, Tensor) and isinstance(first, Tensor)
        if not (torch.equal(leaf, first) if are_tensors else np.array_equal(leaf, first)):
            raise BatchError(f"micro_batch[{k}]{name} has no samples but is not that of micro_batch[0], {_REMEDY}")
    return first
