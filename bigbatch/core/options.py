"""The options of an accumulator: how each is checked, and whether it can be changed later.

class Accumulator:
    max_skipped = Option(check_size)   # accumulator.max_skipped = 8 is checked, and used from the next step on
    reduction = Fixed()                # accumulator.reduction = "sum" raises OptionError

A check is a function `check(name, value)` that returns the value to keep, or raises OptionError. All frameworks use the
same checks, so that an option means the same everywhere.
"""

import inspect
from collections.abc import Callable, Collection
from difflib import get_close_matches
from numbers import Real
from typing import TYPE_CHECKING, Any

from .errors import OptionError

_ELSEWHERE = {
    "accumulation_steps": ("gradient_accumulation_steps", "accumulate_grad_batches", "grad_accum_steps",
                           "num_accumulation_steps", "accum_steps", "every_k_schedule", "num_micro_batches"),
    "micro_batch_size": ("microbatch_size", "mini_batch_size", "chunk_size", "per_device_train_batch_size"),
    "clip_norm": ("max_grad_norm", "gradient_clip_val", "clip_grad_norm", "grad_clip", "global_clipnorm", "clipnorm"),
    "clip_value": ("clip_grad_value", "clipvalue"),
    "loss": ("loss_fn", "criterion", "loss_function"),
    "precision": ("mixed_precision", "amp", "autocast"),
    "scaler": ("grad_scaler",),
    "scheduler": ("lr_scheduler",),
    "group": ("process_group",),
}  # fmt: skip
"""What other libraries call our options."""
_CRITERIA = ("torch.nn.modules.loss", "torch.nn.functional", "keras.src.losses", "tf_keras.src.losses")
"""The modules of losses that compare predictions with targets."""
_MAX_LENGTH = 60
"""Of the text of an option."""


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


def check_loss(name: str, value: Any) -> Any:
    """For the loss: None or a function `loss(model, micro_batch)`, not one of predictions and targets."""
    module = str(getattr(value, "__module__", ""))
    if module.startswith(_CRITERIA):
        kind = getattr(value, "__name__", type(value).__name__)
        raise OptionError(
            f"{name} is {kind}, which compares predictions with targets, but {name}(model, micro_batch) is called: "
            f"pass {name}=lambda model, batch: {_called(kind, module)}"
        )
    return check_callable(name, value)


def _called(criterion: str, module: str) -> str:
    """How to call a criterion on a batch (x, y)."""
    if module.startswith("torch"):
        return f"{criterion}{'()' * criterion[0].isupper()}(model(batch[0]), batch[1])"
    return f"{criterion}{'()' * criterion[0].isupper()}(batch[1], model(batch[0], training=True))"


def check_known(unknown: Collection[str], function: Callable[..., Any]) -> None:
    """Raises OptionError with the right name if a function was called with options that it does not have.

    It is for functions that end in `**unknown: Never`, with which a type checker still finds the mistake.

    Args:
        unknown: The names of these options.
        function: The function, or the class whose constructor it is.
    """
    if not unknown:
        return
    known = [*_options_of(function)]
    for name in unknown:
        ours = next((ours for ours, others in _ELSEWHERE.items() if name in (ours, *others)), None)
        if ours == "accumulation_steps" and "micro_batch_size" in known:
            remedy = "pass micro_batch_size, the number of samples in a micro-batch, if batches are to be cut"
            if ours in known:
                remedy += ", or accumulation_steps if you feed micro-batches"
        elif found := [ours] if ours in known else get_close_matches(name, known, 1):
            remedy = f"did you mean {found[0]}?"
        else:
            remedy = f"its options are {', '.join(known)}"
        raise OptionError(f"{function.__name__} has no option {name}: {remedy}")


def _options_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return {name: each for name, each in inspect.signature(function).parameters.items() if name != "unknown"}


def described(accumulator: Any) -> str:
    """The repr of an object with options: those that are not at their default."""
    parts = []
    for name, parameter in _options_of(type(accumulator)).items():
        if isinstance(getattr(type(accumulator), name, None), property):  # tf.Module's `variables` are not the option
            continue
        value = getattr(accumulator, name)
        is_default = value == parameter.default if isinstance(value, str | Real) else value is parameter.default
        if not is_default:
            parts.append(_described(name, value))
    return f"{type(accumulator).__name__}({', '.join(parts)})"


def _described(name: str, value: Any) -> str:
    if name in ("model", "optimizer", "scheduler"):
        each = value if isinstance(value, tuple | list) else [value]
        text = ", ".join(type(one).__name__ for one in each)
        text = f"({text})" if isinstance(value, tuple | list) else text
    elif callable(value):
        text = getattr(value, "__name__", type(value).__name__)
    else:
        text = repr(value)
        text = type(value).__name__ if text.startswith("<") or len(text) > _MAX_LENGTH else text
    return text if name in ("model", "optimizer") else f"{name}={text}"


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
