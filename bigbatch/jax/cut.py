"""How a batch is cut, and the loop over its micro-batches."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

_Body = Callable[[Any, Any, int], tuple[Any, list[Any]]]
_Stacks = list[list[Any]]
"""The arrays that a body returned, stacked: one list for all full micro-batches, and one for a shorter last one."""


@dataclass(frozen=True)
class Cut:
    """Which samples each micro-batch has. All micro-batches are full, except perhaps the last.

    Args:
        num_samples: The size of the batch.
        size: The size of a full micro-batch, at most that of the batch.
        is_strided: Whether each of n full micro-batches takes every n-th sample instead of consecutive ones. If devices
            share the batch, each then has a part of every micro-batch, so no sample moves between devices.
    """

    num_samples: int
    size: int
    is_strided: bool = False

    @property
    def sizes(self) -> list[int]:
        """The size of each micro-batch."""
        num_full, rest = divmod(self.num_samples, self.size)
        return [self.size] * num_full + [rest] * (rest > 0)

    def take(self, row: Any, number: Any, size: int) -> Any:
        """The samples of one micro-batch, from an array with a row for each sample of the batch."""
        num_full = self.num_samples // self.size
        if size < self.size:
            return row[num_full * self.size :]
        shape = (self.size, num_full) if self.is_strided else (num_full, self.size)
        parts = row[: num_full * self.size].reshape(*shape, *row.shape[1:])
        return lax.dynamic_index_in_dim(parts, number, int(self.is_strided), keepdims=False)

    def loop(self, body: _Body, carry: Any) -> tuple[Any, _Stacks]:
        """Calls `body` for each micro-batch. Stands for

        for number, size in enumerate(sizes):
            carry, arrays = body(carry, number, size)
            stack.append(arrays)
        """
        stacks = []
        num_full = self.num_samples // self.size
        num_scanned = num_full if num_full > 1 else 0
        if num_scanned:  # a scan needs equal shapes, so a shorter last one comes after it
            carry, arrays = lax.scan(lambda carry, k: body(carry, k, self.size), carry, jnp.arange(num_scanned))
            stacks.append(arrays)
        for number, size in enumerate(self.sizes[num_scanned:], num_scanned):
            carry, arrays = body(carry, number, size)
            stacks.append([array[None] for array in arrays])
        return carry, stacks

    def join(self, stacks: _Stacks) -> list[Any]:
        """Stacked arrays with a row for each sample, joined in the order of the batch."""

        def in_order(stack: Any) -> Any:
            parts = stack.swapaxes(0, 1) if self.is_strided else stack  # a stack of one is in order either way
            return parts.reshape(stack.shape[0] * stack.shape[1], *stack.shape[2:])

        return [jnp.concatenate([in_order(stack) for stack in each]) for each in zip(*stacks, strict=True)]
