"""The heart: how much each micro-batch counts.

For a window of micro-batches k with mean loss l_k and weight w_k, the loss of the whole batch is

    loss = sum_k w_k * l_k / W        with  W = sum_k w_k

and the gradient is the gradient of exactly that. All that bigbatch does in any framework carries out this
line. There are two ways to it.

**Count before dividing.** The whole window is at hand, so W is known before the first backward pass. Each
micro-loss is multiplied by `scales(w_k, W)` = w_k / W, and the gradients simply add up:

    weights = [weigh(micro_batch) for micro_batch in window]
    total = totals(weights)
    for micro_batch, weight in zip(window, weights):
        (loss(micro_batch) * scales(weight, total)).backward()

**Divide once at the end.** The user feeds micro-batches one at a time and nobody knows W yet. Each
micro-loss is multiplied by w_k / w_1 (a `Tally` remembers w_1, which keeps the sums as large as a mean's, so
that float16 does not overflow), and the finished sum is multiplied by w_1 / W:

    sum_k (w_k / w_1) * g_k  *  (w_1 / W)  =  sum_k w_k * g_k / W

The number of micro-batches appears in neither: dividing by it is wrong as soon as weights differ.

A loss may have several terms, each a mean over a count of its own (tokens, samples). Then losses and weights
are tuples of the same length, and each term is divided by its own total. Everything here therefore works on
tuples; a plain loss is a tuple of one. With reduction "sum" nothing is multiplied or divided at all.
"""

import numbers
import reprlib
import sys
from collections.abc import Sequence
from typing import Any, Literal

from .errors import LossError, OptionError, WeightError

Reduction = Literal["mean", "sum"]
Terms = tuple[Any, ...]
INTEGRAL = (int, numbers.Integral)  # Python's own first: an abstract class takes ten times as long to ask
REAL = (int, float, numbers.Real)
MAX_WEIGHT = sys.float_info.max


def as_terms(value: Any) -> Terms:
    """A loss or a weight as a tuple of terms."""
    return value if isinstance(value, tuple) else (value,)


def from_terms(terms: Terms) -> Any:
    """The opposite of `as_terms`: a tuple of one becomes its only term."""
    return terms[0] if len(terms) == 1 else terms


def totals(weights: Sequence[Terms]) -> Terms:
    """The total weight of a window, term by term."""
    return tuple(map(sum, zip(*weights, strict=True)))


def scales(weight: Terms, total: Terms, reduction: Reduction = "mean") -> Terms:
    """What each term of one micro-batch's loss is multiplied by: w_k / W.

    A term whose total is zero is a mean over nothing: it counts nothing.
    """
    if reduction == "sum":
        return tuple(1.0 for _ in weight)
    return tuple(w / t if t else 0.0 for w, t in zip(weight, total, strict=True))


def times(terms: Terms, factor: float) -> Terms:
    """Every term multiplied by the same."""
    return terms if factor == 1 else tuple(term * factor for term in terms)


def weighted(losses: Sequence[Terms], by: Sequence[Terms]) -> tuple[float, ...]:
    """sum_k s_k * l_k, term by term. What counts zero is left out, even if it is not a number (0/0)."""
    return tuple(
        sum(float(value) * scale for value, scale in zip(term, scale_of_term, strict=True) if scale)
        for term, scale_of_term in zip(zip(*losses, strict=True), zip(*by, strict=True), strict=True)
    )


class Tally:
    """The weights of a window that is fed one micro-batch at a time."""

    def __init__(self, reduction: Reduction = "mean", reference: Terms = ()) -> None:
        self.reduction = reduction
        self.weights: list[Terms] = []
        self.reference: Terms = self._reference(reference)

    def check(self, weight: Terms) -> None:
        """Refuses a micro-batch with other terms than those before it in the window."""
        if self.weights and len(weight) != len(self.reference):
            raise WeightError(
                f"this micro-batch has {len(weight)} weights, those before it in the window have "
                f"{len(self.reference)}: give every micro-batch the same terms"
            )

    def scale(self, weight: Terms) -> Terms:
        """What the losses of the next micro-batch are multiplied by: w_k / w_1."""
        if self.reduction == "sum":
            return tuple([1.0 for _ in weight])
        reference = self.reference or self._reference(weight)
        return tuple([w / r for w, r in zip(weight, reference, strict=True)])

    def add(self, weight: Terms) -> None:
        """Counts a micro-batch."""
        self.check(weight)
        self.reference = self.reference or self._reference(weight)
        self.weights.append(weight)

    @staticmethod
    def _reference(weight: Terms) -> Terms:
        return tuple(w + (w == 0) for w in weight)  # 1 instead of 0, wherever the number is kept

    def factors(self, total: Terms) -> Terms:
        """What the finished sums are multiplied by: w_1 / W."""
        return scales(self.reference, total, self.reduction)


def is_number(value: Any) -> bool:
    """Whether this is a plain number, to be had without asking any device."""
    return isinstance(value, REAL)


def as_plain(value: Any) -> Any:
    """A number as Python's own, so that sums neither overflow nor round; anything else as it is."""
    if isinstance(value, INTEGRAL):
        return int(value)
    return float(value) if isinstance(value, REAL) else value


def check_weight(weight: Terms, *, of: str) -> Terms:
    """The weight, if every term is a finite number that is not negative."""
    for w in weight:
        if not (is_number(w) and 0 <= as_plain(w) <= MAX_WEIGHT):
            raise WeightError(
                f"the weight of {of} is {reprlib.repr(w)}: a weight says over how many samples or tokens "
                "the loss is a mean, so it must be a finite number of at least 0"
            )
    return weight


def check_terms(num_losses: int, num_weights: int) -> None:
    """Refuses a loss whose terms are not matched by weights."""
    if num_losses != num_weights:
        raise LossError(
            f"the loss has {num_losses} term{'s' * (num_losses != 1)} but the weight has {num_weights}: "
            "let `weight` return one number for each term of the loss, in the same order"
        )


def check_reduction(reduction: str) -> None:
    """Refuses a reduction that there is none of."""
    if reduction not in ("mean", "sum"):
        raise OptionError(f'reduction={reduction!r} is unknown: pass "mean" or "sum"')
