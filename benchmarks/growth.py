"""How time and memory grow with the number of micro-batches."""

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any


@dataclass(frozen=True)
class Growth:
    model: str
    way: str
    times: dict[int, list[float]]
    """Seconds per step for each number of micro-batches, one per round."""
    peaks: dict[int, int]
    """Peak bytes for each number of micro-batches: reserved if known, otherwise allocated."""

    @classmethod
    def all_of(cls, part: dict[str, Any]) -> Iterator["Growth"]:
        """Reads the file of the part `linear`, where JSON turned the numbers into strings."""
        for model, found in part.items():
            if isinstance(found, dict):
                for way, times in found["times"].items():
                    peaks = {int(num): max(peak.values()) for num, peak in found["peaks"][way].items()}
                    yield cls(model, way, {int(num): each for num, each in times.items()}, peaks)

    @property
    def seconds(self) -> dict[int, float]:
        return {num: statistics.median(each) for num, each in self.times.items()}

    @property
    def each(self) -> dict[int, float]:
        """Seconds per micro-batch: the time of a step divided by its number of micro-batches."""
        return {num: seconds / num for num, seconds in self.seconds.items()}

    @property
    def further(self) -> dict[int, float]:
        """Seconds per additional micro-batch, which excludes the fixed cost of a step."""
        pairs = pairwise(self.seconds.items())
        return {many: (slow - fast) / (many - few) for (few, fast), (many, slow) in pairs}


def spread(values: Iterable[float]) -> float:
    """How much larger the largest is than the smallest, as a fraction."""
    found = list(values)
    return max(found) / min(found) - 1
