"""Goals for one H200, and what was reached."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .comparison import Found
from .gpu_parts import (
    BY_ACCELERATE,
    BY_HAND,
    CAPTURED,
    CAPTURED_COMPILED,
    FULL,
    FULL_COMPILED,
    ON_DEVICE,
    OURS,
    PINNED,
)
from .growth import Growth, spread
from .guests import LIGHTNING
from .sizes import GPT2, TINY
from .timing import compare


@dataclass(frozen=True)
class Goal:
    what: str
    wanted: float
    reached: float
    is_least: bool = False
    """Whether a larger value is better."""
    form: str = "{:.2f}×"

    @property
    def row(self) -> tuple[str, str, str, str]:
        is_met = self.reached >= self.wanted if self.is_least else self.reached <= self.wanted
        wanted = f"{'≥' if self.is_least else '≤'} {self.form.format(self.wanted)}"
        return self.what, wanted, self.form.format(self.reached), "yes" if is_met else "no"


def goals(parts: dict[str, dict[str, Any]]) -> Iterator[Goal]:
    """The goals for which there are measurements."""
    if "gpt2" in parts:
        found = Found.of(parts["gpt2"])
        if CAPTURED_COMPILED in found.times:
            best = f"{GPT2}, captured and compiled"
            yield Goal(f"{best}: time of the eager full batch", 0.80, ratio(found, CAPTURED_COMPILED, FULL))
            yield Goal(f"{best}: time of the compiled full batch", 1.15, ratio(found, CAPTURED_COMPILED, FULL_COMPILED))
            peaks = found.peaks[CAPTURED_COMPILED]["reserved"] / found.peaks[FULL]["reserved"]
            yield Goal(f"{best}: reserved memory of the eager full batch", 1 / 6, peaks, form="{:.3f}×")
            yield from faster(best, found, 1.45)
            yield Goal(f"{GPT2}, captured: time of the eager full batch", 1.12, ratio(found, CAPTURED, FULL))
    if "tiny" in parts:
        found = Found.of(parts["tiny"])
        if CAPTURED_COMPILED in found.times:
            best = f"{TINY}, captured and compiled"
            yield Goal(f"{best}: time of the eager full batch", 0.55, ratio(found, CAPTURED_COMPILED, FULL))
            yield from faster(best, found, 15)
            yield Goal(f"{TINY}, captured: time of the eager full batch", 0.85, ratio(found, CAPTURED, FULL))
    if "images" in parts:
        found = Found.of(parts["images"])
        for way in (OURS, CAPTURED):
            if f"{way}, {PINNED}" in found.times:
                reached = ratio(found, f"{way}, {PINNED}", f"{way}, {ON_DEVICE}")
                yield Goal(f"images {PINNED}, {way}: time with the batch {ON_DEVICE}", 1.03, reached, form="{:.3f}×")
    for growth in Growth.all_of(parts.get("linear", {})):
        if growth.way == OURS:
            continue
        name = f"{growth.model}, {growth.way}, {min(growth.times)} to {max(growth.times)} micro-batches"
        spreads = {
            "time per further micro-batch": (growth.further, 0.03),
            "time per micro-batch, the update included": (growth.each, 0.03),
            "peak memory": (growth.peaks, 0.01),
        }
        for what, (values, wanted) in spreads.items():
            yield Goal(f"{name}: spread of the {what}", wanted, spread(values.values()), form="{:.1%}")


def ratio(found: Found, name: str, reference: str) -> float:
    return compare(found.times, reference)[name].ratio


def faster(name: str, found: Found, wanted: float) -> Iterator[Goal]:
    """How much slower the other tools are. Lightning's ratio goes by way of the hand-written loop."""
    by_hand = found.against(BY_HAND)
    for peer in (BY_ACCELERATE, LIGHTNING):
        if peer in by_hand:
            reached = by_hand[peer].ratio / by_hand[CAPTURED_COMPILED].ratio
            yield Goal(f"{name}: faster than {peer.partition(',')[0]}", wanted, reached, is_least=True)
