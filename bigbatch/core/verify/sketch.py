"""Folds gradients into short vectors (count sketches), so that many of them fit into memory.

Folding is linear: if a gradient is a mix of others, its sketch is the same mix of their sketches, and otherwise it
almost surely is not. So least squares on sketches find the same coefficients. A gradient with no more numbers than a
sketch is kept as it is.
"""

from collections.abc import Mapping
from zlib import crc32

import numpy as np

from .trial import Array

SIZE = 8192


def sketch(gradient: Mapping[str, Array], sizes: Mapping[str, int]) -> Array:
    """The gradient as one vector; `sizes` are those of all parameters, some of which may be missing in it."""
    if sum(sizes.values()) <= SIZE:
        return np.concatenate([_flat(gradient, name, sizes[name]) for name in sizes])
    folded = np.zeros(SIZE)
    for name, size in sizes.items():
        if name not in gradient:
            continue
        draw = np.random.default_rng(crc32(name.encode()))
        flat = _flat(gradient, name, size)
        for start in range(0, size, 64 * SIZE):  # in parts, because signs for a whole parameter cost memory
            part = flat[start : start + 64 * SIZE]
            signed = part * (2.0 * draw.integers(0, 2, len(part), np.int8) - 1)
            folded += np.pad(signed, (0, -len(part) % SIZE)).reshape(-1, SIZE).sum(axis=0)
    return folded


def _flat(gradient: Mapping[str, Array], name: str, size: int) -> Array:
    if name not in gradient:
        return np.zeros(size)
    found = np.ravel(gradient[name])
    if np.iscomplexobj(found):
        found = np.stack([found.real, found.imag]).ravel()
    return found.astype(np.float64, copy=False)


def sizes_of(*gradients: Mapping[str, Array]) -> dict[str, int]:
    """How many numbers each parameter has; a complex number counts twice."""
    return {name: g.size * (1 + np.iscomplexobj(g)) for gradient in gradients for name, g in gradient.items()}
