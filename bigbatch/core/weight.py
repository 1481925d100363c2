"""The heart: how much each micro-batch counts.

For a window of micro-batches k with mean loss l_k and weight w_k, the loss of the whole batch is

    loss = sum_k w_k * l_k / W        with  W = sum_k w_k

and its gradient is the gradient of exactly that. All frameworks call the functions in this file, and only `share`
divides by a weight. The functions work on plain numbers, tensors and traced arrays: `where`, the only operation
that differs between them, is an argument.

**Count before dividing.** If the whole window is available, W is known before the first backward pass. Multiply each
loss by w_k / W, and the gradients add up:

    total = totals(weights)
    for micro_batch, weight in zip(window, weights):
        (loss(micro_batch) * share(weight, total)).backward()

(PyTorch passes the share as the gradient argument of `backward()`.)

**Divide once at the end.** If micro-batches arrive one at a time, W is not known yet. Multiply each loss by
w_k / reference, and the finished sum by reference / W:

    sum_k (w_k / reference) * g_k  *  (reference / W)  =  sum_k w_k * g_k / W

The first way is the second with W as the reference, which makes the last factor 1. Otherwise the reference is a guess
of W: the first weight times the expected number of micro-batches. A good guess keeps the sums about as large as a mean,
so that float16 does not overflow; the last factor corrects any guess. `Weights` does both.

Dividing by the number of micro-batches instead is wrong as soon as the weights differ.

A loss may have several terms, each a mean over its own count (tokens, samples). Then losses and weights are tuples of
the same length, and each term is divided by its own total. A plain loss is a tuple of one. With reduction "sum"
nothing is divided.
"""

import numbers
import reprlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

from .errors import LossError, WeightError
from .options import check_choice

Reduction = Literal["mean", "sum"]
Terms = tuple[Any, ...]
Where = Callable[[Any, Any, Any], Any]
_INTEGRAL = (int, numbers.Integral)  # int first: checking an abstract class takes ten times as long
_REAL = (int, float, numbers.Real)
_MAX_WEIGHT = sys.float_info.max


def as_terms(value: Any) -> Terms:
    """A loss or a weight as a tuple of terms."""
    return value if isinstance(value, tuple) else (value,)


def from_terms(terms: Terms) -> Any:
    """The inverse of `as_terms`: a tuple of one becomes its only term."""
    return terms[0] if len(terms) == 1 else terms


def _choose(condition: bool, value: Any, other: Any) -> Any:
    """`where` for plain numbers."""
    return value if condition else other


def share(weight: Any, total: Any, where: Where = _choose) -> Any:
    """w / W, the one division by a total weight; 0 where W is 0, since a mean over nothing counts for nothing.

    Args:
        weight: A weight, or a sum to turn into a mean: a number, a tensor or a traced array.
        total: The total weight.
        where: The framework's `where(condition, value, other)`; leave it out for plain numbers.
    """
    is_empty = total == 0
    where = _where_for(is_empty, where)
    return where(is_empty, 0.0, weight / where(is_empty, 1.0, total))


def shares(weight: Terms, total: Terms, reduction: Reduction = "mean", where: Where = _choose) -> Terms:
    """The factor for each term of a micro-batch's loss: w_k / W, or 1 with reduction "sum"."""
    if reduction == "sum":
        return tuple([1.0 for _ in weight])
    return tuple([share(w, t, where) for w, t in zip(weight, total, strict=True)])


def counted(value: Any, share: Any, where: Where = _choose) -> Any:
    """A loss or a gradient times its share; 0 where the share is 0, even if the value is NaN (a mean over nothing)."""
    is_empty = share == 0
    return _where_for(is_empty, where)(is_empty, 0.0, value * share)


def _where_for(condition: Any, where: Where) -> Where:
    """`_choose` for plain numbers, even if the framework's own `where` is given."""
    return _choose if isinstance(condition, bool) else where


def totals(weights: Sequence[Terms]) -> Terms:
    """The total weight of a window, term by term."""
    return tuple(map(sum, zip(*weights, strict=True)))


def has_weight(total: Terms, num_micro_batches: int, reduction: Reduction = "mean") -> bool:
    """Whether a window has any weight; if not, its step leaves the parameters alone."""
    return any(total) or (reduction == "sum" and num_micro_batches > 0)


def weighted(losses: Sequence[Terms], by: Sequence[Terms]) -> tuple[float, ...]:
    """The loss of the whole batch, term by term: each micro-batch's loss times its share in `by`, added up."""
    return tuple(
        sum(float(value) * part for value, part in zip(term, of_term, strict=True) if part)
        for term, of_term in zip(zip(*losses, strict=True), zip(*by, strict=True), strict=True)
    )


class Weights:
    """The weights of one window, and the reference that divides them while gradients add up.

        weights = Weights(reduction, reference)       # the total if it is known; else it is guessed
        for micro_batch in window:
            (loss(micro_batch) * weights.share(weight)).backward()
            weights.add(weight)
        gradient *= weights.rest(total)               # 1 if the reference was the total

    Args:
        reduction: "mean" or "sum".
        reference: Divides the weights, term by term, while gradients add up. If it is empty, it is guessed: the first
            weight times `num_expected`.
        where: The framework's `where`, if weights may be tensors.
        num_expected: How many micro-batches the window is expected to have. If they all weigh the same, the reference
            is then the total, and `rest` is 1.
    """

    def __init__(
        self, reduction: Reduction = "mean", reference: Terms = (), where: Where = _choose, num_expected: int = 1
    ) -> None:
        self.reduction = reduction
        self.reference = reference
        self.weights: list[Terms] = []
        self._where = where
        self._num_expected = num_expected

    def check(self, weight: Terms) -> None:
        """Raises WeightError if this micro-batch does not have as many terms as those before it."""
        if self.weights and len(weight) != len(self.reference):
            raise WeightError(
                f"this micro-batch has {len(weight)} weights, those before it in the window have "
                f"{len(self.reference)}: give every micro-batch the same terms"
            )

    def share(self, weight: Terms) -> Terms:
        """The factors for the losses of the next micro-batch: w_k / reference."""
        return shares(weight, self.reference or self.guess(weight), self.reduction, self._where)

    def add(self, weight: Terms) -> None:
        """Adds the weight of a micro-batch."""
        self.check(weight)
        self.reference = self.reference or self.guess(weight)
        self.weights.append(weight)

    def guess(self, weight: Terms) -> Terms:
        """A guess of the total from one weight, taken as 1 where it is 0, without waiting for a device."""
        return tuple([(w + (w == 0)) * self._num_expected for w in weight])

    def rest(self, total: Terms) -> Terms:
        """The factors for the finished sums: reference / W."""
        return shares(self.reference, total, self.reduction, self._where)


def is_number(value: Any) -> bool:
    """Whether this is a plain number, and not a tensor whose value may still be on a device."""
    return isinstance(value, _REAL)


def as_plain(value: Any) -> Any:
    """A number as a Python int or float, so that sums neither overflow nor round; anything else unchanged."""
    if isinstance(value, _INTEGRAL):
        return int(value)
    return float(value) if isinstance(value, _REAL) else value


def check_weight(weight: Terms, *, of: str) -> Terms:
    """Returns the weight; raises WeightError unless every term is a finite number of at least 0."""
    for w in weight:
        if not (is_number(w) and 0 <= as_plain(w) <= _MAX_WEIGHT):
            raise WeightError(
                f"the weight of {of} is {reprlib.repr(w)}: a weight says how many samples or tokens "
                "the loss averages over, so it must be a finite number of at least 0"
            )
    return weight


def check_terms(num_losses: int, num_weights: int) -> None:
    """Raises LossError unless the loss has as many terms as the weight."""
    if num_losses != num_weights:
        raise LossError(
            f"the loss has {num_losses} term{'s' * (num_losses != 1)} but the weight has {num_weights}: "
            "let `weight` return one number for each term of the loss, in the same order"
        )


def check_reduction(reduction: str) -> None:
    """Raises OptionError unless reduction is "mean" or "sum"."""
    check_choice("reduction", reduction, get_args(Reduction))
