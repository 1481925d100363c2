"""Tensors as arrays on the host, and back."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core.checkpoint.serialize import STORED, Array
from ..core.errors import StateError

_VIEWS = {2: torch.uint16, 1: torch.uint8}
_SPARSE = "sparse tensor"


def to_array(value: Any) -> Array | None:
    """A copy on the host; None if the value is not a tensor."""
    if not isinstance(value, Tensor):
        return None
    if value.layout is not torch.strided or value.is_quantized or hasattr(value, "full_tensor"):
        raise StateError(
            f"a tensor of {type(value).__name__} with the layout {value.layout} cannot be saved: make it dense, or use "
            "torch.distributed.checkpoint for a model that several ranks train"
        )
    name = str(value.dtype).removeprefix("torch.")
    copied = value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format).resolve_conj().resolve_neg()
    stored = copied.view(_VIEWS[copied.itemsize]) if name in STORED else copied
    return Array(stored.numpy(), name)


def from_array(array: Array) -> Tensor:
    """A tensor with its own memory."""
    tensor = torch.from_numpy(array.stored.copy())
    return tensor.view(getattr(torch, array.dtype)) if array.dtype in STORED else tensor


def without_sparse(tree: Any) -> Any:
    """The tree with every sparse tensor replaced by its indices and values."""

    def convert(value: Any) -> Any:
        if isinstance(value, Tensor) and value.layout is torch.sparse_coo:
            value = value.coalesce()
            return {_SPARSE: [value.indices(), value.values(), list(value.shape)]}
        return value

    return _mapped(convert, tree)


def with_sparse(tree: Any) -> Any:
    """The opposite of `without_sparse`."""

    def convert(value: Any) -> Any:
        if isinstance(value, dict) and value.keys() == {_SPARSE}:
            return torch.sparse_coo_tensor(*value[_SPARSE], is_coalesced=True, check_invariants=True)
        return value

    return _mapped(convert, tree)


def _mapped(convert: Callable[[Any], Any], tree: Any) -> Any:
    if type(tree) in (dict, OrderedDict):  # the latter is a model's; others, such as a Counter, have no tensors
        tree = {key: _mapped(convert, item) for key, item in tree.items()}
    elif type(tree) in (list, tuple):
        tree = type(tree)(_mapped(convert, item) for item in tree)
    return convert(tree)
