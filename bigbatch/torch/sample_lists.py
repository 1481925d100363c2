"""Recognises a list of samples (`collate_fn=list`): cutting it as a batch cuts inside of samples, not between them.

A batch that is a list may be `[x, y]`, two tensors with all samples in each, or one tensor for each sample. Where all
have the same shape, only the loss can tell: it is a mean over the rows of the tensors, or over the items of the list.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ..core.errors import BatchError, BigBatchWarning
from ..core.weight import Reduction, Terms, scales, totals, weighted
from ..core.window import Window
from . import nest
from .time_major import run_aside
from .weight import Weight, weigh

NUM_ITEMS, NUM_ROWS = 3, 2
Run = Callable[[Any], Terms]


def may_be_samples(batch: Any) -> bool:
    """Whether this is a list or tuple of several items that all have tensors of the same shapes."""
    if type(batch) not in (list, tuple) or len(batch) < 2:
        return False
    kinds = {tuple((tensor.shape, tensor.dtype) for tensor in nest.tensors(item)) for item in batch}
    return len(kinds) == 1 and kinds != {()}


def are_samples(run: Run, model: nn.Module, batch: Any, weight: Weight | None, reduction: Reduction) -> bool:
    """Whether the loss is a mean over the items of the batch and not over its rows, of which it has two at least.

    Three items will do. Gradients are off meanwhile, the model is in eval mode, and buffers and torch's random state
    are left as they were.
    """

    def value(parts: Sequence[Any], sizes: Sequence[int], weight: Weight | None) -> float:
        weights = [(size,) for size in sizes] if weight is None else weigh(parts, weight)
        losses = [run_aside(run, model, part) for part in parts]
        return sum(weighted(losses, [scales(w, totals(weights), reduction) for w in weights]))

    items = type(batch)(batch[:NUM_ITEMS])
    rows, row_sizes = nest.cut(items, nest.batch_size(items) // 2)
    halves, half_sizes = [items[:1], items[1:]], [1, len(items) - 1]
    training = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in training:
            module.training = False
        whole = value([items], [1], weight)
        by_rows = value(rows, row_sizes, weight)
        if not math.isfinite(by_rows - whole) or abs(by_rows - whole) <= 1e-3 * abs(whole):
            return False
        by_items = [value(halves, half_sizes, way) for way in {weight, None}]
    except Exception:  # a loss that unpacks its batch, `x, y = batch`, cannot run on a part of it
        return False
    finally:
        for module, was_training in training:
            module.training = was_training
    return any(20 * abs(found - whole) < abs(by_rows - whole) for found in by_items)


class SampleLists:
    """Looks once, at the first window of several micro-batches that are such lists."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._has_looked = False

    def check(
        self, batch: Any, micro_batches: Sequence[Any], run: Run, weight: Weight | None, reduction: Reduction
    ) -> None:
        """Refuses a batch that would be cut inside of its samples; warns if a window's weights count the wrong axis."""
        few = next((m for m in micro_batches if may_be_samples(m)), None)
        if self._has_looked or len(micro_batches) < 2 or few is None:
            return
        is_cut = not isinstance(batch, Window)
        if is_cut and nest.batch_size(few) < NUM_ROWS:
            few = nest.cut(batch, NUM_ROWS)[0][0]
        elif not is_cut and (weight is not None or reduction == "sum" or nest.batch_size(few) < NUM_ROWS):
            return
        if are_samples(run, self._model, few, weight, reduction):
            self._tell(few, nest.batch_size(batch if is_cut else few), is_cut=is_cut)
        self._has_looked = True

    def _tell(self, few: Any, num_rows: int, *, is_cut: bool) -> None:
        what = (
            f"is a {type(few).__name__} of {len(few)} items of the same shape, and the loss is a mean over these items"
        )
        if is_cut:
            raise BatchError(
                f"the batch {what}, not over the {num_rows} rows of each, which would be cut: stack the items in the "
                "collate function, or pass a Window of such lists with weight=len"
            )
        warnings.warn(
            f"a micro-batch {what}, but it counts as {num_rows} samples, the rows of each: pass weight=len",
            BigBatchWarning,
            stacklevel=5,
        )
