"""A batch is any nest of tensors: what its size is and how it is cut."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor

from ..core.errors import BatchError
from ..core.window import cuts


def map_tensors(change: Callable[[Tensor], Any], nest: Any) -> Any:
    """The same nest with every tensor changed; what is no tensor stays as it is."""
    if isinstance(nest, Tensor):
        return change(nest)
    if isinstance(nest, tuple):
        items = [map_tensors(change, item) for item in nest]
        return type(nest)(*items) if hasattr(nest, "_fields") else tuple(items)
    if isinstance(nest, list):
        return [map_tensors(change, item) for item in nest]
    if isinstance(nest, MutableMapping):
        changed = copy.copy(nest)  # keeps the class: OrderedDict, transformers' BatchEncoding
        for key, item in nest.items():
            changed[key] = map_tensors(change, item)
        return changed
    if is_dataclass(nest):
        changed = copy.copy(nest)
        for field in dataclasses.fields(nest):
            object.__setattr__(changed, field.name, map_tensors(change, getattr(nest, field.name)))
        return changed
    return nest


def tensors(nest: Any, name: str = "batch") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the nest with the name it goes by, in the order of `map_tensors`."""
    if isinstance(nest, Tensor):
        yield name, nest
    elif isinstance(nest, tuple | list):
        fields = getattr(nest, "_fields", None)
        for number, item in enumerate(nest):
            yield from tensors(item, f"{name}.{fields[number]}" if fields else f"{name}[{number}]")
    elif isinstance(nest, MutableMapping):
        for key, item in nest.items():
            yield from tensors(item, f"{name}[{key!r}]")
    elif is_dataclass(nest):
        for field in dataclasses.fields(nest):
            yield from tensors(getattr(nest, field.name), f"{name}.{field.name}")


def is_dataclass(nest: Any) -> bool:
    return dataclasses.is_dataclass(nest) and not isinstance(nest, type)


def batch_size(batch: Any, name: str = "batch") -> int:
    """The size of the leading axis that all tensors share. A tensor without axes has none to share."""
    first: tuple[str, int] | None = None
    for leaf, tensor in tensors(batch, name):
        if tensor.ndim == 0:
            continue
        if first is None:
            first = leaf, tensor.shape[0]
        elif tensor.shape[0] != first[1]:
            raise BatchError(
                f"{first[0]} has {first[1]} samples but {leaf} has {tensor.shape[0]}: all tensors of a batch "
                "share their leading axis; what belongs to no sample goes into the loss by other ways"
            )
    if first is None:
        raise BatchError(
            f"the {name} has no tensor with a batch axis ({type(batch).__name__}): pass a tensor or a nest of tensors"
        )
    if first[1] == 0:
        raise BatchError(f"{first[0]} has 0 samples: leave empty batches out of the stream")
    return first[1]


def cut(batch: Any, micro_batch_size: int) -> tuple[list[Any], list[int]]:
    """The micro-batches, as views where torch has them, and their sizes."""
    parts = cuts(batch_size(batch), micro_batch_size)
    pieces = [_pieces(tensor, parts, name) for name, tensor in tensors(batch)]
    micro_batches = []
    for row in zip(*pieces, strict=True):
        in_order = iter(row)
        micro_batches.append(map_tensors(lambda _, pick=in_order: next(pick), batch))  # type: ignore[misc]
    return micro_batches, [part.stop - part.start for part in parts]


def _pieces(tensor: Tensor, parts: list[slice], name: str) -> list[Tensor] | tuple[Tensor, ...]:
    if tensor.ndim == 0:
        return [tensor] * len(parts)
    if tensor.is_nested or tensor.layout not in (torch.strided, torch.sparse_coo):
        raise BatchError(
            f"{name} has the layout {tensor.layout}, which cannot be cut: "
            "pass it dense, or feed its micro-batches as a Window"
        )
    if tensor.layout == torch.sparse_coo:
        return [torch.narrow_copy(tensor, 0, part.start, part.stop - part.start) for part in parts]
    return tuple(tensor.split(parts[0].stop))
