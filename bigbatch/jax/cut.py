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
    """Which samples each micro-batch has.

    All micro-batches are full, except perhaps the last. A full one takes equally many consecutive samples from each of
    `num_parts` equal parts of the batch. If devices share the batch, each of them should have a part of every
    micro-batch, so that no samples move between devices.

    Args:
        num_samples: The size of the batch.
        size: The size of a full micro-batch, at most that of the batch.
        num_parts: How many equal parts of the batch each micro-batch draws from. 1: consecutive samples. The number of
            devices: no sample changes device. `size`: right for any number of devices that divides it.
    """

    num_samples: int
    size: int
    num_parts: int = 1

    @property
    def num_full(self) -> int:
        return self.num_samples // self.size

    def take(self, row: Any, number: Any, size: int) -> Any:
        """The samples of one micro-batch, from an array with a row for each sample of the batch."""
        end = self.num_full * self.size
        if size < self.size:
            return row[end:]
        parts = row[:end].reshape(self.num_parts, self.num_full, self.size // self.num_parts, *row.shape[1:])
        return lax.dynamic_index_in_dim(parts, number, 1, keepdims=False).reshape(size, *row.shape[1:])

    def loop(self, body: _Body, carry: Any) -> tuple[Any, _Stacks]:
        """Calls `body` for each micro-batch. Stands for

        for number, size in enumerate(sizes):
            carry, arrays = body(carry, number, size)
            stack.append(arrays)
        """
        stacks = []
        if self.num_full == 1:
            carry, arrays = body(carry, 0, self.size)
            stacks.append([array[None] for array in arrays])
        else:
            carry, arrays = lax.scan(lambda carry, k: body(carry, k, self.size), carry, jnp.arange(self.num_full))
            stacks.append(arrays)
        if rest := self.num_samples % self.size:  # a scan needs equal shapes, so the shorter last one comes after it
            carry, arrays = body(carry, self.num_full, rest)
            stacks.append([array[None] for array in arrays])
        return carry, stacks

    def join(self, stacks: _Stacks) -> list[Any]:
        """Stacked arrays with a row for each sample, joined in the order of the batch."""

        def in_order(stack: Any, num_parts: int) -> Any:
            parts = stack.reshape(len(stack), num_parts, stack.shape[1] // num_parts, *stack.shape[2:])
            return parts.swapaxes(0, 1).reshape(len(stack) * stack.shape[1], *stack.shape[2:])

        return [
            jnp.concatenate([in_order(stack, num) for stack, num in zip(each, (self.num_parts, 1), strict=False)])
            for each in zip(*stacks, strict=True)
        ]
