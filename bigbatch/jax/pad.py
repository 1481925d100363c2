"""`pad`: fills a batch up, so that devices can share it evenly."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core.batch import shared_size
from ..core.options import positive


def pad(batch: Any, multiple: int) -> tuple[Any, Any]:
    """Pads a batch to a multiple of `multiple` samples.

        batch, is_real = pad(batch, 8)

    The last sample is repeated, so that the loss sees no unusual values. Return the mean weighted by `is_real` from the
    loss, and the sum of `is_real` from `weight`.

    Args:
        batch: An array with a row for each sample, or a pytree of them.
        multiple: The number of devices, say.

    Returns:
        The batch, and an array with 1.0 for each real sample and 0.0 for each that was added.
    """
    multiple = positive("multiple", multiple)
    named = [(jax.tree_util.keystr(path) or "the batch", leaf) for path, leaf in jax.tree.leaves_with_path(batch)]
    size = shared_size([(name, int(leaf.shape[0])) for name, leaf in named if np.ndim(leaf)], batch)
    missing = -size % multiple

    def padded(leaf: Any) -> Any:
        if not np.ndim(leaf) or not missing:
            return leaf
        stack = jnp if isinstance(leaf, jax.Array) else np
        return stack.concatenate([leaf, stack.repeat(leaf[-1:], missing, axis=0)])

    return jax.tree.map(padded, batch), np.repeat(np.array([1, 0], np.float32), [size, missing])
