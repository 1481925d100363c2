"""The options of an accumulator: how each is checked, and whether it may be set again later.

class Accumulator:
    clip_norm = Option(check_clip)   # accumulator.clip_norm = 0.5 is checked, and used from the next step on
    reduction = Fixed()              # accumulator.reduction = "sum" is refused
"""

from collections.abc import Callable
from numbers import Real
from typing import Any

from .errors import OptionError
from .window import positive


class Option:
    """An option that may be set at any time. `check(name, value)` returns the value to keep, or raises OptionError."""

    def __init__(self, check: Callable[[str, Any], Any]) -> None:
        self._check = check

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        try:
            return vars(instance)[self._name]
        except KeyError:  # tf.Module asks for an attribute before it sets it
            raise AttributeError(self._name) from None

    def __set__(self, instance: Any, value: Any) -> None:
        vars(instance)[self._name] = self._check(self._name, value)


class Fixed(Option):
    """An option that is set once, by the constructor."""

    def __init__(self) -> None:
        super().__init__(lambda _, value: value)

    def __set__(self, instance: Any, value: Any) -> None:
        if self._name in vars(instance):
            raise OptionError(
                f"{self._name} cannot be changed after the accumulator was made: make a new {type(instance).__name__}"
            )
        super().__set__(instance, value)


def check_callable(name: str, value: Any) -> Any:
    if value is not None and not callable(value):
        raise OptionError(f"{name} is {value!r}: pass a function")
    return value


def check_clip(name: str, value: Any) -> Any:
    if value is not None and not (isinstance(value, Real) and float(value) > 0):
        raise OptionError(f"{name} is {value!r}: pass a number above 0, or None")
    return value


def check_size(name: str, value: Any) -> int | None:
    """For micro_batch_size and max_skipped: None, or a whole number of at least 1."""
    return None if value is None else positive(name, value)


def check_steps(name: str, value: Any) -> Any:
    """For accumulation_steps: None, a whole number of at least 1, or a function of the step number."""
    return value if callable(value) else check_size(name, value)


def check_on_nonfinite(name: str, value: Any) -> Any:
    if value not in ("skip", "raise", "stop"):
        raise OptionError(f'{name}={value!r} is unknown: pass "skip", "raise" or "stop"')
    return value
