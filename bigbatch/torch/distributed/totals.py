"""The counts that the ranks exchange once a step, in one small all-reduce."""

from __future__ import annotations  # some builds of torch have no process groups

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from ...core.errors import LossError, RankError
from ...core.weight import Terms

_MAX_TERMS = 16
"""How many terms the loss of a shared model may have: a rank without data does not know the number."""


class LocalCounts(NamedTuple):
    """What one rank brings to a step.

    Args:
        total: The weight of its micro-batches, term by term; empty if it has none.
        num_passes: How many of them have a weight, and so go through the model.
        num_micro_batches: How many it has.
        is_ending: Whether it has no more data after this, and only takes part in the steps of the others.
        has_failed: Whether it has refused its input.
        is_unfinished: Whether its model is still waiting for a backward pass that will not come.
        num_hooks: How many hooks its parameters have.
    """

    total: Terms = ()
    num_passes: int = 0
    num_micro_batches: int = 0
    is_ending: bool = False
    has_failed: bool = False
    is_unfinished: bool = False
    num_hooks: int = 0


class Totals(NamedTuple):
    """The counts of all ranks: added up, or a tuple by rank. `is_ending` is true of all, `is_unfinished` of any."""

    total: Terms
    num_passes: tuple[int, ...]
    num_micro_batches: int
    is_ending: bool
    is_unfinished: bool = False
    num_hooks: tuple[int, ...] = (0,)


GetTotals = Callable[[], Totals]
"""A function that waits for the other ranks' counts and returns the totals."""


def exchange(own: LocalCounts, group: dist.ProcessGroup) -> GetTotals:
    """Starts the one small all-reduce of a step, which goes on while this rank works."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    num_terms = len(own.total)
    if num_terms > _MAX_TERMS:
        raise LossError(f"the loss has {num_terms} terms but ranks can share {_MAX_TERMS}: add some of them up")
    by_rank = torch.zeros(5, size, dtype=torch.float64)
    by_rank[:, rank] = torch.tensor([own.num_passes, own.is_ending, own.has_failed, own.is_unfinished, own.num_hooks])
    terms = [*own.total, *[0] * (_MAX_TERMS - num_terms)]
    has_terms = num_terms > 0
    head = torch.tensor([own.num_micro_batches, has_terms, num_terms, num_terms**2, *terms], dtype=torch.float64)
    message = torch.cat([head, by_rank.flatten()])
    work = dist.all_reduce(message, group=group, async_op=True)

    @functools.cache
    def get_totals() -> Totals:
        work.wait()
        num_micro_batches, num_with_terms, num_all_terms, squares, *rest = message.tolist()
        passes, ending, failed, unfinished, hooks = (
            rest[_MAX_TERMS + k * size : _MAX_TERMS + (k + 1) * size] for k in range(5)
        )
        if any(failed):
            raise RankError(
                f"rank {failed.index(1)} refused what it was given, so none of {size} ranks made this step: "
                "its own message says why"
            )
        if num_all_terms**2 != squares * num_with_terms:
            raise RankError(
                f"the loss has {num_terms} terms on rank {rank} but {num_all_terms / num_with_terms:g} on average over "
                f"{num_with_terms:g} ranks: give every rank the same loss"
            )
        num = num_terms or (int(num_all_terms / num_with_terms) if num_with_terms else 1)
        return Totals(
            tuple(int(t) if t.is_integer() else t for t in rest[:num]),
            tuple(map(int, passes)),
            int(num_micro_batches),
            all(ending),
            any(unfinished),
            tuple(map(int, hooks)),
        )

    return get_totals
