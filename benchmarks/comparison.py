"""Compares contestants: checks that they make the same update, then measures their memory, then their time."""

import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import Any

from torch import Tensor, nn

from .contestants import Make
from .device import free, peak_of, wait_for
from .guests import Fit, Stream, windows_of
from .timing import Summary, Turns, compare, interleaved, several
from .work import Work, update_error, update_of

Entry = tuple[Make, Work]


@dataclass
class Found:
    """The measurements, by the name of the contestant."""

    errors: dict[str, float] = field(default_factory=dict)
    """The relative error of the first update, against the reference."""
    peaks: dict[str, dict[str, int]] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=dict)
    """Seconds per step, one number per round."""
    guests: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """The times of each guest and of the reference, from a separate run."""
    missing: dict[str, str] = field(default_factory=dict)
    """Tools that are not installed."""
    failed: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, part: dict[str, Any]) -> "Found":
        """Reads what `as_json` wrote; ignores other entries."""
        return cls(**{one.name: part[one.name] for one in fields(cls) if one.name in part})

    def against(self, reference: str) -> dict[str, Summary]:
        """Compares each contestant with the reference, and each guest with the reference of the guest's own run."""
        of_guests = {name: compare(times, reference)[name] for name, times in self.guests.items()}
        return compare(self.times, reference) | of_guests

    def attempt(self, name: str, job: Callable[[], Any]) -> Any:
        """Runs the job. If it fails, records the error and returns None, so that the others are still measured."""
        if name in self.missing or name in self.failed:
            return None
        try:
            return job()
        except ModuleNotFoundError as error:
            self.missing[name] = str(error)
            print(f"{name} is left out: {error}", file=sys.stderr)
        except Exception as error:
            self.failed[name] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        return None


@dataclass
class Comparison:
    entries: dict[str, Entry]
    reference: str
    """The entry whose first update all others must reproduce, and with which guests take turns."""
    rounds: int
    warmup: int
    guests: dict[str, Fit] = field(default_factory=dict)
    steps: int = 1
    """The steps of one turn."""
    windows: int = 5
    """The windows that are run to measure the peak."""
    has_peaks: bool = True

    def run(self) -> Found:
        found = Found()
        self._check(found)
        if self.has_peaks:
            self._measure_peaks(found)
        found.attempt("times", partial(self._time, found))
        return found

    @property
    def work(self) -> Work:
        return self.entries[self.reference][1]

    def _check(self, found: Found) -> None:
        def once(make: Make, model: nn.Module, work: Work) -> None:
            make(model, work)()

        def once_fed(fit: Fit, model: nn.Module, work: Work) -> None:
            fit(model, work, windows_of(work, 1))

        def check(name: str, step_once: Callable[[nn.Module, Work], None], work: Work, expected: Tensor) -> None:
            found.errors[name] = update_error(update_of(step_once, work), expected, name, work.precision)

        expected = update_of(partial(once, self.entries[self.reference][0]), self.work)
        assert float(expected.abs().max()) > 0, f"{self.reference} made no step"
        for name, (make, work) in self.entries.items():
            found.attempt(name, partial(check, name, partial(once, make), work, expected))
            free(work.device)
        for name, fit in self.guests.items():
            found.attempt(name, partial(check, name, partial(once_fed, fit), self.work, expected))
            free(self.work.device)

    def _measure_peaks(self, found: Found) -> None:
        def train(make: Make, work: Work) -> None:
            several(make(work.model(), work), self.windows)()

        def feed(fit: Fit, work: Work) -> None:
            fit(work.model(), work, windows_of(work, self.windows))

        runs = {name: partial(train, make, work) for name, (make, work) in self.entries.items()}
        runs |= {name: partial(feed, fit, self.work) for name, fit in self.guests.items()}
        for name, run in runs.items():
            if peak := found.attempt(name, partial(peak_of, run, self.work.device)):
                found.peaks[name] = peak
            free(self.work.device)

    def _time(self, found: Found) -> None:
        wait = wait_for(self.work.device)
        functions = {}
        for name, (make, work) in self.entries.items():
            if step := found.attempt(name, partial(lambda make, work: make(work.model(), work), make, work)):
                functions[name] = several(step, self.steps)
        times = interleaved(functions, self.rounds, self.warmup, wait)
        found.times = self._per_step({name: times[name] for name in functions})
        functions = {self.reference: functions[self.reference]}
        free(self.work.device)
        for name, fit in self.guests.items():
            turns = Turns(functions, self.rounds, self.warmup, (name, self._turn), wait)
            num = (self.rounds + self.warmup) * self.steps * self.work.num_micro_batches
            found.attempt(name, partial(fit, self.work.model(), self.work, Stream(turns, num)))
            if name not in found.failed and name not in found.missing:
                found.guests[name] = self._per_step(turns.times)
            free(self.work.device)

    def _turn(self) -> Any:
        """The micro-batches of one turn of a guest."""
        for _ in range(self.steps):
            yield from self.work.micro_batches()

    def _per_step(self, times: dict[str, list[float]]) -> dict[str, list[float]]:
        return {name: [seconds / self.steps for seconds in each] for name, each in times.items()}
