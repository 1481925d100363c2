"""Nests of plain values and arrays as JSON beside safetensors: whoever reads them runs no code of theirs."""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import MissingExtraError, StateError

STORED = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
"""What NumPy does not know is stored as numbers of the same size."""
KNOWN = {
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64",
    "complex64", "complex128", *STORED,
}  # fmt: skip
MAX_DEPTH = 100


@dataclass(frozen=True, eq=False)
class Array:
    """An array of any framework, on the host: as NumPy has it, and what it is."""

    stored: np.ndarray
    dtype: str
    """By its name in NumPy, PyTorch, TensorFlow and JAX, which is the same."""

    def numpy(self) -> np.ndarray:
        """With its own type; what NumPy does not know is in ml_dtypes, which comes with JAX and TensorFlow."""
        if self.dtype not in STORED:
            return self.stored
        import ml_dtypes

        return self.stored.view(getattr(ml_dtypes, self.dtype))


def as_array(value: Any) -> Array | None:
    """What a framework's own function does for its arrays: a copy on the host; None if it is none of them."""
    if not isinstance(value, np.ndarray):
        return None
    copied = np.array(value, order="C")
    name = copied.dtype.name
    return Array(copied.view(STORED[name]) if name in STORED else copied, name)


def packed(tree: Any, convert: Callable[[Any], Array | None] = as_array) -> tuple[Any, dict[str, Array]]:
    """The tree with arrays by name, and the arrays; refuses what cannot be written."""
    arrays: dict[str, Array] = {}
    return _packed(tree, "", convert, arrays), arrays


def _packed(value: Any, path: str, convert: Callable[[Any], Array | None], arrays: dict[str, Array]) -> Any:
    if path.count("/") > MAX_DEPTH:
        raise StateError(f"{path[:60]}… is more than {MAX_DEPTH} levels deep, which is not saved: make it flat")
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, np.bool_ | np.integer | np.floating):
        return _packed(value.item(), path, convert, arrays)
    array = value if isinstance(value, Array) else as_array(value) or convert(value)
    if array is not None:
        if array.dtype not in KNOWN:
            raise StateError(f"{path or 'the state'} is an array of {array.dtype}, which safetensors does not have")
        name = (path or "array").encode("utf-8", "backslashreplace").decode()
        while name in arrays:  # 1 and "1" are two keys
            name += "'"
        arrays[name] = array
        return {"array": [name, array.dtype]}
    if isinstance(value, Mapping):
        pairs = [(_packed(key, f"{path}/key", _no_array, arrays), key, item) for key, item in value.items()]
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {kind: [[key, _packed(item, _inside(path, own), convert, arrays)] for key, own, item in pairs]}
    if type(value) in (list, tuple):
        kind = type(value).__name__
        return {kind: [_packed(item, _inside(path, number), convert, arrays) for number, item in enumerate(value)]}
    if type(value) is bytes:
        return {"bytes": value.hex()}
    raise StateError(
        f"{path or 'the state'} is a {type(value).__name__}, which is not saved since loading it would run code: "
        "make it of numbers, text, lists, dicts and arrays"
    )


def _inside(path: str, key: Any) -> str:
    return f"{path}/{key}" if path else str(key)


def _no_array(value: Any) -> None:
    return None


def unpacked(value: Any, arrays: Mapping[str, np.ndarray], convert: Callable[[Array], Any] = Array.numpy) -> Any:
    """The tree that was packed."""
    if not isinstance(value, dict):
        if value is None or type(value) in (bool, int, float, str):
            return value
        raise StateError(f"a saved state has a {type(value).__name__} where a value should be")
    ((kind, inner),) = value.items()
    if kind == "array":
        name, dtype = inner
        stored = from_pairs(arrays[name]) if dtype == "complex128" else arrays[name]
        if stored.dtype.name != STORED.get(dtype, dtype):
            raise StateError(f"{name} should be {dtype} but is stored as {stored.dtype}: it was changed")
        return convert(Array(stored, dtype))
    if kind == "float":
        return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[inner]
    if kind == "bytes":
        return bytes.fromhex(inner)
    if kind in ("dict", "counter"):
        found = {unpacked(key, {}): unpacked(item, arrays, convert) for key, item in inner}
        return found if kind == "dict" else Counter(found)
    if kind in ("list", "tuple"):
        items = [unpacked(item, arrays, convert) for item in inner]
        return items if kind == "list" else tuple(items)
    raise StateError(f"a saved state has a {kind}, which is not known here: it may be of a newer version")


def to_json(tree: Any) -> bytes:
    return json.dumps(tree, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def to_safetensors(arrays: Mapping[str, np.ndarray]) -> bytes:
    check_installed()
    from safetensors.numpy import save

    found: bytes = save({name: as_pairs(array) for name, array in arrays.items()})
    return found


def from_safetensors(content: bytes) -> dict[str, np.ndarray]:
    check_installed()
    from safetensors.numpy import load

    found: dict[str, np.ndarray] = load(content)
    return found


def as_pairs(array: np.ndarray) -> np.ndarray:
    """With one more axis for the two parts of complex128, which safetensors does not have."""
    return array[..., None].view("float64") if array.dtype == "complex128" else array


def from_pairs(array: np.ndarray) -> np.ndarray:
    found: np.ndarray = array.view("complex128")[..., 0]
    return found


def check_installed() -> None:
    try:
        import safetensors  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingExtraError('checkpoints need safetensors: pip install "bigbatch[checkpoint]"') from error


def to_bytes(tree: Any, convert: Callable[[Any], Array | None] = as_array) -> bytes:
    """A tree in one piece."""
    plain, arrays = packed(tree, convert)
    text = np.frombuffer(to_json(plain), np.uint8)
    return to_safetensors({"tree": text, **{f"/{name}": array.stored for name, array in arrays.items()}})


def from_bytes(content: bytes, convert: Callable[[Array], Any] = Array.numpy) -> Any:
    """What `to_bytes` was given."""
    arrays = from_safetensors(content)
    text = arrays.pop("tree").tobytes()
    return unpacked(json.loads(text), {name[1:]: array for name, array in arrays.items()}, convert)
