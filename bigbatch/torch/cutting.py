"""How a batch is cut: along an axis of its tensors, as a list of samples, or by a function of the user's."""

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.errors import BatchError, OptionError
from ..core.options import Option, check_callable
from ..core.weight import from_terms, totals
from ..core.window import Window, cuts
from . import batch as nest
from .batch import BatchAxis

_CLOSE = 1e-6
"""How far apart the weight of a batch and that of its micro-batches may be: weights may be sums in float32."""


def _check_cut(name: str, value: Any) -> Any:
    """For cut: None, "list" or a function. Returns it."""
    if value is not None and value != "list" and not callable(value):
        raise OptionError(f'{name} is {value!r}: pass "list", a function (batch, sizes) -> micro_batches, or None')
    return value


class Cutting:
    """Cuts batches into micro-batches, and says how many samples each has.

        micro_batches, sizes = cutting(batch, micro_batch_size)

    Args:
        batch_axis: The axis of the samples, or a nest like the batch with the axis of each tensor.
        cut: "list" if lists have an item for each sample, or a function that cuts.
        num_samples: A function that returns how many samples a batch has, if its tensors do not show it.
    """

    batch_axis = Option(nest.check_batch_axis)
    cut, num_samples = Option(_check_cut), Option(check_callable)

    def __init__(self, batch_axis: BatchAxis = 0, cut: Any = None, num_samples: Any = None) -> None:
        self.batch_axis, self.cut, self.num_samples = batch_axis, cut, num_samples

    def __call__(
        self, batch: Any, micro_batch_size: int, *, avoid_single_sample: bool = False
    ) -> tuple[Sequence[Any], list[int]]:
        """The micro-batches and their sizes; see `core.window.cuts` for `avoid_single_sample`."""
        if self.cut is None:
            return nest.cut(batch, micro_batch_size, self.batch_axis, avoid_single_sample=avoid_single_sample)
        parts = cuts(self.size(batch), micro_batch_size, avoid_single_sample=avoid_single_sample)
        sizes = [part.stop - part.start for part in parts]
        if self.cut == "list":
            return [take(batch, part, self.batch_axis) for part in parts], sizes
        return self._by_function(batch, sizes), sizes

    def size(self, batch: Any, name: str = "batch") -> int:
        """The number of samples of a batch or micro-batch.

        Raises:
            BatchError: It is not known, or there are none.
        """
        if self.cut == "list":
            return _size_of_lists(batch, name, self.batch_axis)
        if self.num_samples is not None:
            return _checked_number(self.num_samples(batch), name)
        try:
            return nest.batch_size(batch, name, self.batch_axis)
        except BatchError as error:
            if self.cut is None:
                raise
            raise BatchError(
                f"cut= does not know how many samples the {name} has, since its tensors do not show it ({error}): "
                'pass a function, for example num_samples=lambda batch: len(batch["cu_seqlens"]) - 1'
            ) from None

    def is_empty(self, batch: Any) -> bool:
        """Whether there is no data: None, a window without micro-batches, or a batch without samples."""
        if batch is None or isinstance(batch, Window):
            return not batch
        if self.cut == "list":
            sizes = [size for _, size in _sizes_of_lists(batch, "batch", self.batch_axis)]
            return bool(sizes) and not any(sizes)
        if self.num_samples is not None:
            return bool(self.num_samples(batch) == 0)
        return self.cut is None and nest.is_empty(batch, self.batch_axis)

    # --- the user's function -----------------------------------------------------------------------------

    def _by_function(self, batch: Any, sizes: list[int]) -> list[Any]:
        """What the function returns, if together that is the batch."""
        found = self.cut(batch, list(sizes))
        if isinstance(found, Tensor | Mapping | str) or not isinstance(found, Iterable):
            raise BatchError(f"cut returned a {type(found).__name__}: return a list with {len(sizes)} micro-batches")
        micro_batches = list(found)
        if len(micro_batches) != len(sizes):
            raise BatchError(
                f"cut returned {len(micro_batches)} micro-batches for the sizes {sizes}: return one for each size"
            )
        for k, (micro_batch, size) in enumerate(zip(micro_batches, sizes, strict=True)):
            num = self.size(micro_batch, f"micro_batch[{k}]")
            if num != size:
                raise BatchError(
                    f"micro-batch {k + 1} that cut returned has {num} samples instead of {size}: return the next "
                    f"sizes[{k}] samples in it"
                )
        whole = dict(_parts(batch, "batch", self.batch_axis))
        parts = [dict(_parts(micro_batch, "batch", self.batch_axis)) for micro_batch in micro_batches]
        if not whole.keys().isdisjoint({name for part in parts for name in part}):  # else it has another structure
            for name, item in whole.items():
                _check_adds_up(name, item, [part[name] for part in parts if name in part])
        return micro_batches

    def check_weights(self, of_batch: Any, of_micro_batches: Sequence[Any]) -> None:
        """Raises BatchError unless the weights of the micro-batches add up to that of the batch, term by term."""
        found = totals(of_micro_batches)
        if any(abs(a - b) > _CLOSE * max(a, b) for a, b in zip(of_batch, found, strict=True)):
            raise BatchError(
                f"the weight of the batch is {from_terms(of_batch)}, but those of the micro-batches that cut returned "
                f"add up to {from_terms(found)}: return each sample once, with all that belongs to it"
            )


def _checked_number(found: Any, name: str) -> int:
    try:
        number = operator.index(found)  # of NumPy's numbers and tensors too
    except TypeError:
        number = None
    if number is None or isinstance(found, bool):
        raise BatchError(f"num_samples returned {found!r} for the {name}: return the number of its samples")
    if number < 1:
        raise BatchError(f"the {name} has {number} samples: leave empty batches out of the stream")
    return number


def _parts(batch: Any, name: str, axis: BatchAxis, *, is_whole: bool = True) -> list[tuple[str, Any]]:
    """Every tensor and every list with its name, unless `batch_axis` says None for it."""
    if axis is None:
        return []
    if isinstance(batch, Tensor):
        return [] if batch.is_nested else [(name, batch)]
    if _is_list(batch, is_whole=is_whole):
        return [(name, batch)]
    found = nest.items(batch, name) or ()
    own = nest.axes_of_items(batch, name, axis) if found else ()
    return [
        part for (inner, item), a in zip(found, own, strict=True) for part in _parts(item, inner, a, is_whole=False)
    ]


def _shape(part: Any) -> tuple[int, ...]:
    return tuple(part.shape) if isinstance(part, Tensor) else (len(part),)


def _check_adds_up(name: str, batch: Any, micro_batches: list[Any]) -> None:
    """Raises BatchError unless the parts can be the whole.

    They add up along one axis, where the others may have lost padding; or are offsets, which have one more than there
    are sequences; or each is the whole.
    """
    whole, parts = _shape(batch), list(map(_shape, micro_batches))
    if parts and (all(part == whole for part in parts) or _are_offsets(whole, parts)):
        return
    if not _do_add_up(whole, parts):
        raise BatchError(
            f"{name} has the shape {whole}, but in the micro-batches that cut returned it has "
            f"{', '.join(map(str, parts)) or 'none'}, which do not add up: return each sample once, or let batch_axis "
            "say None for what need not add up"
        )
    if _do_overlap(micro_batches):
        raise BatchError(
            f"cut returned some elements of {name} twice, since two micro-batches have views of the same memory: "
            "return each sample once, or let batch_axis say None for what they share"
        )


def _are_offsets(whole: tuple[int, ...], parts: list[tuple[int, ...]]) -> bool:
    return {len(whole), *map(len, parts)} == {1} and sum(part[0] - 1 for part in parts) == whole[0] - 1


def _do_add_up(whole: tuple[int, ...], parts: list[tuple[int, ...]]) -> bool:
    if any(len(part) != len(whole) for part in parts):
        return False
    for axis, size in enumerate(whole):
        is_inside = all(part[k] <= whole[k] for part in parts for k in range(len(whole)) if k != axis)
        if is_inside and sum(part[axis] for part in parts) == size:
            return True
    return False


def _do_overlap(parts: list[Any]) -> bool:
    """Whether two parts are views of the same elements: a cut that does not move on, say. Nothing is read."""
    dense = [
        t for t in parts if isinstance(t, Tensor) and t.layout is torch.strided and t.is_contiguous() and t.numel()
    ]
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in dense)
    return any(start < stop for (_, stop), (start, _) in pairwise(spans))


# --- lists of samples ------------------------------------------------------------------------------------


def _is_list(found: Any, *, is_whole: bool) -> bool:
    """Whether this has an item for each sample. `tuple(zip(*samples))` is a tuple of such tuples."""
    return isinstance(found, list) or (type(found) is tuple and not is_whole)


def _rows(batch: Any, name: str, axis: BatchAxis, *, is_whole: bool = True) -> Iterator[tuple[str, Any, int]]:
    """Every list, and every tensor and array beside one, with its name and the axis of its samples."""
    if axis is None:
        return
    if _is_list(batch, is_whole=is_whole):
        yield name, batch, 0
        return
    found = nest.items(batch, name)
    if found is None:
        yield from ((part, leaf, a) for part, leaf, a in nest.axes(batch, axis, name) if a is not None)
        return
    for (part, item), own in zip(found, nest.axes_of_items(batch, name, axis), strict=True):
        yield from _rows(item, part, own, is_whole=False)


def _sizes_of_lists(batch: Any, name: str, axis: BatchAxis) -> list[tuple[str, int]]:
    """The number of samples of every list, and of every tensor beside one; empty if there is no list."""
    found = list(_rows(batch, name, axis))
    if not any(isinstance(rows, list | tuple) for _, rows, _ in found):
        return []
    sizes = [
        (part, rows.size(a) if isinstance(rows, Tensor) else len(rows))
        for part, rows, a in found
        if not isinstance(rows, np.ndarray)
    ]
    nest.refuse_arrays(found, sizes[0][1])
    return sizes


def _size_of_lists(batch: Any, name: str, axis: BatchAxis) -> int:
    sizes = _sizes_of_lists(batch, name, axis)
    if not sizes:
        raise BatchError(
            f'the {name} is a {type(batch).__name__} without lists, which cut="list" cannot cut: pass a list of '
            "samples, or a tuple or a dict of lists with an item for each sample"
        )
    if type(batch) is tuple and _may_be_samples(batch):
        raise BatchError(
            f"the {name} is a tuple of {len(batch)} tuples with {len(batch[0])} items, which may be samples or lists: "
            "pass list(batch) if each item is a sample, or tuple(zip(*batch)) to have lists with an item for each "
            "sample"
        )
    first, size = sizes[0]
    for other, num in sizes:
        if num != size:
            raise BatchError(
                f'{first} has {size} samples but {other} has {num}: with cut="list" each list has an item for each '
                "sample; let batch_axis say None for what is passed whole"
            )
    if not size:
        raise BatchError(f"{first} has 0 samples: leave empty batches out of the stream")
    return size


def _may_be_samples(batch: tuple[Any, ...]) -> bool:
    """Whether a tuple, which is read as one of lists, looks like one of samples: `collate_fn=tuple` makes it.

    Samples have the same kind of thing at the same place; lists have the same kind throughout.
    """
    if not all(type(item) in (tuple, list) for item in batch) or len({len(item) for item in batch}) != 1:
        return False
    if not batch[0] or not all(map(_is_one_kind, zip(*batch, strict=True))):
        return False
    return 1 < len(batch[0]) < len(batch) or not all(map(_is_one_kind, batch))


def _is_one_kind(items: Sequence[Any]) -> bool:
    kinds = {(type(item), getattr(item, "dtype", None), getattr(item, "ndim", None)) for item in items}
    return len(kinds - {(type(None), None, None)}) <= 1


def take(batch: Any, rows: slice | Sequence[int], axis: BatchAxis = 0, *, is_whole: bool = True) -> Any:
    """These samples of a batch of lists."""
    if axis is None:
        return batch
    if _is_list(batch, is_whole=is_whole):
        picked = batch[rows] if isinstance(rows, slice) else [batch[row] for row in rows]
        return tuple(picked) if isinstance(batch, tuple) else picked
    if isinstance(batch, Tensor):
        ((_, _, own),) = nest.axes(batch, axis)
        if own is None:
            return batch
        if isinstance(rows, slice):
            return nest.piece(batch, rows, own)
        return batch.index_select(own, torch.as_tensor(rows, device=batch.device))
    if nest.items(batch, "") is None:
        return batch
    in_order = iter(nest.axes_of_items(batch, "batch", axis))
    return nest.map_items(lambda item: take(item, rows, next(in_order), is_whole=False), batch)
