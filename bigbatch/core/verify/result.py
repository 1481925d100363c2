"""How far apart two gradients are, and the verdict."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from .trial import Array, Gradient

# A parameter's error is relative to its own gradient, but to no less than this part of the whole gradient:
# where the true gradient is zero (a bias in front of a BatchNorm) only rounding would be left to divide by.
_FLOOR = 1e-4
_NUM_SHOWN = 10
_MAX_LENGTH = 1000
"""Of a sentence: one that names every layer of a large model would fill screens."""


@dataclass(frozen=True)
class Verification:
    """The result of comparing accumulation with the full batch.

    It prints as a table of the largest errors, on one screen however large the model is; `errors` and `causes` have
    everything.
    """

    is_exact: bool
    max_error: float
    errors: Mapping[str, float]
    """Relative error by parameter."""
    causes: tuple[str, ...] = ()
    """Sentences that say why they differ, or what was changed to compare them."""
    tolerance: float = 1e-9
    total_error: float = 0.0
    """Relative error of the whole gradient."""
    precision: str = ""
    """The dtype in which they were compared, if it is known."""

    def __bool__(self) -> bool:
        return self.is_exact

    def __str__(self) -> str:
        ordered = sorted(self.errors.items(), key=lambda item: -_size(item[1]))
        shown, rest = ordered[:_NUM_SHOWN], ordered[_NUM_SHOWN:]
        width = max([len("parameter"), *(len(name) for name, _ in shown)])
        verdict = "exact" if self.is_exact else "NOT exact"
        return "\n".join(
            [
                f"{'parameter':{width}}  relative error",
                f"{'-' * width}  --------------",
                *(f"{name:{width}}  {error:14.1e}" for name, error in shown),
                *([f"and {len(rest)} more with an error of at most {rest[0][1]:.1e}"] if rest else []),
                f"{verdict}: largest error of a parameter {self.max_error:.1e}, of the whole gradient "
                f"{self.total_error:.1e}; up to {self.tolerance:.0e} is allowed"
                f"{f' in {self.precision}' if self.precision else ''}",
                *(f"- {cause if len(cause) <= _MAX_LENGTH else f'{cause[:_MAX_LENGTH]} …'}" for cause in self.causes),
            ]
        )


def judge(errors: Mapping[str, float], causes: list[str], tolerance: float, total_error: float = 0.0) -> Verification:
    """The verdict on errors by parameter."""
    largest = max(errors.values(), default=0.0, key=_size)
    return Verification(largest <= tolerance, largest, dict(errors), tuple(causes), tolerance, total_error)


def _size(error: float) -> float:
    """An error to compare with others: none is larger than NaN."""
    return math.inf if math.isnan(error) else error


def errors_of(full: Gradient, other: Gradient, floor: float = _FLOOR) -> dict[str, float]:
    """The relative error of each parameter's gradient; one that is missing on one side counts as zero there."""
    norms = {name: float(np.linalg.norm(g)) for name, g in full.items()}
    total = float(np.linalg.norm(list(norms.values())))
    distances = _distances(full, other)
    return {name: _relative_error(each, norms.get(name, 0.0), total, floor) for name, each in distances.items()}


def total_error_of(full: Gradient, other: Gradient) -> float:
    """The relative error of the whole gradient."""
    norm = float(np.linalg.norm([np.linalg.norm(g) for g in full.values()]))
    return _relative_error(float(np.linalg.norm(list(_distances(full, other).values()))), norm, norm)


def _distances(full: Gradient, other: Gradient) -> dict[str, float]:
    """How far apart the gradients of each parameter are."""

    def of(gradient: Gradient, name: str) -> Array:
        return np.asarray(gradient.get(name, 0.0))

    return {name: float(np.linalg.norm(of(other, name) - of(full, name))) for name in {**full, **other}}


def _relative_error(distance: float, norm: float, total_norm: float, floor: float = _FLOOR) -> float:
    """The distance of two gradients of one parameter, relative to the true one's norm."""
    if distance == 0.0:
        return 0.0
    scale = max(norm, floor * total_norm)
    return distance / scale if scale else float("inf")


def tolerance_for(epsilon: float, num_samples: int, num_micro_batches: int) -> float:
    """The relative error that rounding may cause, in a dtype with this epsilon, for this many samples and parts.

    Rounding errors of sums grow at most like the root of the number of additions, in practice more slowly; 100 leaves
    room for the depth of a model. In bfloat16 and float16 that would allow anything, so there it is 2e-2.
    """
    additions = math.sqrt(math.sqrt(num_samples * num_micro_batches))
    return min(2e-2, max(1e-9, 100 * epsilon * additions))


def floor_for(epsilon: float) -> float:
    """The smallest norm, relative to the whole gradient's, that is more than rounding: `_FLOOR` in float64."""
    return _FLOOR if epsilon < 1e-10 else 1e-2
