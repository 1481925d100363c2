"""The aux of a loss (`has_aux=True`): how that of the micro-batches becomes that of the batch, in all frameworks.

Aux is a nest of dicts, lists, tuples and dataclasses. Each of its leaves is combined in one way:

    words = words_for(option, aux)                      # what the user wants: "auto" if left out
    for path, leaf in flattened(aux).items():
        way = way_of(path, kind_of(leaf), words[path], num_samples)
        combined[path] = {"mean": …, "sum": …, "concatenate": …}[way]      # by the framework
    step.aux = rebuilt(aux, combined)
    step.metrics = metrics(step.aux)
    step.summed = summed(ways, kinds)
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from .errors import LossError, OptionError
from .options import check_choice
from .weight import counted, is_number

_WAYS = ("auto", "mean", "sum", "concatenate")
Path = tuple[Any, ...]
"""Where a leaf is in aux: the keys, numbers and field names that lead to it."""
Way = str | Callable[..., Any]
"""One of the words of the option; "keep" for None, which stays None; or a function of the values and the weights."""


class Kind(NamedTuple):
    """What a leaf is.

    Args:
        shape: Its shape; empty for a plain number.
        numbers: The kind of its numbers; "none" for None, "other" if it has none.
        type_name: The type to name in messages.
    """

    shape: tuple[int | None, ...]
    numbers: Literal["float", "integer", "bool", "none", "other"]
    type_name: str


# --- the option ------------------------------------------------------------------------------------------------------


def check_aux(name: str, words: Any, *, has_aux: bool = True) -> Any:
    """Returns the option `aux`; raises OptionError unless it is a word, a function, or a nest of them."""
    if not has_aux and words != "auto":
        raise OptionError(f"{name}={words!r} says how to combine what the loss does not return: pass has_aux=True too")
    for word in flattened(words).values():
        if not callable(word):
            check_choice(name, word, _WAYS)
    return words


def words_for(words: Any, aux: Any) -> dict[Path, Way]:
    """The word for each leaf of aux; raises OptionError if the option has another structure.

    Args:
        words: The option: a word counts for everything below it.
        aux: What the loss returned.
    """
    found: dict[Path, Way] = {}
    given = flattened(words)
    for path in flattened(aux):
        above = [path[:length] for length in range(len(path) + 1) if path[:length] in given]
        if not above:
            raise OptionError(
                f"aux={words!r} does not say how to combine {name_of(path)}: name every part, or pass one word for all"
            )
        found[path] = given[above[0]]
    leaves = [*found]
    if len({metric_name(path) for path in leaves}) < len(leaves):
        names = [metric_name(path) for path in leaves]
        twice = [path for path in leaves if names.count(metric_name(path)) > 1]
        raise OptionError(
            f"{name_of(twice[0])} and {name_of(twice[1])} would both be the metric "
            f'"{metric_name(twice[0])}": give one of them another name'
        )
    for path in given:
        if leaves and not any(leaf[: len(path)] == path for leaf in leaves):
            raise OptionError(
                f"aux={words!r} says how to combine {name_of(path)}, which the loss does not return: it returns "
                f"{', '.join(map(name_of, leaves))}"
            )
    return found


def way_of(path: Path, kind: Kind, word: Way, num_samples: int | None) -> Way:
    """How one leaf is combined; raises OptionError if it cannot be.

    Args:
        path: Where it is in aux.
        kind: What it is, for one micro-batch.
        word: What the user wants.
        num_samples: How many samples the micro-batch has; None if that is not known.
    """
    if callable(word):
        return word
    name = name_of(path)
    if kind.numbers == "none":
        return "keep"
    if kind.numbers == "other":
        raise OptionError(
            f"{name} is of type {kind.type_name}, which cannot be combined over micro-batches: return numbers or "
            "tensors, or pass a function of the values and the weights as aux"
        )
    if word == "concatenate" and not kind.shape:
        raise OptionError(f'{name} is one number, with no row for each sample: pass aux="mean" or aux="sum"')
    if word != "auto":
        return word
    if kind.shape:
        if num_samples is not None and kind.shape[0] == num_samples:
            return "concatenate"
        samples = "an unknown number of" if num_samples is None else num_samples
        raise OptionError(
            f"{name} has the shape {kind.shape} for {samples} samples, so it is not known how micro-batches are "
            'combined: have the samples along its leading axis, or pass aux="concatenate", "sum" or "mean" for it'
        )
    if kind.numbers == "bool":
        raise OptionError(
            f"{name} is true or false for each micro-batch, and there is no one value for the whole batch: return a "
            'number, or pass aux="sum" to count how many are true'
        )
    return "mean" if kind.numbers == "float" else "sum"


def check_same(first: Mapping[Path, Any], now: Mapping[Path, Any]) -> None:
    """Raises LossError unless two micro-batches have leaves at the same places."""
    if first.keys() != now.keys():
        texts = [", ".join(map(name_of, leaves)) or "nothing" for leaves in (first, now)]
        raise LossError(
            f"the loss returned {texts[0]} for one micro-batch and {texts[1]} for another: return the same for each"
        )


# --- the arithmetic --------------------------------------------------------------------------------------------------


def mean(values: Sequence[Any], shares: Sequence[Any]) -> Any:
    """The mean over micro-batches: each value times its share w / W, added up; a share of 0 leaves its value out.

    The values may be numbers or arrays, whose dtype is at least float32.
    """
    return sum(counted(value, share) for value, share in zip(values, shares, strict=True) if share)


# --- names -----------------------------------------------------------------------------------------------------------


def name_of(path: Path) -> str:
    """What messages call a leaf: aux['logits']."""
    return "aux" + "".join(f"[{key!r}]" for key in path)


def metric_name(path: Path) -> str:
    """What `Step.metrics` calls a leaf: "accuracy", "scores.f1", "0"; "aux" if it is all of aux."""
    return ".".join(map(str, path)) or "aux"


def metrics(aux: Any) -> dict[str, float]:
    """The plain numbers in the aux of the whole batch, by name."""
    return {metric_name(path): float(leaf) for path, leaf in flattened(aux).items() if is_number(leaf)}


def summed(ways: Mapping[Path, Way], kinds: Mapping[Path, Kind]) -> tuple[str, ...]:
    """The names of the metrics that add up over micro-batches and steps."""
    return tuple(metric_name(path) for path, way in ways.items() if way == "sum" and not kinds[path].shape)


# --- nests -----------------------------------------------------------------------------------------------------------


def flattened(nest: Any, path: Path = ()) -> dict[Path, Any]:
    """The leaves of a nest, each with its path."""
    items = _items(nest)
    if items is None:
        return {path: nest}
    return {at: leaf for key, item in items.items() for at, leaf in flattened(item, (*path, key)).items()}


def rebuilt(like: Any, leaves: Mapping[Path, Any], path: Path = ()) -> Any:
    """A nest of the same classes with other leaves.

    Args:
        like: A nest.
        leaves: The new leaves, by path.
        path: Where `like` is.
    """
    items = _items(like)
    if items is None:
        return leaves[path]
    changed = {key: rebuilt(item, leaves, (*path, key)) for key, item in items.items()}
    if type(like) in (dict, tuple, list):
        return changed if type(like) is dict else type(like)(changed.values())
    if isinstance(like, tuple):
        return like._make(changed.values()) if hasattr(like, "_make") else tuple(changed.values())
    if isinstance(like, list):
        return list(changed.values())
    if isinstance(like, Mapping):
        if not hasattr(like, "__setitem__"):
            return changed
        same: Any = copy.copy(like)
        for key, item in changed.items():
            same[key] = item
        return same
    same = copy.copy(like)
    for key, item in changed.items():
        object.__setattr__(same, key, item)
    return same


def plain(nest: Any) -> Any:
    """The same nest of dicts, lists and tuples only, to be saved; its leaves keep their paths."""
    items = _items(nest)
    if items is None:
        return nest
    changed = {key: plain(item) for key, item in items.items()}
    is_row = isinstance(nest, tuple | list) and not hasattr(nest, "_fields")
    return [*changed.values()] if is_row else changed


def _items(nest: Any) -> dict[Any, Any] | None:
    """The items of a nest by key; None if this is a leaf."""
    if isinstance(nest, tuple | list):
        return dict(zip(getattr(nest, "_fields", range(len(nest))), nest, strict=True))
    if isinstance(nest, Mapping):
        return dict(nest.items())
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        return {name: getattr(nest, name) for name in _fields(type(nest))}
    return None


@functools.cache
def _fields(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))
