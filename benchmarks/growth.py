"""How time and memory grow with the number of micro-batches, from what was measured."""

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
    """Seconds per step for each number of micro-batches, a number for each round."""
    peaks: dict[int, int]
    """Bytes for each number of micro-batches: reserved, or where that is not known, allocated."""

    @classmethod
    def all_of(cls, part: dict[str, Any]) -> Iterator["Growth"]:
        """As the part `linear` was written to a file, where numbers became strings."""
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
        """Seconds per micro-batch: of a step, divided by how many it has."""
        return {num: seconds / num for num, seconds in self.seconds.items()}

    @property
    def further(self) -> dict[int, float]:
        """Seconds per further micro-batch, of which a step's fixed cost is no part."""
        pairs = pairwise(self.seconds.items())
        return {many: (slow - fast) / (many - few) for (few, fast), (many, slow) in pairs}


def spread(values: Iterable[float]) -> float:
    """How much more the largest is than the smallest, as a fraction."""
    found = list(values)
    return max(found) / min(found) - 1
