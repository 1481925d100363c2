"""Compares two runs bit for bit."""

import numpy as np

from bigbatch.core.checkpoint.store import Store


def differences(one, other):
    """The names of everything that differs between two run folders."""
    found = [
        name
        for name in ("history.jsonl", "model.safetensors")
        if (one / name).read_bytes() != (other / name).read_bytes()
    ]
    ours, theirs = (newest(folder).state for folder in (one, other))
    for state in (ours, theirs):
        del state["trained"]["run"]["seconds"]
    return found + [f"checkpoint: {path}" for path in unequal(ours, theirs)]


def newest(folder):
    checkpoint = Store(folder / "checkpoints", is_read_only=True).load()
    assert checkpoint is not None, f"{folder} has no checkpoint"
    return checkpoint


def unequal(one, other, path="state"):
    """The places where two trees differ."""
    if type(one) is not type(other):
        return [path]
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return [path]
        return [place for key in one for place in unequal(one[key], other[key], f"{path}/{key}")]
    if isinstance(one, list | tuple):
        if len(one) != len(other):
            return [path]
        pairs = enumerate(zip(one, other, strict=True))
        return [place for key, (a, b) in pairs for place in unequal(a, b, f"{path}/{key}")]
    if isinstance(one, np.ndarray):
        is_same = (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
        return [] if is_same else [path]
    return [] if one == other else [path]
