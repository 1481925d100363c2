"""The options of an accumulator: how each is checked, and whether it can be changed later.

class Accumulator:
    max_skipped = Option(check_size)   # accumulator.max_skipped = 8 is checked, and used from the next step on
    reduction = Fixed()                # accumulator.reduction = "sum" raises OptionError

A check is a function `check(name, value)` that returns the value to keep, or raises OptionError. All frameworks use the
same checks, so that an option means the same everywhere.
"""

from collections.abc import Callable
from numbers import Real
from typing import TYPE_CHECKING, Any

from .errors import OptionError


class Option:
    """An option that can be set at any time. Every value is checked.

    There is a `__set__` but no `__get__`: Python then finds the value in the instance itself, without a call. Options
    are read for every micro-batch, so this matters.

    Args:
        check: Returns the value to keep, or raises OptionError.
        doc: What `help(Accumulator)` says about it.
    """

    def __init__(self, check: Callable[[str, Any], Any], doc: str | None = None) -> None:
        self._check = check
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __set__(self, instance: Any, value: Any) -> None:
        vars(instance)[self._name] = self._check(self._name, value)

    if TYPE_CHECKING:  # for mypy, `accumulator.max_skipped` is a value and not an Option

        def __get__(self, instance: Any, owner: type | None = None) -> Any: ...


class Fixed(Option):
    """An option that only the constructor can set.

    Args:
        doc: What `help(Accumulator)` says about it.
    """

    def __init__(self, doc: str | None = None) -> None:
        super().__init__(lambda _, value: value, doc)

    def __set__(self, instance: Any, value: Any) -> None:
        if self._name in vars(instance):
            kind = type(instance).__name__
            raise OptionError(f"{self._name} cannot be changed after the accumulator was made: make a new {kind}")
        super().__set__(instance, value)


class OptionOf:
    """An option that a part of the object holds and checks: `max_skipped = OptionOf("_nonfinite")`.

    Args:
        part: The attribute with the part.
        before_change: Called with the object and the name before another value is set; it may raise OptionError.
    """

    def __init__(self, part: str, before_change: Callable[[Any, str], None] | None = None) -> None:
        self._part = part
        self._before_change = before_change

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else getattr(getattr(instance, self._part), self._name)

    def __set__(self, instance: Any, value: Any) -> None:
        part = getattr(instance, self._part)
        if self._before_change is not None and value != getattr(part, self._name):
            self._before_change(instance, self._name)
        setattr(part, self._name, value)


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> Any:
    """Returns the value; raises OptionError unless it is one of the choices."""
    if value not in choices:
        *others, last = [f'"{choice}"' if isinstance(choice, str) else repr(choice) for choice in choices]
        raise OptionError(f"{name}={value!r} is unknown: pass {', '.join(others)} or {last}")
    return value


def check_callable(name: str, value: Any) -> Any:
    """For loss and weight: None or a function."""
    if value is not None and not callable(value):
        raise OptionError(f"{name} is {value!r}: pass a function")
    return value


def check_clip(name: str, value: Any) -> Any:
    """For limits of the gradient: None or a number above 0."""
    if value is not None and (isinstance(value, bool) or not (isinstance(value, Real) and float(value) > 0)):
        raise OptionError(f"{name} is {value!r}: pass a number above 0, or None")
    return value


def positive(name: str, value: Any) -> int:
    """Returns the value as an int; raises OptionError unless it is a whole number of at least 1."""
    try:
        number = value.__index__()
    except (AttributeError, TypeError):
        number = 0
    if number < 1 or isinstance(value, bool):
        raise OptionError(f"{name} is {value!r}: pass a whole number of at least 1")
    return int(number)


def check_size(name: str, value: Any) -> int | None:
    """For micro_batch_size and max_skipped: None or a whole number of at least 1."""
    return None if value is None else positive(name, value)


def check_steps(name: str, value: Any) -> Any:
    """For accumulation_steps: None, a whole number of at least 1, or a function of the step number."""
    return value if callable(value) else check_size(name, value)
