"""The size of a batch, which is any nest of tensors, and how it is cut."""

import copy
import dataclasses
import functools
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
from ..core.errors import BatchError
from ..core.window import Window, check_lists, cuts, rank_slices

_MIN_SAMPLES = 3
"""A list of fewer tensors of one shape is not taken for a list of samples: two are an input and its target."""
_REMEDY = (
    "; pass anything that is not per sample to the loss separately, and feed lists with an item for each sample (the "
    "boxes of each image) to step() as a Window of micro-batches, with weight=…"
)


def map_tensors(change: Callable[[Tensor], Any], nest: Any) -> Any:
    """The same nest with every tensor changed; other values stay as they are."""
    if isinstance(nest, Tensor):
        return change(nest)
    if isinstance(nest, tuple):
        return _tuple_like(nest, [map_tensors(change, item) for item in nest])
    if isinstance(nest, list):
        row = [map_tensors(change, item) for item in nest]
        if type(nest) is list:
            return row
        changed = _copied(nest)  # keeps the class and its methods
        changed[:] = row
        return changed
    if isinstance(nest, Mapping):
        mapped = {key: map_tensors(change, item) for key, item in nest.items()}
        if not isinstance(nest, dict | UserDict):
            return mapped
        changed = _copied(nest)  # keeps the class: OrderedDict, transformers' BatchEncoding
        for key, item in mapped.items():
            changed[key] = item
        return changed
    if _is_dataclass(nest):
        changed = _copied(nest)
        for field in dataclasses.fields(nest):
            object.__setattr__(changed, field.name, map_tensors(change, getattr(nest, field.name)))
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
    found = _items(nest, name)
    if found is None:
        yield name, nest
    else:
        for part, item in found:
            yield from leaves(item, part)


def _items(nest: Any, name: str) -> list[tuple[str, Any]] | None:
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


def is_empty(batch: Any) -> bool:
    """Whether there is no data: None, a window without micro-batches, or tensors without samples."""
    if batch is None or isinstance(batch, Window):
        return not batch
    found = tensors(batch)
    return bool(found) and all(tensor.ndim and not tensor.size(0) for tensor in found)


def batch_size(batch: Any, name: str = "batch") -> int:
    """The size of the leading axis that all tensors share. 0-dim tensors have no samples and are passed whole.

    Args:
        batch: A nest of tensors.
        name: What error messages call it.

    Raises:
        BatchError: The tensors do not share their leading axis, or it is not that of samples.
    """
    if _is_row(batch):
        sizes: set[int] = {tensor.size(0) for tensor in batch if tensor.ndim}
        if len(sizes) == 1 and 0 not in sizes:
            return sizes.pop()
    _refuse_packed(batch, name)
    _refuse_samples(batch, name)
    named = [(leaf, t.size(0)) for leaf, t in leaves(batch, name) if isinstance(t, Tensor) and t.ndim]
    size = shared_size(named, batch, _REMEDY, name=name)
    _refuse_arrays(batch, name, size)
    return size


def _refuse_packed(batch: Any, name: str) -> None:
    """Raises for a PackedSequence: its rows are time steps, each with fewer samples than the one before."""
    if isinstance(batch, PackedSequence):
        raise BatchError(
            f"the {name} is a PackedSequence of {len(batch.batch_sizes)} times, which has no axis of samples: pass "
            "padded tensors and their lengths, and pack them in the loss"
        )
    for part, item in _items(batch, name) or ():
        _refuse_packed(item, part)


def _refuse_samples(batch: Any, name: str) -> None:
    """Raises if a list could be one of samples (`collate_fn=list`), or of tensors that each have all samples."""
    if not isinstance(batch, list) or len(batch) < _MIN_SAMPLES:
        return
    shapes = [[tuple(leaf.shape) for leaf in tensors(item)] for item in batch]
    if any(any(row) for row in shapes) and all(row == shapes[0] for row in shapes):
        _, leaf = next((part, leaf) for part, leaf in leaves(batch, name) if isinstance(leaf, Tensor) and leaf.ndim)
        raise BatchError(
            f"the {name} is a list of {len(batch)} items of one shape, {tuple(leaf.shape)}, which may be "
            f"{len(batch)} samples, or tensors with {leaf.size(0)} samples each: pass torch.stack(batch) in the first "
            "case, and tuple(batch) in the second"
        )


def _refuse_arrays(batch: Any, name: str, size: int) -> None:
    """Raises for an array with a row for each sample: values that are not tensors are passed whole."""
    for leaf, item in leaves(batch, name):
        if isinstance(item, np.ndarray) and item.ndim and len(item) == size > 1:
            raise BatchError(
                f"{leaf} is a numpy array with {size} rows for {size} samples, which would not be cut: "
                "pass it as a tensor, for example torch.as_tensor(…)"
            )


def cut(batch: Any, micro_batch_size: int, *, avoid_single_sample: bool = False) -> tuple[list[Any], list[int]]:
    """The micro-batches, views of the batch where torch can make them, and their sizes.

        micro_batches = [batch[k : k + micro_batch_size] for k in range(0, len(batch), micro_batch_size)]

    Args:
        batch: A nest of tensors.
        micro_batch_size: The size of all micro-batches but the last, which has the rest.
        avoid_single_sample: Whether the last one may not have one sample alone; see `core.window.cuts`.
    """
    size = batch_size(batch)
    if micro_batch_size == 1:
        check_lists(batch, size)
    parts = cuts(size, micro_batch_size, avoid_single_sample=avoid_single_sample)
    sizes = [part.stop - part.start for part in parts]
    rows = list(zip(*[_pieces(tensor, sizes) for tensor in tensors(batch)], strict=True))
    if _is_row(batch):
        return rows, sizes
    return [map_tensors(_next_of(row), batch) for row in rows], sizes


def detached(batch: Any) -> Any:
    """Tensors in the same memory that autograd does not see as views, so that a loss may write parameters into them."""
    return map_tensors(Tensor.detach, batch)


def part_of_rank(batch: Any, rank: int, num_ranks: int) -> Any:
    """One rank's part of a batch that all ranks have; None if it has no sample."""
    part = rank_slices(batch_size(batch), num_ranks)[rank]
    if part.start == part.stop:
        return None
    return map_tensors(lambda tensor: _piece(tensor, part) if tensor.ndim else tensor, batch)


def _piece(tensor: Tensor, part: slice) -> Tensor:
    is_sparse = tensor.layout is torch.sparse_coo
    return torch.narrow_copy(tensor, 0, part.start, part.stop - part.start) if is_sparse else tensor[part]


def _next_of(row: tuple[Tensor, ...]) -> Callable[[Tensor], Tensor]:
    in_order = iter(row)
    return lambda _: next(in_order)


def _pieces(tensor: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    if tensor.ndim == 0:
        return [tensor] * len(sizes)
    if tensor.layout is torch.strided and not tensor.is_nested:
        pieces: tuple[Tensor, ...] = tensor.split(sizes)
        if tensor.requires_grad:  # the user wants its gradient
            return pieces
        return [piece.detach() for piece in pieces]  # a loss may write parameters into them, but not into views
    if tensor.layout is torch.sparse_coo:
        return [_piece(tensor, slice(stop - size, stop)) for size, stop in zip(sizes, accumulate(sizes), strict=True)]
    is_dense = tensor.layout is torch.strided
    layout = "is nested" if is_dense else f"has the layout {tensor.layout}"
    raise BatchError(
        f"a tensor of the batch {layout}, which cannot be cut: pass it dense, or feed its micro-batches as a Window"
    )
