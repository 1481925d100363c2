"""Hooks of parameters run once a step, on the finished gradient.

Torch calls the hooks of `register_hook` and `register_post_accumulate_grad_hook` in every backward pass, where they see
the gradient of one micro-batch, and clamp(a) + clamp(b) is not clamp(a + b). So they are set aside while the backward
passes of a window add up.
"""

import weakref
from collections.abc import Sequence
from itertools import chain
from typing import Any

from torch import Tensor

from ..core.errors import GradientError
from .distributed.shards import is_sharded
from .internals import HOOKS_AFTER, HOOKS_BEFORE


class _Waiting:
    """Stands in for a hook, and does nothing while `owner` is alive.

    A weak reference: if Ctrl-C arrives just before the hook is put back, this is as good as the hook.
    """

    def __init__(self, hook: Any, owner: Any) -> None:
        self.hook: Any = hook.hook if isinstance(hook, _Waiting) else hook
        self._owner = weakref.ref(owner)

    def __call__(self, *args: Any) -> Any:
        return None if self._owner() is not None else self.hook(*args)


def dicts_of(parameters: Sequence[Tensor]) -> list[dict[int, Any]]:
    """The dicts with the hooks of these parameters."""
    return list(filter(None, chain(map(HOOKS_BEFORE, parameters), map(HOOKS_AFTER, parameters))))


def set_aside(parameters: Sequence[Tensor], owner: Any) -> None:
    """Makes the hooks of these parameters do nothing until `put_back`, or until `owner` is gone."""
    for hooks in dicts_of(parameters):
        for key, hook in list(hooks.items()):
            hooks[key] = _Waiting(hook, owner)


def put_back(parameters: Sequence[Tensor]) -> None:
    """Undoes `set_aside`."""
    for hooks in dicts_of(parameters):
        for key, hook in list(hooks.items()):
            if isinstance(hook, _Waiting):
                hooks[key] = hook.hook


def check_no_multi_grad(parameter: Tensor, name: str) -> None:
    """Raises GradientError for hooks of `register_multi_grad_hook`.

    They run in a backward pass that reaches all their parameters, and the gradient of a batch that was cut does not
    come from one such pass. They have the name and the module of the user's function, so they are recognised by the
    globals of the module that made them (torch 2.4 to 2.13).
    """
    found = [hook for hooks in dicts_of([parameter]) for hook in hooks.values()]
    names = [getattr(hook, "__globals__", {}).get("__name__") for hook in found]
    if num := names.count("torch.autograd.graph"):
        raise GradientError(
            f"{name} has {num} hook{'s' * (num != 1)} of register_multi_grad_hook, which cannot run on the gradient of "
            "a batch that was cut: register a hook on each parameter, with p.register_post_accumulate_grad_hook"
        )


def run(parameter: Tensor, name: str) -> bool:
    """Runs the hooks of a parameter on its .grad, as a backward pass does; returns whether they changed it.

    Torch does not call `register_hook` for parameters of fully_shard (2.13), whose backward passes never reach the
    sharded parameter itself.
    """
    before = parameter.grad
    version = None if before is None else before._version
    for hook in [] if is_sharded(parameter) else list((HOOKS_BEFORE(parameter) or {}).values()):
        gradient = parameter.grad
        found = hook(gradient)
        if found is None or found is gradient:
            continue
        if not isinstance(found, Tensor) or found.shape != parameter.shape:
            kind = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"type {type(found).__name__}"
            raise GradientError(
                f"a hook of {name} returned something of {kind} in place of a gradient of shape "
                f"{tuple(parameter.shape)}: return a tensor of the same shape, or None"
            )
        assert gradient is not None
        parameter.grad = found.to(gradient.dtype)
    for hook in list((HOOKS_AFTER(parameter) or {}).values()):
        if parameter.grad is not None and (found := hook(parameter)) is not None:
            raise GradientError(
                f"a post-accumulate hook of {name} returned a {type(found).__name__}: return None, and change .grad "
                "of the parameter instead"
            )
    return parameter.grad is not before or (before is not None and before._version != version)
