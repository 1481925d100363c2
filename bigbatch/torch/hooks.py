"""Hooks of parameters run once a step, on the finished gradient.

That is those of `register_hook` and of `register_post_accumulate_grad_hook`. Torch calls them in every backward pass,
where there is the gradient of one micro-batch, and clamp(a) + clamp(b) is not clamp(a + b). So they are set aside while
the backward passes of a window add up.
"""

import weakref
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

from torch import Tensor

from ..core.errors import GradientError
from .distributed.shards import is_sharded

# Where torch (2.4 to 2.13) keeps them: a dict, or None. It is changed in place, because that is what the handles know.
BEFORE = attrgetter("_backward_hooks")
AFTER = attrgetter("_post_accumulate_grad_hooks")


def dicts_of(parameters: Sequence[Tensor]) -> list[dict[int, Any]]:
    """Where hooks of these parameters are; empty as a rule, so it has to be quick."""
    return list(filter(None, chain(map(BEFORE, parameters), map(AFTER, parameters))))


class Waiting:
    """Stands in for a hook, and does nothing for as long as `passes` lives.

    A weak reference: if Ctrl-C comes just before the hook is put back, this is as good as the hook.
    """

    def __init__(self, hook: Any, passes: Any) -> None:
        self.hook: Any = hook.hook if isinstance(hook, Waiting) else hook
        self._passes = weakref.ref(passes)

    def __call__(self, *args: Any) -> Any:
        return None if self._passes() is not None else self.hook(*args)


def running(parameters: Sequence[Tensor]) -> list[Any]:
    """The hooks of these parameters that the next backward pass would run."""
    return [hook for hooks in dicts_of(parameters) for hook in hooks.values() if not isinstance(hook, Waiting)]


class SetAside:
    """The hooks of these parameters, but those of ours, do nothing until `put_back` is called."""

    def __init__(self, parameters: Sequence[Tensor], but: Sequence[Any] = ()) -> None:
        self._dicts = dicts_of(parameters)
        for hooks in self._dicts:
            for key, hook in list(hooks.items()):
                if hook not in but:
                    hooks[key] = Waiting(hook, self)

    def put_back(self) -> None:
        for hooks in self._dicts:
            for key, hook in list(hooks.items()):
                if isinstance(hook, Waiting):
                    hooks[key] = hook.hook


def refuse_multi_grad(parameter: Tensor, name: str) -> None:
    """Refuses hooks of `register_multi_grad_hook`, which run in a backward pass that reaches all their parameters.

    The gradient of a batch that was cut does not come of one such pass. These hooks have the name and the module of
    the user's function, so they are known by the globals of the module that made them (torch 2.4 to 2.13).
    """
    names = [getattr(hook, "__globals__", {}).get("__name__") for hook in running([parameter])]
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
    for hook in [] if is_sharded(parameter) else list((BEFORE(parameter) or {}).values()):
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
    for hook in list((AFTER(parameter) or {}).values()):
        if parameter.grad is not None and (found := hook(parameter)) is not None:
            raise GradientError(
                f"a post-accumulate hook of {name} returned a {type(found).__name__}: return None, and change .grad "
                "of the parameter instead"
            )
    return parameter.grad is not before or (before is not None and before._version != version)
