"""Mean and variance of a whole batch from those of its parts, for the BatchNorm layers of all frameworks."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .weight import Where, share


class Moments(NamedTuple):
    """The statistics of some values, channel by channel.

    Args:
        count: How many values there are.
        mean: Their mean.
        squares: The sum of their squared differences from the mean.
    """

    count: Any
    mean: Any
    squares: Any

    def variance(self, where: Where) -> Any:
        """The biased variance."""
        return share(self.squares, self.count, where)


def pool(one: Moments, other: Moments, where: Where) -> Moments:
    """The moments of both sets of values together.

    This is Chan's formula. It does not cancel, as the difference of E(x²) and E(x)² does.

    Args:
        one: The moments of some values.
        other: Those of others. If there are none, their mean may be NaN.
        where: The framework's `where(condition, value, other)`.
    """
    count = one.count + other.count
    part = share(other.count, count, where)
    is_empty = other.count == 0
    apart = where(is_empty, 0.0, other.mean - one.mean)
    squares = where(is_empty, 0.0, other.squares)
    return Moments(count, one.mean + apart * part, one.squares + squares + apart * apart * part * one.count)


def over_ranks(own: Sequence[Moments], add_up: Callable[[list[Any]], Sequence[Any]], where: Where) -> list[Moments]:
    """The moments of the values of all ranks or replicas, with two reductions for all layers together.

    Args:
        own: The moments of this rank, layer by layer.
        add_up: Takes a list of arrays and returns their sums over all ranks.
        where: The framework's `where(condition, value, other)`.
    """
    sums = add_up([m.count for m in own] + [m.mean * m.count for m in own])
    counts, summed = sums[: len(own)], sums[len(own) :]
    means = [share(s, n, where) for s, n in zip(summed, counts, strict=True)]
    apart = [m.mean - mean for m, mean in zip(own, means, strict=True)]
    squares = add_up([m.squares + m.count * each * each for m, each in zip(own, apart, strict=True)])
    return [Moments(*each) for each in zip(counts, means, squares, strict=True)]
