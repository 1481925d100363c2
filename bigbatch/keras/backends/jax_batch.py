"""Batches on the jax backend: how they are cut, on one device or on several that share them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.sparse import JAXSparse
from keras import tree

from ...core.errors import BatchError
from ..loss import Batch

Body = Callable[[Any, Batch, Any], tuple[Any, list[Any]]]


@dataclass(frozen=True)
class Cut:
    """How a batch is cut: each micro-batch takes `size` samples of each of `num_parts` equal parts of the batch.

    Devices that share a batch have a part each. A micro-batch that takes from all of them leaves samples where they
    are.
    """

    size: int
    num_parts: int = 1

    @classmethod
    def shared(cls, micro_batch_size: int, num_devices: int) -> "Cut":
        return cls(max(1, micro_batch_size // num_devices), num_devices)

    def loop(self, body: Body, carry: Any, batch: Batch, rows: Any = None) -> tuple[Any, list[list[Any]]]:
        """Runs `body(carry, micro_batch, row) -> carry, tensors` for each micro-batch, and stacks the tensors.

        There are two stacks where the last micro-batch is shorter.
        """
        num_full, rest = divmod(num_samples(batch[0]) // self.num_parts, self.size)
        found: list[list[Any]] = []

        def step(carry: Any, k: Any) -> tuple[Any, list[Any]]:
            micro_batch = taken(batch, k * self.size, self.size, self.num_parts)
            return body(carry, micro_batch, None if rows is None else rows[k])

        if num_full:
            carry, stacked = jax.lax.scan(step, carry, jnp.arange(num_full))
            found.append(stacked)
        if rest:  # shapes are fixed in JAX, so the short last micro-batch is not part of the scan
            micro_batch = taken(batch, num_full * self.size, rest, self.num_parts)
            carry, tensors = body(carry, micro_batch, None if rows is None else rows[num_full])
            found.append([tensor[None] for tensor in tensors])
        return carry, found

    def joined(self, found: list[list[Any]]) -> list[Any]:
        """Stacked tensors with a row for each sample, in the order of the batch."""

        def part_by_part(stacked: Any) -> Any:
            split = stacked.reshape(len(stacked), self.num_parts, -1, *stacked.shape[2:])
            return split.swapaxes(0, 1).reshape(self.num_parts, -1, *stacked.shape[2:])

        joined = [jnp.concatenate(list(map(part_by_part, pieces)), 1) for pieces in zip(*found, strict=True)]
        return [tensor.reshape(-1, *tensor.shape[2:]) for tensor in joined]


def num_samples(x: Any) -> int:
    leaf = next((leaf for leaf in tree.flatten(x) if leaf is not None), None)
    if leaf is None or jnp.ndim(leaf) == 0:
        raise BatchError("x has no batch axis to cut along: give fit arrays of samples")
    return int(leaf.shape[0])


def taken(batch: Batch, start: Any, num: int, num_parts: int = 1) -> Any:
    """`num` samples from `start` on of each of the equal parts of a batch; what has no axes is taken whole."""

    def leaf(value: Any) -> Any:
        if value is None or jnp.ndim(value) == 0:
            return value
        if isinstance(value, JAXSparse):
            raise BatchError("a sparse JAX array cannot be cut: give fit a dense one")
        parts = value.reshape(num_parts, len(value) // num_parts, *value.shape[1:])
        return jax.lax.dynamic_slice_in_dim(parts, start, num, 1).reshape(num_parts * num, *value.shape[1:])

    return tree.map_structure(leaf, batch)
