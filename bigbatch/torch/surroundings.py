"""What a recorded pass was recorded with, beside its micro-batch: it must be the same when it is replayed."""

import functools
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

PLAIN = frozenset({bool, int, float, complex, str, bytes, NoneType, torch.dtype, torch.device, torch.Size})
SIZED = frozenset({dict, OrderedDict, list, set})


def surroundings(model: nn.Module, loss: Callable[..., Any]) -> list[Any]:
    """Where tensors lie, whether they are trained, and the plain values that a pass may depend on.

    A replay reads the same memory and knows nothing of Python: a parameter that was replaced, a layer that was frozen,
    a dropout rate that changed, `model.eval()`, a hook that was added, all show here.
    """
    found: list[Any] = [
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.is_grad_enabled(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    ]
    beside = _beside(loss)
    found += _seen(value for value in beside if type(value) not in SIZED)
    for whole in [model, *(value for value in beside if isinstance(value, nn.Module) and value is not model)]:
        for module in whole.modules():
            found += _seen(module.__dict__.values())
            found += _seen(module._parameters.values())
            found += _seen(module._buffers.values())
    return found


def _seen(values: Iterable[Any]) -> list[Any]:
    return [
        value if (kind := type(value)) in PLAIN else len(value) if kind in SIZED else _place(value) for value in values
    ]


def _place(value: Any) -> Any:
    return (value.data_ptr(), value.requires_grad) if isinstance(value, Tensor) else None


def _beside(loss: Any) -> list[Any]:
    """The values that a function brings along: what it closes over, its defaults, the globals that it names."""
    loss = getattr(loss, "_torchdynamo_orig_callable", loss)
    if isinstance(loss, functools.partial):
        return [*loss.args, *loss.keywords.values(), *_beside(loss.func)]
    if isinstance(loss, nn.Module):
        return [loss]
    found = list(vars(loss.__self__).values()) if hasattr(loss, "__self__") else []
    function = getattr(loss, "__func__", loss)
    if not hasattr(function, "__code__"):
        return [*found, *getattr(loss, "__dict__", {}).values()]
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not filled yet
            found.append(None)
    found += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    names = function.__globals__
    return found + [names[name] for name in function.__code__.co_names if name in names]


class Kept:
    """Random states and buffers, to go back to after a pass that must not show."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        self._on_device = torch.cuda.get_rng_state(device)
        self._on_host = torch.get_rng_state()
        self._python = random.getstate()
        self._numpy = np.random.get_state()

    def has_drawn_on_host(self) -> bool:
        """Whether anybody has drawn random numbers where a replay would not draw them anew."""
        numpy: Any = np.random.get_state()
        before: Any = self._numpy
        return (
            not torch.equal(self._on_host, torch.get_rng_state())
            or self._python != random.getstate()
            or numpy[2] != before[2]
            or not np.array_equal(numpy[1], before[1])
        )

    def restore(self) -> None:
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)
        torch.cuda.set_rng_state(self._on_device, self._device)
        torch.set_rng_state(self._on_host)
        random.setstate(self._python)
        np.random.set_state(self._numpy)
