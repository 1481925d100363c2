"""The arguments of a loss: parameters, arrays to cut, and what is passed whole to every micro-batch."""

import enum
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse import JAXSparse

from ..core.batch import shared_size
from ..core.errors import BatchError, OptionError

_Role = Literal["rows", "key", "whole", "static"]
_NOT_NUMBERS = ("U", "S", "O")  # kinds of NumPy arrays that JAX cannot hold: strings, objects
_PLAIN = (str, bytes, bool, int, float, complex)
_NAMED = (type, types.FunctionType, types.BuiltinFunctionType, np.dtype, enum.Enum)


class Arrays(NamedTuple):
    """The arrays among the arguments, without the parameters."""

    rows: list[Any]
    """Arrays with a row for each sample, to be cut."""
    keys: list[Any]
    """PRNG keys; each micro-batch gets its own."""
    whole: list[Any]
    """Arrays that are passed whole to every micro-batch."""


@dataclass(frozen=True)
class ArgumentLayout:
    """What the arguments are, without their arrays. Calls with equal layouts share one compiled function.

    Args:
        structure: The structure of the arguments as a pytree, with None for each parameter.
        roles: What happens to each leaf.
        statics: The leaves that are not arrays.
        argnums: Which arguments are parameters.
        batch_argnums: Which arguments are cut.
    """

    structure: Any
    roles: tuple[_Role, ...]
    statics: tuple["_Static", ...]
    argnums: tuple[int, ...]
    batch_argnums: tuple[int, ...]

    @property
    def is_hashable(self) -> bool:
        """Whether a compiled function can be cached for this layout: none of its arguments can change between calls."""
        try:
            hash(self)
        except TypeError:
            return False
        return True

    def bind(self, arrays: Arrays, parameters: tuple[Any, ...] = ()) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of the loss, with None for each parameter if there are none."""
        left: dict[_Role, Any] = {
            "rows": iter(arrays.rows),
            "key": iter(arrays.keys),
            "whole": iter(arrays.whole),
            "static": (static.value for static in self.statics),
        }
        args, kwargs = jax.tree.unflatten(self.structure, [next(left[role]) for role in self.roles])
        for number, parameter in zip(self.argnums, parameters, strict=False):
            args[number] = parameter
        return args, kwargs

    def leaves(self, arrays: Arrays) -> list[tuple[Any, _Role, Any]]:
        """The path of each leaf of the arguments, its role, and the leaf."""
        leaves = jax.tree.leaves_with_path(self.bind(arrays), is_leaf=lambda leaf: isinstance(leaf, JAXSparse))
        return [(path, role, leaf) for (path, leaf), role in zip(leaves, self.roles, strict=True)]

    def batch(self, arrays: Arrays) -> tuple[Any, ...]:
        """The arguments that are cut, in order."""
        args, _ = self.bind(arrays)
        return tuple(args[number] for number in self.batch_argnums)


@dataclass(frozen=True)
class _Static:
    """An argument that is not an array. Two are equal only if no loss can tell them apart; 1, 1.0 and True differ."""

    value: Any = field(compare=False)
    key: Any
    """Unhashable if the object may change between two calls, so that no compiled function is cached for it."""

    @classmethod
    def of(cls, value: Any) -> "_Static":
        if isinstance(value, _PLAIN):
            return cls(value, (type(value), repr(value)))  # not by value: 0.0 equals -0.0, and nothing equals NaN
        return cls(value, value if isinstance(value, _NAMED) else [])


def split_arguments(
    args: Sequence[Any], kwargs: dict[str, Any], argnums: tuple[int, ...], batch_argnums: tuple[int, ...] | None
) -> tuple[ArgumentLayout, tuple[Any, ...], Arrays]:
    """Splits the arguments of a call into their layout, the parameters and the other arrays.

    The batch is every positional argument that is not a parameter, or those that `batch_argnums` names. Keyword
    arguments and scalars are passed whole.
    """
    argnums = _non_negative("argnums", argnums, len(args))
    batch_argnums = None if batch_argnums is None else _non_negative("batch_argnums", batch_argnums, len(args))
    others = [None if number in argnums else arg for number, arg in enumerate(args)]
    leaves, structure = jax.tree.flatten_with_path((others, kwargs), is_leaf=lambda leaf: isinstance(leaf, JAXSparse))

    def is_cut(path: Any) -> bool:
        number = path[1].idx if path[0].idx == 0 else None
        return number is not None and (batch_argnums is None or number in batch_argnums)

    roles = tuple(_role_of(path, leaf, is_cut=is_cut(path)) for path, leaf in leaves)
    found: dict[_Role, list[Any]] = {role: [] for role in ("rows", "key", "whole", "static")}
    for (_, leaf), role in zip(leaves, roles, strict=True):
        found[role].append(leaf)
    paths = [path for (path, _), role in zip(leaves, roles, strict=True) if role == "rows"]
    if not paths:
        raise BatchError(
            "the loss was called without an array that can be cut: pass the batch by position, after the parameters; "
            "register your own classes with jax.tree_util.register_dataclass"
        )
    sizes = [(name_of(path), int(row.shape[0])) for path, row in zip(paths, found["rows"], strict=True)]
    remedy = "; pass what has no sample axis by keyword, or leave it out of batch_argnums"
    size = shared_size(sizes, None, remedy)
    for (path, leaf), role in zip(leaves, roles, strict=True):
        if role == "key" and is_cut(path) and leaf.shape == (size,):
            raise OptionError(
                f"{name_of(path)}, {size} unsigned integers beside a batch of {size} samples, may be a key or labels: "
                "make keys with jax.random.key(), or labels of a signed type"
            )
    cut = tuple(sorted({path[1].idx for path in paths}))
    statics = tuple(_Static.of(leaf) for leaf in found["static"])
    layout = ArgumentLayout(structure, roles, statics, argnums, cut)
    return layout, tuple(args[number] for number in argnums), Arrays(found["rows"], found["key"], found["whole"])


def _role_of(path: Any, leaf: Any, *, is_cut: bool) -> _Role:
    if isinstance(leaf, JAXSparse):
        if is_cut:
            raise BatchError("a sparse array cannot be cut: pass a dense one, or pass it whole, by keyword")
        return "whole"
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic) or getattr(leaf.dtype, "kind", "") in _NOT_NUMBERS:
        return "static"
    if is_typed_key(leaf):
        return "rows" if is_cut and np.ndim(leaf) else "key"
    if _is_raw_key(leaf):
        if _is_named_key(path):
            return "key"
        if not is_cut:
            raise OptionError(
                f"{name_of(path)}, {leaf.size} unsigned integers, may be a key or numbers: make keys with "
                "jax.random.key(), or pass one under a name with key or rng in it, or numbers of a signed type"
            )
    return "rows" if is_cut and np.ndim(leaf) else "whole"


def is_typed_key(leaf: Any) -> bool:
    return not isinstance(leaf.dtype, np.dtype) and bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _is_raw_key(leaf: Any) -> bool:
    """Whether this may be an old-style key, which is a plain array."""
    if leaf.dtype != np.uint32 or len(leaf.shape) != 1:
        return False
    return leaf.shape[0] == (2 if jax.config.jax_default_prng_impl == "threefry2x32" else 4)


def _is_named_key(path: Any) -> bool:
    """Whether the name says that this is a key (`rngs={"dropout": key}`), or it is a positional argument by itself."""
    names = [str(getattr(entry, "key", "")).lower() for entry in path[1:]]
    is_argument = path[0].idx == 0 and len(path) == 2
    return is_argument or (len(names) <= 2 and any(word in name for name in names for word in ("key", "rng")))


def _non_negative(name: str, numbers: tuple[int, ...], num_arguments: int) -> tuple[int, ...]:
    """The numbers of arguments, all counted from the start; raises OptionError if there is no such argument."""
    for number in numbers:
        if not -num_arguments <= number < num_arguments:
            raise OptionError(
                f"{name} names argument {number} but the loss was called with {num_arguments} positional arguments: "
                "pass these arguments by position; counting starts at 0"
            )
    return tuple(number % num_arguments for number in numbers)


def name_of(path: Any) -> str:
    first = f"argument {path[1].idx}" if path[0].idx == 0 else f"the argument {path[1].key}"
    return f"{first}{jax.tree_util.keystr(path[2:])}"


def num_rows(arrays: Arrays) -> int:
    return int(arrays.rows[0].shape[0])


def as_numbers(name: str, value: Any) -> tuple[int, ...]:
    """argnums or batch_argnums as a tuple."""
    numbers = value if isinstance(value, tuple | list) else (value,)
    if not numbers or not all(isinstance(number, int | np.integer) for number in numbers):
        raise OptionError(f"{name} is {value!r}: pass the number of an argument, counted from 0, or several as a tuple")
    return tuple(int(number) for number in numbers)
