"""Finds out by experiment whether a loss is a mean over samples, a sum, or something else.

Put two groups of samples, A and B, together in different numbers. The gradient G(p, q) of p copies of A and q copies
of B shows what the loss is:

    a sum                      G(p, q) = p a + q b
    a mean                     G(p, q) = (p a + q b) / (p m + q n)
    means of different counts  a sum of such fractions
    a sum and a penalty        G(p, q) = p a + q b + c

This does not look inside the loss, so it works for any loss that can be called.
"""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from .trial import Array

Kind = Literal["mean", "sum", "means", "sum and mean", "sum and penalty", "coupled", "unclear"]
_Mixture = Callable[[int, int], Array]  # the gradient and the loss of p copies of A and q copies of B

_MOST_MEANS = 3
_RATIOS = {1: ((1, 1), (2, 1)), 2: ((1, 1), (2, 1), (1, 2), (3, 1)), 3: ((1, 1), (2, 1), (1, 2), (3, 1), (1, 3))}


def loss_kind(gradient: _Mixture, rounding: float) -> tuple[Kind, float]:
    """The kind of the loss; and for a mean, the count of B relative to that of A (else NaN).

    The last number of each vector is the loss itself, which follows the same law as its gradient.
    """
    close = max(1e-10, 50 * rounding)
    found = {pair: gradient(*pair) for pair in ((1, 0), (0, 1), (2, 0), (1, 1), (2, 1))}
    if not all(np.isfinite(vector).all() for vector in found.values()):
        return "coupled", np.nan
    a, b, both = found[1, 0], found[0, 1], found[1, 1]
    if is_same(found[2, 0], a, close):
        # the root or the logarithm of a mean, say: all its gradients are mixes of two, and the loss may be none
        is_function_of_a_mean = _is_mix(both[:-1], a[:-1], b[:-1], 10 * close)
        for num in range(1, 2 if is_function_of_a_mean else _MOST_MEANS + 1):
            found.update({pair: gradient(*pair) for pair in _RATIOS[num] if pair not in found})
            counts = _means(num, {q / p: found[p, q] for p, q in _RATIOS[num]}, a, b, close)
            if counts is None:
                continue
            if num > 1 and (
                len(counts) < num
                or (num > 2 and rounding > 1e-9)
                or not _are_apart(counts, max(1e-3, 100 * np.sqrt(rounding)))
            ):
                if rounding > 1e-9:
                    return "unclear", np.nan
                continue
            return ("mean", float(counts[0].real)) if num == 1 else ("means", np.nan)
        return "coupled", np.nan
    if is_same(found[2, 0], 2 * a, close, a) and is_same(both, a + b, close, a, b):
        return "sum", np.nan
    adds_up = found[2, 0] - a  # the part that another copy of A adds
    if is_same(gradient(3, 0), a + 2 * adds_up, close, a, adds_up):
        stays_a, stays_b = a - adds_up, 2 * b - gradient(0, 2)
        rest = both - (a - stays_a) - (b - stays_b)
        if is_same(stays_a, stays_b, close, a, b) and is_same(rest, stays_a, close, a, b):
            return "sum and penalty", np.nan
        other = found[2, 1] - 2 * (a - stays_a) - (b - stays_b)
        if _means(1, {1.0: rest, 0.5: other}, stays_a, stays_b, close * _larger(stays_a, a, b)) is not None:
            return "sum and mean", np.nan
    return "coupled", np.nan


def _larger(stays: Array, *others: Array) -> float:
    """How much larger the rounding of a difference of gradients is, relative to the difference itself."""
    norm = float(np.linalg.norm(stays))
    return max([1.0, *(float(np.linalg.norm(vector)) / norm for vector in others)]) if norm else 1.0


def _means(num: int, mixed: dict[float, Array], a: Array, b: Array, close: float) -> Any:
    """The ratios of counts (maybe complex) if the loss can be the sum of this many means over counts; else None.

    With t copies of B for each of A, the i-th mean is (a_i + t r_i b_i) / (1 + t r_i), so

        G(t) (1 + r_1 t) (1 + r_2 t) …  =  a + c_1 t + … + e_num t^num b

    where the polynomial on the left is 1 + e_1 t + … + e_num t^num. The unknown vectors c are projected away.
    """
    ratios = np.array(list(mixed))
    powers = ratios[:, None] ** np.arange(1, num + 1)
    by = 1 / (1 + ratios) ** num  # keeps all equations of one size
    unknown = by[:, None] * powers[:, : num - 1]
    free = np.linalg.svd(unknown, full_matrices=True)[0][:, num - 1 :].T if num > 1 else np.eye(len(ratios))
    vectors = np.array(list(mixed.values()))
    columns = []
    for power in range(1, num + 1):
        terms = (by * powers[:, power - 1])[:, None] * (vectors - b if power == num else vectors)
        columns.append((free @ terms).ravel())
    target = (free @ (by[:, None] * (a - vectors))).ravel()
    left = np.stack(columns, axis=1)
    found, _, rank, _ = np.linalg.lstsq(left, target, rcond=close)
    size = max(
        float(np.linalg.norm(target)), *(float(np.linalg.norm(c * e)) for c, e in zip(left.T, found, strict=True))
    )
    gradients = max(float(np.linalg.norm(vector)) for vector in (a, b, *vectors))
    if float(np.linalg.norm(left @ found - target)) > close * max(size, gradients):
        return None
    if rank < num:
        return np.array([1.0]) if num == 1 else np.array([])  # both groups give the same gradient
    counts: Any = np.roots(np.concatenate([[1.0], found * (-1.0) ** np.arange(1, num + 1)]))
    return counts if num > 1 or counts[0].real > 0 else None


def _are_apart(counts: Any, apart: float) -> bool:
    """Whether these are positive numbers and all different: a product of means has the same ratio twice."""
    if np.any(np.abs(counts.imag) > apart * np.abs(counts)) or np.any(counts.real <= 0):
        return False
    sizes = np.sort(counts.real)
    return bool(np.all(np.diff(sizes) > apart * sizes[1:]))


def _is_mix(vector: Array, a: Array, b: Array, close: float) -> bool:
    """Whether a gradient is any mix of two others."""
    pair = np.stack([a, b], axis=1)
    rest = vector - pair @ np.linalg.lstsq(pair, vector, rcond=None)[0]
    return float(np.linalg.norm(rest)) <= close * float(np.linalg.norm(vector))


def is_same(one: Array, other: Array, close: float, *made_of: Array) -> bool:
    """Whether two gradients agree up to rounding; `made_of` are larger ones that one of them is a difference of."""
    size = max(float(np.linalg.norm(vector)) for vector in (one, other, *made_of))
    return bool(np.isfinite(size)) and float(np.linalg.norm(one - other)) <= close * size
