"""The optimizers of one accumulator, which step together, and their schedules."""

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from ..core.errors import OptionError
from .capture.optimizer import CapturedOptimizer
from .checks import check_optimizer, check_scheduler, needs_closure
from .internals import found_inf
from .step_result import can_be_skipped_on_device
from .sums import Sums

Optimizer = torch.optim.Optimizer
_GROUPS, _PARAMS = operator.attrgetter("param_groups"), operator.itemgetter("params")


class Optimizers:
    """One optimizer or several that train one model: all of them step, or none does.

        optimizers.step(scaler)

    stands for

        for optimizer in (muon, adamw):
            scaler.step(optimizer)      # or optimizer.step()

    Args:
        model: The model. Each optimizer holds some of its parameters, and no parameter is held twice.
        given: An optimizer, or a list or tuple of them.

    Attributes:
        given: What the user passed; a list as a tuple.
        all: The optimizers.
        with_closure: The first one whose step needs a closure, if any.
        has_fused: Whether any of them is fused.
    """

    def __init__(self, model: nn.Module, given: Any) -> None:
        self.given = tuple(given) if isinstance(given, list) else given
        self.all: tuple[Optimizer, ...] = self.given if isinstance(self.given, tuple) else (self.given,)
        if not self.all:
            raise OptionError("optimizer is an empty list: pass an optimizer, or a list of several")
        for optimizer in self.all:
            check_optimizer(model, optimizer)
        self._check_disjoint(model)
        self.with_closure = next(filter(needs_closure, self.all), None)
        self._fused = [optimizer for optimizer in self.all if optimizer.defaults.get("fused")]
        self.has_fused = bool(self._fused)
        self._captured: Sequence[CapturedOptimizer | None] = [None] * len(self.all)
        self._holders: dict[Tensor, Optimizer] = {}
        self._takes_wide: dict[int, bool] = {}  # by the number of the optimizer
        self._is_skipped: Tensor | None = None

    def _check_disjoint(self, model: nn.Module) -> None:
        """Raises OptionError if two optimizers hold the same parameter, which both would step."""
        names = {p: name for name, p in model.named_parameters()}
        holders: dict[Tensor, int] = {}
        for number, optimizer in enumerate(self.all, 1):
            held = [p for group in optimizer.param_groups for p in group["params"]]
            if twice := [p for p in held if p in holders]:
                first = twice[0]
                name = names.get(first, f"one of shape {tuple(first.shape)}")
                raise OptionError(
                    f"optimizers {holders[first]} and {number} of {len(self.all)} both hold {len(twice)} "
                    f"parameter{'s' * (len(twice) != 1)} ({name} first), so they would be stepped twice: give each "
                    "parameter to one optimizer"
                )
            holders |= dict.fromkeys(held, number)

    def parameters(self) -> list[Any]:
        """The parameters that they hold now. An optimizer may have other groups later."""
        groups = map(_GROUPS, self.all)
        return list(chain.from_iterable(map(_PARAMS, chain.from_iterable(groups))))

    def fused_steps(self) -> list[int]:
        """Numbers that change when a fused optimizer steps, which leaves no trace on its parameters (torch 2.13)."""
        steps = [state.get("step") for optimizer in self._fused for state in optimizer.state.values()]
        return [step._version for step in steps if isinstance(step, Tensor)]

    def refuse(self, call: str) -> OptionError:
        """The error if a call makes a step with one that asks for the loss several times, as LBFGS does."""
        return OptionError(
            f"{type(self.with_closure).__name__} computes the loss several times in one step, which {call} does once: "
            'define closure() as "optimizer.zero_grad(); return accumulator.backward(batch).loss" and call '
            "optimizer.step(closure)"
        )

    # --- the step ----------------------------------------------------------------------------------------

    def step(self, scaler: GradScaler | None = None) -> None:
        """Steps all of them on the gradients in .grad."""
        for optimizer, captured in zip(self.all, self._captured, strict=True):
            if scaler is not None and found_inf(scaler, optimizer):  # it has none for one without gradients
                scaler.step(optimizer)
            elif scaler is not None or captured is None or not captured.step():
                optimizer.step()

    def capture(self, device: torch.device, pool: Callable[[], Any]) -> None:
        """From now on, steps each of them as a CUDA graph where it allows that."""
        self._captured = [CapturedOptimizer(optimizer, device, pool) for optimizer in self.all]

    def can_be_skipped_on_device(self, sums: Sums) -> bool:
        """Whether each of them skips its step if a tensor on the device says so."""
        return all(can_be_skipped_on_device(optimizer, sums) for optimizer in self.all)

    @contextmanager
    def skipping(self, is_skipped: Tensor) -> Iterator[None]:
        """Inside, they skip their step if this number on the device says so."""
        if self._is_skipped is None:  # in one place, so that captured steps find it
            self._is_skipped = torch.zeros((), device=is_skipped.device)
        self._is_skipped.copy_(is_skipped)
        every: Sequence[Any] = self.all
        for optimizer in every:
            optimizer.grad_scale, optimizer.found_inf = None, self._is_skipped
        try:
            yield
        finally:
            for optimizer in every:
                del optimizer.grad_scale, optimizer.found_inf

    # --- dtypes ------------------------------------------------------------------------------------------

    def take_wide(self, parameter: Tensor, dtype: torch.dtype) -> bool:
        """Whether the optimizer of this parameter takes gradients in this dtype, wider than the parameter's own."""
        optimizer = self._holder_of(parameter)
        if (known := self._takes_wide.get(number := self.all.index(optimizer))) is None:
            known = self._takes_wide[number] = _takes_wide(optimizer, parameter, dtype)
        return known

    def _holder_of(self, parameter: Tensor) -> Optimizer:
        if parameter not in self._holders:  # groups may have changed
            held = [(p, o) for o in self.all for group in o.param_groups for p in group["params"]]
            self._holders = dict(held)
        return self._holders[parameter]


def _takes_wide(optimizer: Optimizer, parameter: Tensor, dtype: torch.dtype) -> bool:
    """Whether the optimizer steps on a gradient wider than its parameter, and keeps no wider state for it.

    Tried on an optimizer of the same kind with one small parameter: SGD without momentum can, Adam in torch 2.13
    cannot. Wider state would be narrowed by `optimizer.load_state_dict`.
    """
    for group in optimizer.param_groups:
        trial: Any = torch.nn.Parameter(torch.zeros(2, 2, dtype=parameter.dtype, device=parameter.device))
        trial.grad_dtype = dtype
        trial.grad = torch.zeros(2, 2, dtype=dtype, device=parameter.device)
        try:
            twin: Any = type(optimizer)
            twin = twin([trial], **{name: group[name] for name in optimizer.defaults})
            twin.step()
        except Exception:  # whatever a foreign optimizer raises means no
            return False
        state = twin.state[trial].values()
        if any(isinstance(s, Tensor) and s.ndim and s.dtype != trial.dtype for s in state):
            return False
    return True


def check_schedulers(name: str, given: Any) -> Any:
    """For `scheduler`: None, a learning rate scheduler, or several; a list is kept as a tuple."""
    if not isinstance(given, list | tuple):
        return check_scheduler(name, given)
    for number, scheduler in enumerate(given):
        if scheduler is None:
            raise OptionError(f"{name}[{number}] is None: leave it out, an optimizer needs no schedule")
        if any(scheduler is other for other in given[:number]):
            raise OptionError(f"{name}[{number}] is in the list twice, so it would be stepped twice: pass it once")
        check_scheduler(f"{name}[{number}]", scheduler)
    return tuple(given)


def as_tuple(given: Any) -> tuple[Any, ...]:
    """One optimizer or scheduler, several, or None, as a tuple."""
    if given is None:
        return ()
    return given if isinstance(given, tuple) else (given,)


def numbered(name: str, given: Any) -> dict[str, Any]:
    """The names by which a checkpoint saves them: "optimizer", "optimizer 2" and so on."""
    return {name if number == 1 else f"{name} {number}": one for number, one in enumerate(as_tuple(given), 1)}
