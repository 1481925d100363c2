"""What a loss is called with: which arguments are parameters, which are cut, which go whole."""

import enum
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse import JAXSparse

from ..core.errors import BatchError, OptionError, WeightError
from ..core.weight import as_plain, check_weight, is_number

Role = Literal["rows", "key", "whole", "static"]


class Arrays(NamedTuple):
    """The arrays among the arguments, apart from the parameters."""

    rows: list[Any]
    """Those that have one row for each sample, and are cut."""
    keys: list[Any]
    """PRNG keys; each micro-batch gets its own."""
    whole: list[Any]
    """Those that every micro-batch gets as they are."""


@dataclass(frozen=True)
class Form:
    """All that is known of the arguments without their arrays. Equal forms can share one compiled function."""

    structure: Any
    roles: tuple[Role, ...]
    statics: tuple["Static", ...]
    argnums: tuple[int, ...]
    batch_argnums: tuple[int, ...]

    def bind(self, parameters: tuple[Any, ...], arrays: Arrays) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments to call the loss with."""
        args, kwargs = self.fill(arrays)
        for number, parameter in zip(self.argnums, parameters, strict=True):
            args[number] = parameter
        return tuple(args), kwargs

    def fill(self, arrays: Arrays) -> tuple[list[Any], dict[str, Any]]:
        """The arguments, without the parameters."""
        left = {role: iter(getattr(arrays, name)) for role, name in NAMES.items()}
        left["static"] = (static.value for static in self.statics)
        args, kwargs = jax.tree.unflatten(self.structure, [next(left[role]) for role in self.roles])
        return args, kwargs

    def leaves(self, arrays: Arrays) -> list[tuple[Any, Role, Any]]:
        """Where each leaf of the arguments is, its role, and itself."""
        leaves = jax.tree.leaves_with_path(self.fill(arrays), is_leaf=lambda leaf: isinstance(leaf, JAXSparse))
        return [(path, role, leaf) for (path, leaf), role in zip(leaves, self.roles, strict=True)]

    def batch(self, arrays: Arrays) -> tuple[Any, ...]:
        """The arguments that are cut, in their order."""
        args, _ = self.bind((None,) * len(self.argnums), arrays)
        return tuple(args[number] for number in self.batch_argnums)


NAMES: dict[Role, str] = {"rows": "rows", "key": "keys", "whole": "whole"}
NO_NUMBERS = ("U", "S", "O")  # kinds of NumPy arrays that JAX cannot hold: strings, objects
PLAIN = (str, bytes, bool, int, float, complex)
NAMED = (type, types.FunctionType, types.BuiltinFunctionType, np.dtype, enum.Enum)


@dataclass(frozen=True)
class Static:
    """An argument that is no array; two are equal only if no loss can tell them apart, and 1, 1.0 and True can be."""

    value: Any = field(compare=False)
    key: Any

    @classmethod
    def of(cls, value: Any) -> "Static":
        if isinstance(value, PLAIN):
            return cls(value, (type(value), repr(value)))  # not by value: 0.0 equals -0.0, and nothing equals NaN
        return cls(value, value if isinstance(value, NAMED) else Unhashable)

    def __hash__(self) -> int:
        if self.key is Unhashable:
            raise TypeError(f"a {type(self.value).__name__} may change, so no compiled function can be kept for it")
        return hash(self.key)


class Unhashable:
    """Stands for what may change between two calls."""


def take_apart(
    args: Sequence[Any], kwargs: dict[str, Any], argnums: tuple[int, ...], batch_argnums: tuple[int, ...] | None
) -> tuple[Form, tuple[Any, ...], Arrays]:
    """The form of a call, its parameters and its other arrays.

    The batch is every positional argument that is no parameter, or those that `batch_argnums` names. Keyword
    arguments go whole, and so does what has no axis.
    """
    argnums = counted("argnums", argnums, len(args))
    batch_argnums = None if batch_argnums is None else counted("batch_argnums", batch_argnums, len(args))
    others = [None if number in argnums else arg for number, arg in enumerate(args)]
    leaves, structure = jax.tree.flatten_with_path((others, kwargs), is_leaf=lambda leaf: isinstance(leaf, JAXSparse))

    def is_cut(path: Any) -> bool:
        number = path[1].idx if path[0].idx == 0 else None
        return number is not None and (batch_argnums is None or number in batch_argnums)

    roles = tuple(role_of(path, leaf, is_cut=is_cut(path)) for path, leaf in leaves)
    found: dict[Role, list[Any]] = {role: [] for role in ("rows", "key", "whole", "static")}
    for (_, leaf), role in zip(leaves, roles, strict=True):
        found[role].append(leaf)
    named = [(path, leaf) for (path, leaf), role in zip(leaves, roles, strict=True) if role == "rows"]
    if not named:
        raise BatchError(
            "the loss was called without an array that can be cut: pass the batch by position, after the parameters; "
            "an object that is no pytree has to be registered with jax.tree_util.register_dataclass"
        )
    size = check_rows([(name_of(path), leaf) for path, leaf in named])
    for (path, leaf), role in zip(leaves, roles, strict=True):
        if role == "key" and is_cut(path) and leaf.shape == (size,):
            raise OptionError(
                f"{name_of(path)}, {size} unsigned integers beside a batch of {size} samples, may be a key or labels: "
                "make keys with jax.random.key(), or labels of a signed type"
            )
    cut = tuple(sorted({path[1].idx for path, _ in named}))
    statics = tuple(Static.of(leaf) for leaf in found["static"])
    form = Form(structure, roles, statics, argnums, cut)
    return form, tuple(args[number] for number in argnums), Arrays(found["rows"], found["key"], found["whole"])


def role_of(path: Any, leaf: Any, *, is_cut: bool) -> Role:
    if isinstance(leaf, JAXSparse):
        if is_cut:
            raise BatchError("a sparse array cannot be cut: pass a dense one, or pass it whole, by keyword")
        return "whole"
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic) or getattr(leaf.dtype, "kind", "") in NO_NUMBERS:
        return "static"
    if is_typed_key(leaf):
        return "rows" if is_cut and np.ndim(leaf) else "key"
    if is_raw_key(leaf):
        if is_called_key(path):
            return "key"
        if not is_cut:
            raise OptionError(
                f"{name_of(path)}, {leaf.size} unsigned integers, may be a key or numbers: make keys with "
                "jax.random.key(), or pass one under a name with key or rng in it, or numbers of a signed type"
            )
    return "rows" if is_cut and np.ndim(leaf) else "whole"


def is_typed_key(leaf: Any) -> bool:
    return not isinstance(leaf.dtype, np.dtype) and bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def is_raw_key(leaf: Any) -> bool:
    """Whether this may be a key of the old kind, which is an array like any other."""
    if leaf.dtype != np.uint32 or len(leaf.shape) != 1:
        return False
    return leaf.shape[0] == (2 if jax.config.jax_default_prng_impl == "threefry2x32" else 4)


def is_called_key(path: Any) -> bool:
    """An argument by itself, or one named so, or an entry of such a one: rngs={"dropout": key}."""
    names = [str(getattr(entry, "key", "")).lower() for entry in path[1:]]
    is_argument = path[0].idx == 0 and len(path) == 2
    return is_argument or (len(names) <= 2 and any(word in name for name in names for word in ("key", "rng")))


def counted(name: str, numbers: tuple[int, ...], num_arguments: int) -> tuple[int, ...]:
    """Numbers of arguments, all counted from the first."""
    for number in numbers:
        if not -num_arguments <= number < num_arguments:
            raise OptionError(
                f"{name} names argument {number} but the loss was called with {num_arguments} positional arguments: "
                "pass arguments that are named so by position, counted from 0"
            )
    return tuple(number % num_arguments for number in numbers)


def check_rows(named: list[tuple[str, Any]]) -> int:
    """The size that all arrays of the batch share."""
    (first, leaf), *others = named
    size = leaf.shape[0]
    for name, other in others:
        if other.shape[0] != size:
            raise BatchError(
                f"{first} has {size} samples but {name} has {other.shape[0]}: all arrays of a batch share their "
                "leading axis; what belongs to no sample goes by keyword, or is left out of batch_argnums"
            )
    if size == 0:
        raise BatchError(f"{first} has 0 samples: a batch has at least 1")
    return int(size)


def name_of(path: Any) -> str:
    first = f"argument {path[1].idx}" if path[0].idx == 0 else f"the argument {path[1].key}"
    return f"{first}{jax.tree_util.keystr(path[2:])}"


def num_rows(arrays: Arrays) -> int:
    return int(arrays.rows[0].shape[0])


def checked_weight(weight: Any, dtype: Any) -> Any:
    """One number for a micro-batch, or for one term of its loss; an array is added up.

    Not a number where it is bad and cannot be read, as in `jit`: what comes of it is not finite then, and not wrong.
    """
    if is_number(weight):
        return check_weight((as_plain(weight),), of="a micro-batch")[0]
    if not isinstance(weight, jax.Array | np.ndarray) or not is_real(weight.dtype):
        kind = f"an array of {weight.dtype}" if hasattr(weight, "dtype") else f"a {type(weight).__name__}"
        raise WeightError(
            f"weight returned {kind}: return a number, an array of numbers, or a tuple, one for each term"
        )
    if isinstance(weight, np.ndarray):
        check_weight(tuple(weight.ravel().tolist()), of="a micro-batch")
    return jnp.where(jnp.all(jnp.asarray(weight) >= 0), jnp.sum(weight, dtype=dtype), jnp.nan)


def is_real(dtype: Any) -> bool:
    return any(jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_))


def is_traced(tree: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def as_numbers(name: str, value: Any) -> tuple[int, ...]:
    """argnums as a tuple."""
    numbers = value if isinstance(value, tuple | list) else (value,)
    if not numbers or not all(isinstance(number, int | np.integer) for number in numbers):
        raise OptionError(f"{name} is {value!r}: pass the number of an argument, counted from 0, or several as a tuple")
    return tuple(int(number) for number in numbers)
