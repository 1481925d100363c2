"""Nests of plain values and arrays as JSON and safetensors: reading them runs no code from the file."""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import BigBatchError, MissingExtraError, StateError

# Types that NumPy does not have are stored as integers of the same size
STORED = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
_KNOWN = {
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64",
    "complex64", "complex128", *STORED,
}  # fmt: skip
_MAX_DEPTH = 100
MAX_JSON = 1 << 27
"""How many bytes of JSON are written and read, since Python may need 30 times as much memory for it."""


@dataclass(frozen=True, eq=False)
class Array:
    """An array of any framework, on the host."""

    stored: np.ndarray
    dtype: str  # what it stands for, by the name that NumPy, PyTorch, TensorFlow and JAX share

    def numpy(self) -> np.ndarray:
        """As an array of its own type. Types that NumPy does not have need ml_dtypes, as JAX and TensorFlow do."""
        if self.dtype not in STORED:
            return self.stored
        import ml_dtypes

        return self.stored.view(getattr(ml_dtypes, self.dtype))


def as_array(value: Any) -> Array | None:
    """A copy of a NumPy array; None for anything else. Frameworks have such a function for their own arrays."""
    if not isinstance(value, np.ndarray):
        return None
    copied = np.array(value, order="C")
    name = copied.dtype.name
    return Array(copied.view(STORED[name]) if name in STORED else copied, name)


def packed(tree: Any, convert: Callable[[Any], Array | None] = as_array) -> tuple[Any, dict[str, Array]]:
    """The tree with names in place of arrays, and the arrays; raises StateError for what cannot be saved."""
    arrays: dict[str, Array] = {}
    return _packed(tree, "", convert, arrays), arrays


def _packed(value: Any, path: str, convert: Callable[[Any], Array | None], arrays: dict[str, Array]) -> Any:
    if path.count("/") > _MAX_DEPTH:
        raise StateError(f"{path[:60]}… is more than {_MAX_DEPTH} levels deep, which is not saved: make it flat")
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, np.bool_ | np.integer | np.floating):
        return _packed(value.item(), path, convert, arrays)
    array = value if isinstance(value, Array) else as_array(value) or convert(value)
    if array is not None:
        if array.dtype not in _KNOWN:
            raise StateError(f"{path or 'the state'} is an array of {array.dtype}, which safetensors does not have")
        name = (path or "array").encode("utf-8", "backslashreplace").decode()
        while name in arrays:  # 1 and "1" are two keys
            name += "'"
        arrays[name] = array
        return {"array": [name, array.dtype]}
    inside = f"{path}/" if path else ""
    if isinstance(value, Mapping):
        kind = "counter" if isinstance(value, Counter) else "dict"
        keys = [_packed(key, f"{path}/key", lambda _: None, arrays) for key in value]
        items = [_packed(item, f"{inside}{key}", convert, arrays) for key, item in value.items()]
        return {kind: [[key, item] for key, item in zip(keys, items, strict=True)]}
    if type(value) in (list, tuple):
        items = [_packed(item, f"{inside}{number}", convert, arrays) for number, item in enumerate(value)]
        return {type(value).__name__: items}
    if type(value) is bytes:
        return {"bytes": value.hex()}
    raise StateError(
        f"{path or 'the state'} is a {type(value).__name__}, which is not saved since loading it would run code: "
        "use only numbers, text, lists, dicts and arrays"
    )


def unpacked(value: Any, arrays: dict[str, np.ndarray], convert: Callable[[Array], Any] = Array.numpy) -> Any:
    """The opposite of `packed`. It takes each array out of `arrays`, so that a small file cannot fill the memory."""
    if not isinstance(value, dict):
        if value is None or type(value) in (bool, int, float, str):
            return value
        raise StateError(f"a saved state has a {type(value).__name__} where a value should be")
    ((kind, inner),) = value.items()
    if kind == "array":
        name, dtype = inner
        stored = arrays.pop(name)
        stored = stored.view("complex128")[..., 0] if dtype == "complex128" else stored
        if stored.dtype.name != STORED.get(dtype, dtype):
            raise StateError(f"{name} should be {dtype} but is stored as {stored.dtype}: it was changed")
        return convert(Array(stored, dtype))
    if kind == "float":
        return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[inner]
    if kind == "bytes":
        return bytes.fromhex(inner)
    if kind in ("dict", "counter"):
        items = {unpacked(key, {}): unpacked(item, arrays, convert) for key, item in inner}
        return items if kind == "dict" else Counter(items)
    if kind in ("list", "tuple"):
        values = [unpacked(item, arrays, convert) for item in inner]
        return values if kind == "list" else tuple(values)
    raise StateError(f"a saved state has a {kind}, which is not known here: it may be of a newer version")


def to_json(tree: Any) -> bytes:
    content = json.dumps(tree, separators=(",", ":"), allow_nan=False).encode() + b"\n"
    _check_size(content)
    return content


def from_json(content: bytes) -> Any:
    _check_size(content)
    return json.loads(content)


def _check_size(content: bytes) -> None:
    if len(content) > MAX_JSON:
        raise StateError(
            f"the state has {len(content)} bytes of plain values, and at most {MAX_JSON} are saved: use arrays for "
            "long lists of numbers"
        )


def to_safetensors(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Arrays by name in one piece. safetensors has no complex128, which gets an axis for its two parts."""
    stored = {name: a[..., None].view("float64") if a.dtype == "complex128" else a for name, a in arrays.items()}
    content: bytes = safetensors().save(stored)
    return content


def from_safetensors(content: bytes) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = safetensors().load(content)
    return arrays


def safetensors() -> Any:
    """safetensors for NumPy; raises MissingExtraError if it is not installed."""
    try:
        import safetensors.numpy as module
    except ModuleNotFoundError as error:
        raise MissingExtraError('checkpoints need safetensors: pip install "bigbatch[checkpoint]"') from error
    return module


def to_bytes(tree: Any, convert: Callable[[Any], Array | None] = as_array) -> bytes:
    """A tree and its arrays in one piece."""
    plain, arrays = packed(tree, convert)
    text = np.frombuffer(to_json(plain), np.uint8)
    return to_safetensors({"tree": text, **{f"/{name}": array.stored for name, array in arrays.items()}})


def from_bytes(content: bytes, convert: Callable[[Array], Any] = Array.numpy) -> Any:
    """The opposite of `to_bytes`; raises StateError for anything else."""
    try:
        arrays = from_safetensors(content)
        tree = from_json(arrays.pop("tree").tobytes())
        return unpacked(tree, {name[1:]: array for name, array in arrays.items()}, convert)
    except (BigBatchError, MemoryError):
        raise
    except Exception as error:  # a stranger may have put anything there
        raise StateError(f"a saved state is damaged ({type(error).__name__}: {str(error)[:300]})") from error
