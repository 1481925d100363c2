"""A gradient as a mix of the gradients of its micro-batches, whose coefficients show which mistake a loop made.

Whatever factors a loop uses, its gradient is G = sum_k a_k * g_k. Least squares recover the coefficients a_k, and they
name the mistake: if all are 1/K, the loop divides by the number of micro-batches; if all are 1, it does not divide.
A residual means that G contains something that is in none of the micro-batches.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from .trial import Array

_CLOSE = 1e-5  # coefficients come out of a least-squares fit over float64 gradients
_RESIDUAL = 1e-6  # the residual is the root of a difference of squares: half the digits are gone
_TOO_VAGUE = 0.05  # if rounding can move coefficients by this much, they name no mistake


@dataclass(frozen=True)
class Mix:
    """A gradient as a mix of the micro-batches' gradients."""

    coefficients: Array
    residual: float
    """The norm of what the mix does not explain, relative to that of the gradient."""
    is_unique: bool
    """False if the micro-gradients are so alike, or so many, that other coefficients fit as well."""
    gram: Array
    """Dot products of the micro-gradients with each other."""
    rounding: float = 0.0
    """How far rounding may move a gradient, relative to its norm."""
    norms: Array | None = None
    """The norms of the micro-gradients, if `gram` is not exact."""

    @property
    def is_complete(self) -> bool:
        """Whether the mix explains the gradient up to rounding."""
        return self.residual < self.allowed_residual

    @property
    def is_known(self) -> bool:
        return self.is_unique and self.is_complete

    @property
    def is_of_a_mean(self) -> bool:
        """Whether the gradient can be a weighted mean of these."""
        return self.is_known and bool(np.isclose(self.coefficients.sum(), 1.0, rtol=self.close))

    @property
    def allowed_residual(self) -> float:
        """The residual that rounding alone may cause."""
        parts = np.abs(self.coefficients) * np.sqrt(np.diag(self.gram))
        norm = np.sqrt(max(float(self.coefficients @ self.gram @ self.coefficients), 0.0))
        allowed: float = max(_RESIDUAL, 10 * self.rounding * (1 + parts.sum() / norm if norm else 1.0))
        return allowed

    @property
    def close(self) -> float:
        """Coefficients may be the same if they differ by less than this, relative to the largest."""
        if not self.rounding:
            return _CLOSE
        norms = np.sqrt(np.diag(self.gram))
        lowest = np.sqrt(max(float(np.linalg.eigvalsh(self.gram)[0]), 0.0))
        if not lowest or not np.any(self.coefficients):
            return 1.0
        parts = float(np.linalg.norm(self.coefficients * norms))
        larger = self.rounding * parts / lowest / np.abs(self.coefficients).max()
        return max(_CLOSE, 10 * float(larger))


def unmix(products: Array, rounding: float = 0.0) -> Mix:
    """The mix that has these dot products of [g_1, …, g_K, G] with each other; `rounding` is as in `Mix`."""
    gram, against, square = products[:-1, :-1], products[:-1, -1], float(products[-1, -1])
    eigenvalues = np.linalg.eigvalsh(gram)
    coefficients = np.asarray(np.linalg.lstsq(gram, against, rcond=1e-13)[0], np.float64)
    left = square - 2 * float(coefficients @ against) + float(coefficients @ gram @ coefficients)
    residual = float(np.sqrt(max(left, 0.0) / square)) if square else 0.0
    mix = Mix(coefficients, residual, bool(eigenvalues[0] > 1e-10 * eigenvalues[-1]), gram, rounding)
    if mix.is_unique and rounding and mix.close > _TOO_VAGUE:
        return replace(mix, is_unique=False)
    return mix


def explain_loop(mix: Mix, right: Array, backwards: Callable[[], Mix] | None = None) -> str | None:
    """Names the classic mistake that a loop made; None if it made none.

    Args:
        mix: The gradient that the loop left, as a mix of those of its micro-batches.
        right: The coefficients it should have.
        backwards: The mix after the loop ran over the same micro-batches in reverse order. It shows whether a
            coefficient belongs to a micro-batch or to a place in the window.
    """
    found, num, close = mix.coefficients, len(right), mix.close
    if not mix.is_complete:
        return (
            "the gradient has something in it that is in none of the micro-batches: the loop adds something "
            "that is not in the loss (a penalty, noise, gradients of an earlier window), changes gradients element by "
            "element (clip_grad_value_), or computes another loss"
        )
    if not mix.is_unique:
        return "the micro-batches' gradients are too alike to tell how each was weighted"
    if np.allclose(found, right, rtol=close, atol=close):
        return None
    seen = f"it weights the micro-batches {_numbers(found)} where {_numbers(right)} is right"
    none = close * float(np.abs(found).max())
    if num > 1 and np.all(np.abs(found[:-1]) <= none):
        return f"only the last micro-batch counts: gradients are zeroed between micro-batches; {seen}"
    left_out = [str(k + 1) for k in range(num) if abs(found[k]) <= none and right[k] > close]
    counted = [abs(c) for c in found if abs(c) > none]
    if left_out and min(counted) > 30 * none:  # else all were shrunk, some of them to almost nothing
        return f"micro-batch {', '.join(left_out)} is left out; {seen}"
    if np.allclose(found, found[0], rtol=close, atol=0):
        return f"{_equal(float(found[0]), num, close)}; {seen}"
    scale = float(found @ right / (right @ right))
    if np.allclose(found, scale * right, rtol=close, atol=none):
        return f"{_proportional(scale, right, close)}; {seen}"
    odd, is_shrunk = _odd_one(mix, right), _is_clipped_after_any_scale(mix, right)
    if (odd or is_shrunk) and backwards is not None:
        there, right_there = backwards(), right[::-1]
        close = max(close, there.close)
        if np.allclose(there.coefficients, found, rtol=close, atol=close) or np.allclose(
            there.coefficients / right_there, found / right, rtol=close, atol=close
        ):
            return f"{odd or 'micro-batches count by their place in the window'}; {seen}"
        odd, is_shrunk = None, _is_clipped_after_any_scale(there, right_there)
    if odd is not None:
        return f"{odd}; {seen}"
    return f"the gradient is clipped after each micro-batch instead of once per step; {seen}" if is_shrunk else seen


def _odd_one(mix: Mix, right: Array) -> str | None:
    """The one micro-batch that counts more than the others, which are scaled alike."""
    found, num = mix.coefficients, len(right)
    if num < 3 or np.any(right <= 0):
        return None
    for measure in (np.ones(num), right):
        ratio = found / measure
        odd = int(np.argmax(np.abs(ratio)))
        others = np.delete(ratio, odd)
        if others[0] and np.allclose(others, others[0], rtol=mix.close, atol=0):
            name = "the last micro-batch" if odd == num - 1 else f"micro-batch {odd + 1}"
            times = float(ratio[odd] / others[0])
            return f"{name} is not divided like the others: it counts {times:.4g} times as much as they do"
    return None


def _equal(scale: float, num: int, close: float) -> str:
    if np.isclose(scale, 1 / num, rtol=close):
        return f"divided by the number of micro-batches ({num}) although their weights differ (a mean of means)"
    if np.isclose(scale, 1.0, rtol=close):
        return "not divided: the micro-batches' mean losses are added up as they are"
    if 0 < scale < 1 and (divisor := _whole_times(1 / scale, close)):
        only, size = ("only ", "small") if divisor > num else ("", "large")
        micro_batches = f"{only}{num} micro-batch{'es' * (num > 1)}"
        return f"the loop divides by {divisor}, but this window has {micro_batches}, so its gradient is too {size}"
    if (times := _whole_times(scale * num, close)) or (times := _whole_times(scale, close)):
        return f"{times} times too large: gradients of an earlier window were not zeroed, or the loss was multiplied"
    return f"every micro-batch counts {scale:.4g} whatever its weight"


def _proportional(scale: float, right: Array, close: float) -> str:
    # the size of a full window, relative to this one: there, all micro-batches are as large as the largest one here
    full_window = float(right.max()) * len(right)
    if times := _whole_times(scale, close):
        return f"{times} times too large: gradients of an earlier window were not zeroed, or the loss was multiplied"
    if np.isclose(scale * full_window, 1.0, rtol=close):
        return "the loop divides by the size of a full window, but this window is smaller, so its gradient is too small"
    if scale < 0:
        return f"the sign is flipped: the whole gradient is {scale:.4g} times what it should be"
    if scale < 1:
        return f"the whole gradient is {scale:.4g} times what it should be (under-scaled or clipped)"
    return f"the whole gradient is {scale:.4g} times what it should be"


def _whole_times(scale: float, close: float = _CLOSE) -> int:
    """2, 3, … if the scale is that whole number, else 0; beyond a thousand, nearly every number looks whole."""
    times = round(scale)
    is_told_apart = times * close < 0.1  # rounding may make any number look whole
    return times if 2 <= times <= 1000 and is_told_apart and np.isclose(scale, times, rtol=close) else 0


def _is_clipped(mix: Mix, scale: Array) -> bool:
    """Whether clipping each micro-batch to the same norm turned these scales into the coefficients."""
    if np.any(scale == 0):
        return False
    close = mix.close
    ratio = mix.coefficients / scale
    if not (np.all(ratio <= 1 + close) and np.all(ratio > 0) and np.any(ratio < 1 - close)):
        return False
    norms = np.sqrt(np.diag(mix.gram)) if mix.norms is None else mix.norms
    alike = max(1e-3, 10 * close)
    clipped = ratio < 1 - close
    for size in (norms, norms * scale):  # clipped before or after the scale was applied
        after = size * ratio
        if np.ptp(after[clipped]) < alike * after[clipped].max() and np.all(
            size[~clipped] <= after[clipped].max() * (1 + alike)
        ):
            return True
    # or the running sum was clipped each time, so that early micro-batches were shrunk again and again
    factors = ratio / np.append(ratio[1:], 1.0)
    if np.any(factors > 1 + close) or np.all(factors > 1 - close):
        return False
    sums = [np.where(np.arange(len(ratio)) <= k, ratio / ratio[k] * factors[k] * scale, 0.0) for k in range(len(ratio))]
    sizes = np.array([np.sqrt(part @ mix.gram @ part) for part in sums])[factors < 1 - close]
    return bool(np.ptp(sizes) < (alike if mix.norms is None else 0.05) * sizes.max())


def _is_clipped_after_any_scale(mix: Mix, right: Array) -> bool:
    num = len(right)
    return any(_is_clipped(mix, scale) for scale in (right, np.full(num, 1 / num), np.ones(num)))


def _numbers(coefficients: Array) -> str:
    none = 1e-9 * np.abs(coefficients).max()
    return "(" + ", ".join(f"{0.0 if abs(c) < none else c:.3g}" for c in coefficients) + ")"
