"""Samples that fill a batch up and count zero."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core.errors import BatchError
from ..core.options import positive
from .batch import check_rows


def pad(batch: Any, multiple: int) -> tuple[Any, Any]:
    """The batch filled up to a multiple of so many samples, and which of them are real (1.0) or filling (0.0).

        batch, is_real = pad(batch, 8)

    Filling repeats the last sample, so that no loss meets values that it does not know. Let the loss be a mean weighted
    by `is_real`, and `weight` its sum.
    """
    multiple = positive("multiple", multiple)
    named = [(jax.tree_util.keystr(path) or "the batch", leaf) for path, leaf in jax.tree.leaves_with_path(batch)]
    with_rows = [(name, leaf) for name, leaf in named if np.ndim(leaf)]
    if not with_rows:
        raise BatchError("the batch has no array with a row for each sample: pass arrays, or a nest of them")
    size = check_rows(with_rows)
    missing = -size % multiple

    def padded(leaf: Any) -> Any:
        if not np.ndim(leaf) or not missing:
            return leaf
        stack = jnp if isinstance(leaf, jax.Array) else np
        return stack.concatenate([leaf, stack.repeat(leaf[-1:], missing, axis=0)])

    return jax.tree.map(padded, batch), np.repeat(np.array([1, 0], np.float32), [size, missing])
