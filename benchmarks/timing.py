"""Times that can be compared: all contestants in one process, taking turns in random order."""

import random
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any


@dataclass(frozen=True)
class Summary:
    """A contestant against the reference: the median time, and the ratios of each round."""

    seconds: float
    ratio: float
    low: float
    """The lower quartile of the ratios."""
    high: float
    """The upper quartile."""


def interleaved(
    functions: dict[str, Callable[[], Any]], rounds: int, warmup: int, wait: Callable[[], Any] = lambda: None
) -> dict[str, list[float]]:
    """The seconds that each function took in each round."""
    turns = Turns(functions, rounds, warmup, wait=wait)
    for _ in turns:
        pass
    return turns.times


@dataclass
class Turns:
    """Runs every function once a round, in an order drawn anew each round; the warm-up rounds are not kept.

    A framework that owns the training loop cannot be called for one window. It can be fed one: `guest` is
    its name and a function that gives the micro-batches of a window, and the framework iterates over this
    object. Between the guest's windows the others have their turns. The guest's time runs from the request
    for its window's first micro-batch to the request after its last.

    `wait` waits until a device is done, before and at the end of every turn.
    """

    functions: dict[str, Callable[[], Any]]
    rounds: int
    warmup: int
    guest: tuple[str, Callable[[], Iterable[Any]]] | None = None
    wait: Callable[[], Any] = lambda: None
    times: dict[str, list[float]] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Any]:
        draw = random.Random(0)
        names = [*self.functions, *([self.guest[0]] if self.guest else [])]
        for number in range(-self.warmup, self.rounds):
            for name in draw.sample(names, len(names)):
                self.wait()
                start = perf_counter()
                if name in self.functions:
                    self.functions[name]()
                elif self.guest:
                    yield from self.guest[1]()
                self.wait()
                seconds = perf_counter() - start
                if number >= 0:
                    self.times.setdefault(name, []).append(seconds)


def several(step: Callable[[], Any], num: int) -> Callable[[], None]:
    """A turn of several steps: training makes one after the other, and the first after another's turn is slower."""

    def steps() -> None:
        for _ in range(num):
            step()

    return steps


def compare(times: dict[str, list[float]], reference: str) -> dict[str, Summary]:
    """Each contestant against the reference, round by round: what slows a whole round cancels out."""
    summaries = {}
    for name, own in times.items():
        ratios = [a / b for a, b in zip(own, times[reference], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        summaries[name] = Summary(statistics.median(own), middle, low, high)
    return summaries
