"""A batch is any nest of tensors: what its size is and how it is cut."""

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

from ..core.errors import BatchError
from ..core.window import Window, check_lists, rank_slices

MIN_SAMPLES = 3
"""Two tensors of one shape are an input and its target."""


def map_tensors(change: Callable[[Tensor], Any], nest: Any) -> Any:
    """The same nest with every tensor changed; what is no tensor stays as it is."""
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
    if is_dataclass(nest):
        changed = _copied(nest)
        for field in dataclasses.fields(nest):
            object.__setattr__(changed, field.name, map_tensors(change, getattr(nest, field.name)))
        return changed
    return nest


def _tuple_like(nest: tuple[Any, ...], row: list[Any]) -> Any:
    """A tuple of the same class with other items, without a call of its __new__, which may want other arguments."""
    if type(nest) is tuple:
        return tuple(row)
    if type(nest).__new__ is not tuple.__new__ and not isinstance(type(nest).__new__, FunctionType):
        return type(nest)(row)  # written in C, like torch.return_types.max
    changed = tuple.__new__(type(nest), row)
    if own := getattr(nest, "__dict__", None):
        changed.__dict__.update(own)
    return changed


def _copied(nest: Any) -> Any:
    """Of the same class, without what it keeps of all samples beside its items."""
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
    """Everything in the nest with the name it goes by, in the order of `map_tensors`."""
    found = items(nest, name)
    if found is None:
        yield name, nest
    else:
        for part, item in found:
            yield from leaves(item, part)


def items(nest: Any, name: str) -> list[tuple[str, Any]] | None:
    """What a nest is made of; None if this is none."""
    if isinstance(nest, tuple | list):
        fields = getattr(nest, "_fields", None)
        return [(f"{name}.{fields[k]}" if fields else f"{name}[{k}]", item) for k, item in enumerate(nest)]
    if isinstance(nest, Mapping):
        return [(f"{name}[{key!r}]", item) for key, item in nest.items()]
    if is_dataclass(nest):
        return [(f"{name}.{field.name}", getattr(nest, field.name)) for field in dataclasses.fields(nest)]
    return None


def is_row(nest: Any) -> bool:
    """Whether this is a plain tuple of tensors: the usual case, which needs no detour."""
    return type(nest) is tuple and set(map(type, nest)) == {Tensor}


def tensors(nest: Any) -> list[Tensor]:
    """Every tensor of the nest, in the order of `map_tensors`."""
    return list(nest) if is_row(nest) else [leaf for _, leaf in leaves(nest, "") if isinstance(leaf, Tensor)]


def is_dataclass(nest: Any) -> bool:
    return dataclasses.is_dataclass(nest) and not isinstance(nest, type)


def is_empty(batch: Any) -> bool:
    """Whether a rank has nothing: None, a window without micro-batches, or tensors without samples."""
    if batch is None or isinstance(batch, Window):
        return not batch
    found = tensors(batch)
    return bool(found) and all(tensor.ndim and not tensor.size(0) for tensor in found)


def batch_size(batch: Any, name: str = "batch") -> int:
    """The size of the leading axis that all tensors share. A tensor without axes has none to share."""
    is_plain = is_row(batch)
    if not is_plain:
        _refuse_packed(batch, name)
        _refuse_samples(batch, name)
    sizes = {tensor.size(0) for tensor in (batch if is_plain else tensors(batch)) if tensor.ndim}
    if len(sizes) == 1 and 0 not in sizes:
        size = sizes.pop()
        if not is_plain:
            _refuse_arrays(batch, name, size)
        return size
    if not sizes:
        raise BatchError(
            f"the {name} has no tensor with a batch axis ({type(batch).__name__}): pass a tensor or a nest of tensors"
        )
    named = [(leaf, t.size(0)) for leaf, t in leaves(batch, name) if isinstance(t, Tensor) and t.ndim]
    first, size = named[0]
    for leaf, other in named:
        if other != size:
            raise BatchError(
                f"{first} has {size} samples but {leaf} has {other}: all tensors of a batch share their leading "
                "axis; what belongs to no sample goes into the loss by other ways, and lists with an item for each "
                "sample (the boxes of each image) go to step() as a Window of micro-batches, with weight=…"
            )
    raise BatchError(f"{first} has 0 samples: leave empty batches out of the stream")


def _refuse_packed(batch: Any, name: str) -> None:
    """The rows of a PackedSequence are times, and those of each are fewer."""
    if isinstance(batch, PackedSequence):
        raise BatchError(
            f"the {name} is a PackedSequence of {len(batch.batch_sizes)} times, which has no axis of samples: pass "
            "padded tensors and their lengths, and pack them in the loss"
        )
    for part, item in items(batch, name) or ():
        _refuse_packed(item, part)


def _refuse_samples(batch: Any, name: str) -> None:
    """A list may be of samples (`collate_fn=list`) or of tensors that have all samples: alike, they could be either."""
    if not isinstance(batch, list) or len(batch) < MIN_SAMPLES:
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
    """What is no tensor goes to every micro-batch whole; an array with a row per sample was not meant to."""
    for leaf, item in leaves(batch, name):
        if isinstance(item, np.ndarray) and item.ndim and len(item) == size > 1:
            raise BatchError(
                f"{leaf} is a numpy array with {size} rows for {size} samples, which would not be cut: "
                "pass it as a tensor, for example torch.as_tensor(…)"
            )


def cut(batch: Any, micro_batch_size: int, *, is_one_too_few: bool = False) -> tuple[list[Any], list[int]]:
    """The micro-batches, in the memory of the batch where torch can do that, and their sizes.

    If one sample is too few, because BatchNorm has nothing to normalise by, the last full one leaves one of its own to
    a remainder of one.
    """
    size = batch_size(batch)
    if micro_batch_size == 1:
        check_lists(batch, size)
    num_full, rest = divmod(size, micro_batch_size)
    sizes = [micro_batch_size] * num_full + [rest] * (rest > 0)
    if is_one_too_few and rest == 1 and num_full and micro_batch_size > 2:
        sizes[-2:] = [micro_batch_size - 1, 2]
    rows = list(zip(*[_pieces(tensor, sizes) for tensor in tensors(batch)], strict=True))
    if is_row(batch):
        return rows, sizes
    return [map_tensors(_next_of(row), batch) for row in rows], sizes


def detached(batch: Any) -> Any:
    """The same memory, which autograd takes for tensors of their own: a loss may write parameters into them."""
    return map_tensors(Tensor.detach, batch)


def share(batch: Any, rank: int, num_ranks: int) -> Any:
    """What one rank has of a batch that all of them know; None if that is nothing."""
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
        if tensor.requires_grad:  # the user wants its gradient, too
            return pieces
        return [piece.detach() for piece in pieces]  # a loss may write parameters into them, but not into views
    if tensor.layout is torch.sparse_coo:
        return [_piece(tensor, slice(stop - size, stop)) for size, stop in zip(sizes, accumulate(sizes), strict=True)]
    is_dense = tensor.layout is torch.strided
    layout = "is nested" if is_dense else f"has the layout {tensor.layout}"
    raise BatchError(
        f"a tensor of the batch {layout}, which cannot be cut: pass it dense, or feed its micro-batches as a Window"
    )
