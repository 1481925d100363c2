"""Comparable times: all contestants run in one process and take turns in random order."""

import random
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any


@dataclass(frozen=True)
class Summary:
    """A contestant compared with the reference: the median time, and the ratios round by round."""

    seconds: float
    ratio: float
    low: float
    """The lower quartile of the ratios."""
    high: float
    """The upper quartile."""


def interleaved(
    functions: dict[str, Callable[[], Any]], rounds: int, warmup: int, wait: Callable[[], Any] = lambda: None
) -> dict[str, list[float]]:
    """The seconds of each function in each round."""
    turns = Turns(functions, rounds, warmup, wait=wait)
    for _ in turns:
        pass
    return turns.times


@dataclass
class Turns:
    """Runs every function once per round, in a new random order each round. Warm-up rounds are not recorded.

    A framework that owns the training loop cannot be called for one window, but it can be fed one. `guest` is its
    name and a function that returns the micro-batches of a window; the framework iterates over this object. Between
    the guest's windows the others take their turns. The guest's time runs from the request for the first micro-batch
    of its window to the request after the last.

    `wait` waits until the device is done, before each turn and at its end.
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
    """A turn of several steps. The first step after another contestant is slower, and training makes many in a row."""

    def steps() -> None:
        for _ in range(num):
            step()

    return steps


def compare(times: dict[str, list[float]], reference: str) -> dict[str, Summary]:
    """Compares each contestant with the reference, round by round: a slow round affects both and cancels out."""
    summaries = {}
    for name, own in times.items():
        ratios = [a / b for a, b in zip(own, times[reference], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        summaries[name] = Summary(statistics.median(own), middle, low, high)
    return summaries
