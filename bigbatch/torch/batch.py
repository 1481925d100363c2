"""The size of a batch, which is any nest of tensors, and how it is cut along the axis of its samples."""

import copy
import dataclasses
import functools
import operator
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ..core.batch import shared_size
from ..core.errors import BatchError, OptionError
from ..core.window import Window, check_lists, cuts, rank_slices

_MIN_SAMPLES = 3
"""A list of fewer tensors of one shape is not taken for a list of samples: two are an input and its target."""
_OF_LISTS = 'cut="list" if its lists have an item for each sample (the boxes of each image)'

BatchAxis = Any
"""An axis, or a nest of axes like the batch: None for what is passed whole."""


def map_tensors(change: Callable[[Tensor], Any], nest: Any) -> Any:
    """The same nest with every tensor changed; other values stay as they are."""
    return change(nest) if isinstance(nest, Tensor) else map_items(functools.partial(map_tensors, change), nest)


def map_items(change: Callable[[Any], Any], nest: Any) -> Any:
    """The same nest with each of its own items changed; the value itself if it is not a nest."""
    if isinstance(nest, tuple):
        return _tuple_like(nest, [change(item) for item in nest])
    if isinstance(nest, list):
        row = [change(item) for item in nest]
        if type(nest) is list:
            return row
        changed = _copied(nest)  # keeps the class and its methods
        changed[:] = row
        return changed
    if isinstance(nest, Mapping):
        mapped = {key: change(item) for key, item in nest.items()}
        if not isinstance(nest, dict | UserDict):
            return mapped
        changed = _copied(nest)  # keeps the class: OrderedDict, transformers' BatchEncoding
        for key, item in mapped.items():
            changed[key] = item
        return changed
    if _is_dataclass(nest):
        changed = _copied(nest)
        for field in dataclasses.fields(nest):
            object.__setattr__(changed, field.name, change(getattr(nest, field.name)))
        return changed
    return nest


def _tuple_like(nest: tuple[Any, ...], row: list[Any]) -> Any:
    """A tuple of the same class with other items. Its `__new__` is not called: it may take other arguments."""
    if type(nest) is tuple:
        return tuple(row)
    if type(nest).__new__ is not tuple.__new__ and not isinstance(type(nest).__new__, FunctionType):
        return type(nest)(row)  # written in C, like torch.return_types.max
    changed = tuple.__new__(type(nest), row)
    if own := getattr(nest, "__dict__", None):
        changed.__dict__.update(own)
    return changed


def _copied(nest: Any) -> Any:
    """An object of the same class, without cached properties, which were computed from all samples."""
    changed = copy.copy(nest)
    own = getattr(nest, "__dict__", {})
    if own is nest:  # a dict whose items are its attributes
        changed.__dict__ = changed
        return changed
    for name in own:
        if isinstance(getattr(type(nest), name, None), functools.cached_property):
            del changed.__dict__[name]
    return changed


def leaves(nest: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Everything in the nest with its name, in the order of `map_tensors`."""
    found = items(nest, name)
    if found is None:
        yield name, nest
    else:
        for part, item in found:
            yield from leaves(item, part)


def items(nest: Any, name: str) -> list[tuple[str, Any]] | None:
    """The items of a nest with their names; None if this is not a nest."""
    if isinstance(nest, tuple | list):
        fields = getattr(nest, "_fields", None)
        return [(f"{name}.{fields[k]}" if fields else f"{name}[{k}]", item) for k, item in enumerate(nest)]
    if isinstance(nest, Mapping):
        return [(f"{name}[{key!r}]", item) for key, item in nest.items()]
    if _is_dataclass(nest):
        return [(f"{name}.{field.name}", getattr(nest, field.name)) for field in dataclasses.fields(nest)]
    return None


def _is_row(nest: Any) -> bool:
    """Whether this is a plain tuple of tensors, the usual case, which needs no recursion."""
    return type(nest) is tuple and set(map(type, nest)) == {Tensor}


def tensors(nest: Any) -> list[Tensor]:
    """Every tensor of the nest, in the order of `map_tensors`."""
    return list(nest) if _is_row(nest) else [leaf for _, leaf in leaves(nest, "") if isinstance(leaf, Tensor)]


def _is_dataclass(nest: Any) -> bool:
    return dataclasses.is_dataclass(nest) and not isinstance(nest, type)


# --- the axis of the samples -----------------------------------------------------------------------------


def check_batch_axis(name: str, value: Any) -> Any:
    """For batch_axis: a whole number, or a nest of whole numbers and None. Returns it."""
    if isinstance(value, Mapping | tuple | list):
        checked = [
            None if item is None else check_batch_axis(name, item)
            for item in (value.values() if isinstance(value, Mapping) else value)
        ]
        if isinstance(value, Mapping):
            return dict(zip(value, checked, strict=True))
        return value._make(checked) if hasattr(value, "_make") else type(value)(checked)
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # of NumPy's numbers too
    except TypeError:
        number = None
    if number is None:
        raise OptionError(
            f"{name} is {value!r}: pass a whole number, or for each tensor its own in a nest like the batch, with None "
            "for one that is passed whole"
        )
    return number


def axes(batch: Any, batch_axis: BatchAxis, name: str = "batch") -> list[tuple[str, Any, int | None]]:
    """Every leaf with its name and the axis of its samples, in the order of `map_tensors`; None if it has no such axis.

    Raises BatchError if `batch_axis` does not fit the batch.
    """
    found = list(_with_axes(batch, name, batch_axis))
    for part, leaf, axis in found:
        if isinstance(leaf, Tensor) and axis is not None and not 0 <= axis < leaf.ndim:
            sizes = [t.size(a) for _, t, a in found if isinstance(t, Tensor) and a is not None and 0 <= a < t.ndim]
            better = suggested_axes(batch, sizes[0] if sizes else leaf.size(0), first=axis)
            raise BatchError(
                f"{part} has {leaf.ndim} {'axis' if leaf.ndim == 1 else 'axes'}, so none with the number {axis}: say "
                f"with batch_axis which axis of each tensor has the samples, for example batch_axis={better}, None for "
                "one that is passed whole"
            )
    return found


def _with_axes(nest: Any, name: str, axis: BatchAxis) -> Iterator[tuple[str, Any, int | None]]:
    if isinstance(nest, PackedSequence) and axis is not None:
        raise BatchError(
            f"the {name} is a PackedSequence of {len(nest.batch_sizes)} times, which has no axis of samples: pass "
            "padded tensors and their lengths, and pack them in the loss"
        )
    found = items(nest, name)
    if found is not None:
        for (part, item), own in zip(found, axes_of_items(nest, name, axis), strict=True):
            yield from _with_axes(item, part, own)
        return
    if isinstance(axis, Mapping | tuple | list):
        raise BatchError(
            f"batch_axis is a {type(axis).__name__} for {name}, which is a {type(nest).__name__}: pass one number "
            "for it, or None if it is passed whole"
        )
    ndim = nest.ndim if isinstance(nest, Tensor | np.ndarray) else 0
    yield name, nest, axis + ndim if axis is not None and ndim and axis < 0 else axis if ndim else None


def axes_of_items(nest: Any, name: str, axis: BatchAxis) -> Sequence[BatchAxis]:
    """What `batch_axis` says for each item of a nest. Keys that it does not name have axis 0."""
    keys: list[Any]
    if isinstance(nest, Mapping):
        keys = list(nest)
    elif _is_dataclass(nest):
        keys = [field.name for field in dataclasses.fields(nest)]
    else:
        keys = list(getattr(nest, "_fields", range(len(nest))))
    if axis is None or isinstance(axis, int):
        return [axis] * len(keys)
    if isinstance(axis, Mapping):
        if unknown := [key for key in axis if key not in keys]:
            raise BatchError(
                f"batch_axis names {unknown[0]!r}, but {name} has {', '.join(map(repr, keys)) or 'nothing'}: "
                "name what is in the batch"
            )
        return [axis.get(key, 0) for key in keys]
    if isinstance(nest, Mapping) or _is_dataclass(nest) or len(axis) != len(keys):
        raise BatchError(
            f"batch_axis is a {type(axis).__name__} of {len(axis)} for {name}, which is a {type(nest).__name__} of "
            f"{len(keys)}: pass one number for all, or a nest with the structure of the batch"
        )
    return list(axis)


def suggested_axes(nest: Any, size: int, first: int = 0) -> BatchAxis:
    """The `batch_axis` that gives every tensor this many samples, along the axis `first` wherever that is possible."""
    if isinstance(nest, Tensor):
        order = dict.fromkeys([first, *range(nest.ndim)])
        return next((axis for axis in order if axis < nest.ndim and nest.size(axis) == size), None)
    found = items(nest, "")
    if found is None:
        return None
    own = [suggested_axes(item, size, first) for _, item in found]
    has_axes = [any(tensor.ndim for tensor in tensors(item)) for _, item in found]
    distinct = {axis if isinstance(axis, int) else None for axis, is_one in zip(own, has_axes, strict=True) if is_one}
    if len(distinct) == 1 and None not in distinct:
        return distinct.pop()
    keys = nest if isinstance(nest, Mapping) else getattr(nest, "_fields", None)
    if _is_dataclass(nest):
        keys = [field.name for field in dataclasses.fields(nest)]
    if keys is not None:
        return {key: axis for key, axis, is_one in zip(keys, own, has_axes, strict=True) if is_one}
    return tuple(own) if isinstance(nest, tuple) else own


def map_axes(change: Callable[[Tensor, int], Any], batch: Any, batch_axis: BatchAxis = 0) -> Any:
    """The same nest with every tensor changed that has samples; the function gets the tensor and their axis."""
    in_order = iter([axis for _, leaf, axis in axes(batch, batch_axis) if isinstance(leaf, Tensor)])
    return map_tensors(lambda t: t if (axis := next(in_order)) is None else change(t, axis), batch)


# --- its size --------------------------------------------------------------------------------------------


def is_empty(batch: Any, batch_axis: BatchAxis = 0) -> bool:
    """Whether there is no data: None, a window without micro-batches, or tensors without samples."""
    if batch is None or isinstance(batch, Window):
        return not batch
    sizes = [
        leaf.size(axis) for _, leaf, axis in axes(batch, batch_axis) if isinstance(leaf, Tensor) and axis is not None
    ]
    return bool(sizes) and not any(sizes)


def batch_size(batch: Any, name: str = "batch", batch_axis: BatchAxis = 0) -> int:
    """The number of samples, along the axis that all tensors share. 0-dim tensors have none and are passed whole.

    Args:
        batch: A nest of tensors.
        name: What error messages call it.
        batch_axis: That axis, or a nest of axes.

    Raises:
        BatchError: The tensors do not have the same number of samples, or the axis is not that of samples.
    """
    if batch_axis == 0 and _is_row(batch):
        sizes: set[int] = {tensor.size(0) for tensor in batch if tensor.ndim}
        if len(sizes) == 1 and 0 not in sizes:
            return sizes.pop()
    found = axes(batch, batch_axis, name)
    if batch_axis == 0:
        _refuse_samples(batch, name)
    named = [(leaf, t.size(a), a) for leaf, t, a in found if isinstance(t, Tensor) and a is not None]
    size = _shared_size(named, batch, name)
    if batch_axis == 0:
        for part, item in items(batch, name) or ():
            _refuse_samples(item, part, size)
    refuse_arrays(found, size)
    return size


def _shared_size(named: list[tuple[str, int, int]], batch: Any, name: str) -> int:
    """The number of samples that all have; `named` are the name, the size and the axis of each."""
    parts = [(part, size) for part, size, _ in named]
    if not parts and isinstance(batch, list):
        raise BatchError(
            f"the {name} has no tensor with a batch axis (list): pass a tensor or a nest of tensors, or {_OF_LISTS}"
        )
    if len(set(dict(parts).values())) < 2:
        return shared_size(parts, batch, name=name)
    remedy = _remedy(batch)
    if any(axis for *_, axis in named):
        (first, size, axis), (other, num, another) = named[0], next(n for n in named if n[1] != named[0][1])
        raise BatchError(
            f"{first} has {size} samples along axis {axis} but {other} has {num} along axis {another}: all tensors of "
            f"a batch have the same number of samples{remedy}"
        )
    return shared_size(parts, batch, remedy, name=name)


def _remedy(batch: Any) -> str:
    """What to pass for tensors of different sizes; with an example if they have an axis of one size."""
    counts: dict[int, int] = {}
    for tensor in (found := [tensor for tensor in tensors(batch) if tensor.ndim]):
        for size in dict.fromkeys(tensor.shape[:2]):
            counts[size] = counts.get(size, 0) + 1
    size = max(counts, key=lambda size: counts[size])
    example = f", for example batch_axis={suggested_axes(batch, size)}" if counts[size] == len(found) else ""
    has_lists = any(isinstance(item, list) for item in (batch, *(item for _, item in items(batch, "") or ())))
    lists = f", or pass {_OF_LISTS}" if has_lists else ""
    return (
        f"; say with batch_axis which axis of each has the samples{example}, None for one that is passed whole{lists}"
    )


def _refuse_samples(batch: Any, name: str, size: int | None = None) -> None:
    """Raises if a list could be one of samples (`collate_fn=list`), or of tensors that each have all samples.

    Inside of a batch of known size, that is a list with an item for each sample.
    """
    if not isinstance(batch, list) or len(batch) < _MIN_SAMPLES or size not in (None, len(batch)):
        return
    shapes = [[tuple(leaf.shape) for leaf in tensors(item)] for item in batch]
    if any(any(row) for row in shapes) and all(row == shapes[0] for row in shapes):
        leaf = next(leaf for leaf in tensors(batch) if leaf.ndim)
        raise BatchError(
            f"the {name} is a list of {len(batch)} items of one shape, {tuple(leaf.shape)}, which may be "
            f'{len(batch)} samples, or tensors with {leaf.size(0)} samples each: pass cut="list" in the first case, '
            f"and tuple({name}) in the second (default_collate makes such a list of [anchor, positive, negative])"
        )


def refuse_arrays(found: Sequence[tuple[str, Any, int | None]], size: int) -> None:
    """Raises for an array with a row for each sample: values that are not tensors are passed whole."""
    for leaf, item, axis in found:
        is_array = isinstance(item, np.ndarray) and axis is not None and 0 <= axis < item.ndim
        if is_array and item.shape[axis] == size > 1:
            raise BatchError(
                f"{leaf} is a numpy array with {size} rows for {size} samples, which would not be cut: "
                "pass it as a tensor, for example torch.as_tensor(…)"
            )


# --- its parts -------------------------------------------------------------------------------------------


def cut(
    batch: Any, micro_batch_size: int, batch_axis: BatchAxis = 0, *, avoid_single_sample: bool = False
) -> tuple[list[Any], list[int]]:
    """The micro-batches, views of the batch where torch can make them, and their sizes.

        micro_batches = [batch[k : k + micro_batch_size] for k in range(0, len(batch), micro_batch_size)]

    Args:
        batch: A nest of tensors.
        micro_batch_size: The size of all micro-batches but the last, which has the rest.
        batch_axis: The axis of the samples, or a nest of axes.
        avoid_single_sample: Whether the last one may not have one sample alone; see `core.window.cuts`.
    """
    size = batch_size(batch, batch_axis=batch_axis)
    if micro_batch_size == 1:
        check_lists(batch, size)
    parts = cuts(size, micro_batch_size, avoid_single_sample=avoid_single_sample)
    sizes = [part.stop - part.start for part in parts]
    if batch_axis == 0:
        found = [_pieces(tensor, sizes, 0 if tensor.ndim else None) for tensor in tensors(batch)]
    else:
        found = [_pieces(leaf, sizes, axis) for _, leaf, axis in axes(batch, batch_axis) if isinstance(leaf, Tensor)]
    rows = list(zip(*found, strict=True))
    if _is_row(batch):
        return rows, sizes
    return [map_tensors(_next_of(row), batch) for row in rows], sizes


def detached(batch: Any) -> Any:
    """Tensors in the same memory that autograd does not see as views, so that a loss may write parameters into them."""
    return map_tensors(Tensor.detach, batch)


def part_of_rank(batch: Any, rank: int, num_ranks: int) -> Any:
    """One rank's part of a batch that all ranks have; None if it has no sample."""
    part = rank_slices(batch_size(batch), num_ranks)[rank]
    return None if part.start == part.stop else map_axes(lambda tensor, axis: piece(tensor, part, axis), batch)


def piece(tensor: Tensor, part: slice, axis: int) -> Tensor:
    """These samples of a tensor: a view, unless the tensor is sparse."""
    is_sparse = tensor.layout is torch.sparse_coo
    narrow = torch.narrow_copy if is_sparse else torch.narrow
    found: Tensor = narrow(tensor, axis, part.start, part.stop - part.start)
    return found


def _next_of(row: tuple[Tensor, ...]) -> Callable[[Tensor], Tensor]:
    in_order = iter(row)
    return lambda _: next(in_order)


def _pieces(tensor: Tensor, sizes: list[int], axis: int | None) -> Sequence[Tensor]:
    if axis is None:
        return [tensor] * len(sizes)
    if tensor.layout is torch.strided and not tensor.is_nested:
        pieces: Sequence[Tensor] = tensor.split(sizes, axis)
        if axis and tensor.is_contiguous():  # view(-1) works on the batch, so it has to work here
            pieces = [part.contiguous() for part in pieces]
        if tensor.requires_grad:  # the user wants its gradient
            return pieces
        return [part.detach() for part in pieces]  # a loss may write parameters into them, but not into views
    if tensor.layout is torch.sparse_coo:
        stops = accumulate(sizes)
        return [piece(tensor, slice(stop - size, stop), axis) for size, stop in zip(sizes, stops, strict=True)]
    is_dense = tensor.layout is torch.strided
    layout = "is nested" if is_dense else f"has the layout {tensor.layout}"
    raise BatchError(
        f"a tensor of the batch {layout}, which cannot be cut: pass it dense, or feed its micro-batches as a Window"
    )
