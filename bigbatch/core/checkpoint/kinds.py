"""What a saved state belongs to, by name: the shapes of two optimizers, or of two layers, can be the same."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..errors import StateError


def kind_of(optimizer: Any) -> str:
    """The class of a Keras optimizer and of its schedule, and of the optimizer inside of a LossScaleOptimizer."""
    name, inner = type(optimizer).__qualname__, getattr(optimizer, "inner_optimizer", None)
    if inner is not None:
        return f"{name} with {kind_of(inner)}"
    rate = getattr(optimizer, "_learning_rate", None)  # the public property calls the schedule (Keras 3.15)
    return f"{name} with the schedule {type(rate).__qualname__}" if callable(rate) else name


def check_kinds(found: Mapping[str, str], own: Mapping[str, str]) -> None:
    """Raises StateError unless each part of this run is of the class that was saved."""
    for name in (*own, *(found.keys() - own.keys())):
        if found.get(name) != own.get(name):
            raise StateError(
                f"the {name} of the checkpoint is {found.get(name, 'missing')}, that of this run is "
                f"{own.get(name, 'missing')}: continue with the kind that was saved"
            )


def order_of(variables: Iterable[Any]) -> list[str]:
    """The names of variables in order, without the numbers that Keras counts up as long as a process lives."""
    return [re.sub(r"_[0-9]+(?=[/:]|$)", "", getattr(variable, "path", variable.name)) for variable in variables]


def check_order(found: Sequence[str], own: Sequence[str]) -> None:
    """Raises StateError if the same variables are in another order. Other names alone are no reason to refuse."""
    if sorted(found) == sorted(own):
        for before, now in zip(found, own, strict=True):
            if before != now:
                raise StateError(
                    f"the model has {now} where it had {before} when the checkpoint was saved: make its variables in "
                    "the same order"
                )
