"""How far apart two gradients are, and the verdict."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

# A parameter's error is relative to its own gradient, but to no less than this part of the whole gradient:
# where the true gradient is zero (a bias in front of a BatchNorm) only rounding would be left to divide by.
FLOOR = 1e-4


@dataclass(frozen=True)
class Verification:
    """Full batch against accumulation. Printed, it is a table, the largest error first."""

    is_exact: bool
    max_error: float
    errors: Mapping[str, float]
    """Relative error by parameter."""
    causes: tuple[str, ...] = ()
    """Why they differ, or what was done so that they could be compared, in sentences."""
    tolerance: float = 1e-9
    total_error: float = 0.0
    """Relative error of the whole gradient."""

    def __bool__(self) -> bool:
        return self.is_exact

    def __str__(self) -> str:
        width = max([len("parameter"), *map(len, self.errors)])
        ordered = sorted(self.errors.items(), key=lambda item: -item[1])
        verdict = "exact" if self.is_exact else "NOT exact"
        return "\n".join(
            [
                f"{'parameter':{width}}  relative error",
                f"{'-' * width}  --------------",
                *(f"{name:{width}}  {error:14.1e}" for name, error in ordered),
                f"{verdict}: the largest error is {self.max_error:.1e}, of the whole gradient {self.total_error:.1e}, "
                f"allowed is {self.tolerance:.0e}",
                *(f"- {cause}" for cause in self.causes),
            ]
        )


def judge(errors: Mapping[str, float], causes: list[str], tolerance: float, total_error: float = 0.0) -> Verification:
    """The verdict over errors by parameter."""
    largest = max(errors.values(), default=0.0, key=lambda error: math.inf if math.isnan(error) else error)
    return Verification(largest <= tolerance, largest, dict(errors), tuple(causes), tolerance, total_error)


def relative_error(distance: float, norm: float, total_norm: float) -> float:
    """The distance of two gradients of one parameter, relative to the true one's norm."""
    if distance == 0.0:
        return 0.0
    scale = max(norm, FLOOR * total_norm)
    return distance / scale if scale else float("inf")
