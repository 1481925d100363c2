"""Everything a CUDA graph depends on besides its input. If it changes, record again."""

import dis
import functools
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType, NoneType
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..internals import HOOKS_AFTER, HOOKS_BEFORE, VERSION, is_expanded, own_buffers, uncompiled

PLAIN = frozenset({bool, int, float, complex, str, bytes, NoneType, torch.dtype, torch.device, torch.Size})
_MAX_LENGTH = 64
"""Of a list or a dict that is looked into: a vocabulary is not read word by word before each window."""
_DATA_PARALLEL = "torch.nn.parallel.distributed"
_PARTS = ("_parameters", "_buffers", "_modules")
_NOT_LOOKED_INTO = frozenset({"torch", "bigbatch", "numpy", "logging"})


def fingerprint(model: nn.Module, loss: Callable[..., Any]) -> list[Any]:
    """Where tensors lie, whether they are trained, and the plain values that a pass may depend on.

    A replay reads the same memory and knows nothing of Python: a parameter that was replaced, a layer that was frozen,
    a dropout rate that changed, `model.eval()`, a hook that was added, a number in a list or in a configuration that
    the model or the loss has, all show here.
    """
    found: list[Any] = [
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.is_grad_enabled(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    ]
    _look([model, *_values_used_by(loss)], found, set())
    return found


def modules_of(model: nn.Module, loss: Callable[..., Any]) -> list[nn.Module]:
    """The model with all its parts, and those of modules that the loss brings along."""
    wholes = [model, *(value for value in _values_used_by(loss) if isinstance(value, nn.Module))]
    return list(dict.fromkeys(module for whole in wholes for module in whole.modules()))


def _look(values: Iterable[Any], found: list[Any], seen: set[int]) -> None:
    """Notes what is plain, and goes into what is not, once."""
    for value in values:
        kind = type(value)
        if kind in PLAIN:
            found.append(value)
        elif kind is dict or kind is OrderedDict:
            found.append(num := len(value))
            if 0 < num <= _MAX_LENGTH:
                found += [key if type(key) in PLAIN else id(key) for key in value]
                _look(value.values(), found, seen)
        elif isinstance(value, Tensor):
            found.append(_place(value))
        elif isinstance(value, list | tuple | set | frozenset):
            found.append(len(value))
            if 0 < len(value) <= _MAX_LENGTH:
                _look(value, found, seen)
        else:
            number = id(value)
            found.append(number)
            if number not in seen:
                seen.add(number)
                _look(_held_by(value), found, seen)


def _held_by(value: Any) -> Iterable[Any]:
    """What an object has; of a function, what it brings along."""
    if isinstance(value, nn.Module):
        own = vars(value).copy()
        parts = [part for name in _PARTS for part in own.pop(name).values()]  # however many
        is_wrapper = type(value).__module__ == _DATA_PARALLEL  # whose own values say where in a window it is
        return parts if is_wrapper else [*parts, *own.values()]
    if isinstance(value, type | ModuleType) or _package(value) in _NOT_LOOKED_INTO:
        return ()
    if isinstance(value, FunctionType | MethodType | functools.partial):
        return _values_used_by(value)
    return getattr(value, "__dict__", {}).values()


def _package(value: Any) -> str:
    module = value.__module__ if isinstance(value, FunctionType) else type(value).__module__
    return str(module).partition(".")[0]


def _place(tensor: Tensor) -> Any:
    """Where the loss reads a tensor, and who hears of its gradient; on the host, a number is read as it is."""
    if tensor.grad_fn is not None:
        return None  # made by a pass, for itself
    if tensor.layout is not torch.strided or is_lazy(tensor):
        return id(tensor), tensor.requires_grad
    if tensor.is_cpu and tensor.numel() == 1 and not tensor.requires_grad:
        return tensor.data_ptr(), tensor.requires_grad, tensor.item()
    return tensor.data_ptr(), tensor.requires_grad, tuple(HOOKS_BEFORE(tensor) or ()), tuple(HOOKS_AFTER(tensor) or ())


def _values_used_by(loss: Any) -> list[Any]:
    """The values that a function brings along: what it closes over, its defaults, the globals that it names."""
    loss = uncompiled(loss)
    if isinstance(loss, functools.partial):
        return [*loss.args, *loss.keywords.values(), *_values_used_by(loss.func)]
    if isinstance(loss, nn.Module):
        return [loss]
    owner = getattr(loss, "__self__", None)
    function = getattr(loss, "__func__", loss)
    if not isinstance(function, FunctionType):
        called = type(loss).__call__
        return _values_used_by(MethodType(called, loss)) if isinstance(called, FunctionType) else [owner]
    found = [] if owner is None else [owner] if isinstance(owner, nn.Module) else _used_of(owner, function)
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not filled yet
            found.append(None)
    found += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    names = function.__globals__
    return found + [names[name] for name in _globals_in(function.__code__) if name in names]


def _used_of(owner: Any, function: FunctionType) -> list[Any]:
    """What a method names of its object, and so do the methods that it calls: a trainer has more, which changes."""
    own, kind = getattr(owner, "__dict__", {}), type(owner)
    found = []
    names: set[str] = set()
    waiting = [function]
    while waiting:
        for name in _names_in(waiting.pop().__code__):
            if name not in names:
                names.add(name)
                value = own[name] if name in own else getattr(kind, name, None)
                if isinstance(value, MemberDescriptorType):  # of __slots__
                    value = getattr(owner, name, None)
                method = value.fget if isinstance(value, property) else value
                if isinstance(method, FunctionType) and name not in own:
                    waiting.append(method)
                found.append(method)
    return found


@functools.cache
def _names_in(code: CodeType) -> tuple[str, ...]:
    inner = [_names_in(const) for const in code.co_consts if isinstance(const, CodeType)]
    return code.co_names + sum(inner, ())


@functools.cache
def _globals_in(code: CodeType) -> tuple[str, ...]:
    """Not what is only the name of an attribute: many a script has a global `loss` that is a number."""
    own = (step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL")
    inner = [_globals_in(const) for const in code.co_consts if isinstance(const, CodeType)]
    return tuple(dict.fromkeys([*own, *sum(inner, ())]))


class Snapshot:
    """Random states and what modules remember, to go back to after a pass that must not show."""

    def __init__(self, modules: Sequence[nn.Module], device: torch.device) -> None:
        self._device = device
        self._places = [
            (place, name, tensor, tensor.detach().clone())
            for module in modules
            for place in (own_buffers(module), module.__dict__)
            for name, tensor in place.items()
            if isinstance(tensor, Tensor) and tensor.grad_fn is None and not is_expanded(tensor)
        ]
        self._frozen = [(p, VERSION(p)) for module in modules for p in module._parameters.values() if _is_frozen(p)]
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

    def replaced(self) -> list[str]:
        """The names of tensors that the pass has put others in place of: a replay would read the old ones again."""
        return [name for place, name, tensor, _ in self._places if place.get(name) is not tensor]

    def num_moved(self) -> int:
        """How many parameters that are not trained the pass has changed, of which nobody has a copy."""
        return sum(VERSION(p) != version for p, version in self._frozen)

    def restore(self) -> None:
        with torch.no_grad():
            for place, name, tensor, value in self._places:
                tensor.copy_(value)
                place[name] = tensor
        torch.cuda.set_rng_state(self._on_device, self._device)
        torch.set_rng_state(self._on_host)
        random.setstate(self._python)
        np.random.set_state(self._numpy)


def _is_frozen(parameter: Tensor | None) -> TypeGuard[Tensor]:
    return parameter is not None and not parameter.requires_grad
