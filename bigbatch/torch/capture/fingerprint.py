"""Everything a CUDA graph depends on besides its input. If it changes, record again."""

import dis
import functools
from collections.abc import Callable, Iterable
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType, NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..internals import HOOKS_AFTER, HOOKS_BEFORE, uncompiled

PLAIN = frozenset({bool, int, float, complex, str, bytes, NoneType, torch.dtype, torch.device, torch.Size})
_MAX_LENGTH = 64  # of a list or dict that is looked into: a vocabulary is not read word by word before each window
_DATA_PARALLEL = "torch.nn.parallel.distributed"
_NOT_LOOKED_INTO = frozenset({"torch", "bigbatch", "numpy", "logging"})


def fingerprint(model: nn.Module, loss: Callable[..., Any]) -> list[Any]:
    """Where tensors are, whether they are trained, and the plain values that a pass may depend on.

    A replay reads the same memory and runs no Python. So this shows a parameter that was replaced, a layer that was
    frozen, a dropout rate that changed, `model.eval()`, a hook that was added, and a number in a list or in a
    configuration that the model or the loss holds.
    """
    found: list[Any] = [
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    ]
    _look([model, *_used_by(loss)], found, set())
    return found


def modules_of(model: nn.Module, loss: Callable[..., Any]) -> list[nn.Module]:
    """The modules that a pass goes through: the model's, and those that the loss uses besides."""
    wholes = [model, *(value for value in _used_by(loss) if isinstance(value, nn.Module))]
    return list(dict.fromkeys(module for whole in wholes for module in whole.modules()))


def _look(values: Iterable[Any], found: list[Any], seen: set[int]) -> None:
    """Adds plain values and the places of tensors to `found`, and looks into everything else once."""
    for value in values:
        if type(value) in PLAIN:
            found.append(value)
        elif isinstance(value, Tensor):
            found.append(_place(value))
        elif isinstance(value, dict | list | tuple | set | frozenset):
            found.append(len(value))
            if len(value) <= _MAX_LENGTH and isinstance(value, dict):
                found += [key if type(key) in PLAIN else id(key) for key in value]
                _look(value.values(), found, seen)
            elif len(value) <= _MAX_LENGTH:
                _look(value, found, seen)
            _look(getattr(value, "__dict__", {}).values(), found, seen)  # attributes of a subclass
        else:
            found.append(id(value))
            if id(value) not in seen:
                seen.add(id(value))
                _look(_held_by(value), found, seen)


def _place(tensor: Tensor) -> Any:
    """The memory and the graph of a tensor that the loss reads; a number on the host is recorded as a constant."""
    if tensor.grad_fn is not None:
        return None  # each pass makes its own
    if tensor.layout is not torch.strided or is_lazy(tensor):
        return id(tensor), tensor.requires_grad
    is_constant = tensor.is_cpu and tensor.numel() == 1 and not tensor.requires_grad
    number = tensor.item() if is_constant else None
    hooks = [*(HOOKS_BEFORE(tensor) or ()), *(HOOKS_AFTER(tensor) or ())]
    return tensor.data_ptr(), tensor.requires_grad, number, hooks


def _held_by(value: Any) -> Iterable[Any]:
    """What an object holds; for a function, the values that it uses."""
    if isinstance(value, nn.Module):
        own = vars(value).copy()
        parts = [part for name in ("_parameters", "_buffers", "_modules") for part in own.pop(name).values()]
        is_wrapper = type(value).__module__ == _DATA_PARALLEL  # its own values change within a window
        return parts if is_wrapper else [*parts, *own.values()]
    module = value.__module__ if isinstance(value, FunctionType) else type(value).__module__
    if isinstance(value, type | ModuleType) or str(module).partition(".")[0] in _NOT_LOOKED_INTO:
        return ()
    if isinstance(value, FunctionType | MethodType | functools.partial):
        return _used_by(value)
    return getattr(value, "__dict__", {}).values()


def _used_by(function: Any) -> list[Any]:
    """The values that a function uses: what it closes over, its defaults, the globals that it names.

    Of the object of a method, only the attributes that the method names: a trainer has others, which change.
    """
    function = uncompiled(function)
    if isinstance(function, nn.Module):
        return [function]
    if isinstance(function, functools.partial):
        return [*function.args, *function.keywords.values(), *_used_by(function.func)]
    owner = getattr(function, "__self__", None)
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType):
        call = type(function).__call__
        return _used_by(MethodType(call, function)) if isinstance(call, FunctionType) else [owner]
    found = [] if owner is None else [owner] if isinstance(owner, nn.Module) else _used_of(owner, function)
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not filled yet
            found.append(None)
    found += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    names = function.__globals__
    return found + [names[name] for name in _globals_in(function.__code__) if name in names]


def _used_of(owner: Any, method: FunctionType) -> list[Any]:
    """The attributes that a method names, and those that the methods and properties that it names do."""
    own, kind = getattr(owner, "__dict__", {}), type(owner)
    found: dict[str, Any] = {}
    waiting = [method]
    while waiting:
        for name in _names_in(waiting.pop().__code__):
            if name in found:
                continue
            value = own[name] if name in own else getattr(kind, name, None)
            if isinstance(value, MemberDescriptorType):  # from __slots__
                value = getattr(owner, name, None)
            found[name] = value.fget if isinstance(value, property) else value
            if isinstance(found[name], FunctionType) and name not in own:
                waiting.append(found[name])
    return list(found.values())


@functools.cache
def _names_in(code: CodeType) -> list[str]:
    """All names that are neither local nor closed over, functions inside included."""
    return [name for part in _with_inner(code) for name in part.co_names]


@functools.cache
def _globals_in(code: CodeType) -> list[str]:
    """Those without the names of attributes: many a script has a global `loss` that is a number."""
    steps = [step for part in _with_inner(code) for step in dis.get_instructions(part)]
    return list(dict.fromkeys(step.argval for step in steps if step.opname == "LOAD_GLOBAL"))


def _with_inner(code: CodeType) -> list[CodeType]:
    """The code of a function, and of the functions that are defined in it."""
    inner = [part for const in code.co_consts if isinstance(const, CodeType) for part in _with_inner(const)]
    return [code, *inner]
