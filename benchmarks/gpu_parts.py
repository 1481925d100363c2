"""The parts that `benchmarks.gpu` measures. Each function returns the content of its JSON file."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn

from bigbatch.torch import Accumulator

from .comparison import Comparison, Entry
from .contestants import (
    Make,
    accumulator_of,
    bigbatch_batch,
    bigbatch_captured,
    by_accelerate,
    by_hand,
    by_moving,
    by_tutorial,
    compiled,
    full_batch,
    with_compiled_loss,
)
from .device import free, peak_of, reserved, wait_for
from .guests import GUESTS
from .models import GPT, ViT, images, own_loss, texts
from .sizes import BATCH_SIZE, GPT2, GPT2_SMALL, MICRO_BATCH_SIZE, REHEARSAL, SMALL_VIT, TINY, TINY_GPT, Size
from .timing import interleaved, several
from .work import Work, adamw

FULL, FULL_COMPILED = "full batch, eager", "full batch, compiled"
BY_HAND, BY_ACCELERATE = "hand-written loop", "accelerate, `accumulate`"
OURS, CAPTURED = "bigbatch", "bigbatch, `capture=True`"
CAPTURED_COMPILED = "bigbatch, `capture=True`, compiled loss"
CONTESTANTS: dict[str, Make] = {
    FULL: full_batch,
    FULL_COMPILED: compiled(full_batch),
    "tutorial loop, `.item()` every time": by_tutorial,
    BY_HAND: by_hand,
    "hand-written loop, compiled loss": compiled(by_hand),
    BY_ACCELERATE: by_accelerate,
    OURS: bigbatch_batch,
    CAPTURED: bigbatch_captured,
    CAPTURED_COMPILED: compiled(bigbatch_captured),
}
NEED_A_GPU = (CAPTURED, CAPTURED_COMPILED)
NUM_IMAGES, IMAGE_MICRO_BATCH_SIZE = 1024, 64
NUMS_MICRO_BATCHES = (2, 4, 8, 16, 32, 64, 128)
ON_DEVICE, PINNED, PAGEABLE = "on the device", "in pinned host memory", "in pageable host memory"


@dataclass(frozen=True)
class Setting:
    """The device. `is_tiny` runs every line with tiny sizes, to test the code without measuring."""

    device: str
    is_tiny: bool

    def size(self, size: Size) -> Size:
        return REHEARSAL if self.is_tiny else size

    def rounds(self, num: int) -> int:
        return 3 if self.is_tiny else num

    def has(self, name: str) -> bool:
        return self.device == "cuda" or name not in NEED_A_GPU


def made(kind: Callable[[Size], nn.Module], size: Size, device: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(0)
        with torch.device(device):
            return kind(size)

    return make


def gpt_work(size: Size, num_micro_batches: int, device: str) -> Work:
    batch = texts(size, num_micro_batches * MICRO_BATCH_SIZE, device)
    return Work(made(GPT, size, device), own_loss, batch, MICRO_BATCH_SIZE, adamw, device, "bf16")


def gpt(setting: Setting, size: Size, rounds: int, steps: int) -> dict[str, Any]:
    """One batch in 8 micro-batches, for all contestants."""
    work = gpt_work(setting.size(size), BATCH_SIZE // MICRO_BATCH_SIZE, setting.device)
    entries: dict[str, Entry] = {name: (make, work) for name, make in CONTESTANTS.items() if setting.has(name)}
    comparison = Comparison(entries, BY_HAND, setting.rounds(rounds), warmup=3, guests=GUESTS, steps=steps, windows=3)
    return comparison.run().as_json()


def from_host(setting: Setting) -> dict[str, Any]:
    """A batch of images in host memory, compared with the same batch on the device."""
    size = setting.size(SMALL_VIT)
    num, micro = (32, 8) if setting.is_tiny else (NUM_IMAGES, IMAGE_MICRO_BATCH_SIZE)
    on_host = images(size, num)
    places = {ON_DEVICE: tuple(tensor.to(setting.device) for tensor in on_host), PAGEABLE: on_host}
    if setting.device == "cuda":
        places[PINNED] = tuple(tensor.pin_memory() for tensor in on_host)
    base = Work(made(ViT, size, setting.device), own_loss, (), micro, adamw, setting.device, "bf16")
    works = {place: replace(base, batch=batch) for place, batch in places.items()}
    ways: dict[str, Make] = {BY_HAND: by_hand, OURS: bigbatch_batch, CAPTURED: bigbatch_captured}
    entries: dict[str, Entry] = {}
    references = {}
    for (way, make), (place, work) in product(ways.items(), works.items()):
        if setting.has(way):
            is_moved = make is by_hand and place != ON_DEVICE
            name = f"{way}, `.to(device)`, {place}" if is_moved else f"{way}, {place}"
            entries[name] = (by_moving if is_moved else make, work)
            references[name] = f"{way}, {ON_DEVICE}"
    reference = references[f"{BY_HAND}, {ON_DEVICE}"]
    found = Comparison(entries, reference, setting.rounds(8), warmup=3, windows=3).run().as_json()
    num_bytes = sum(tensor.nbytes for tensor in on_host)
    for name, (_, work) in entries.items():
        if work is works[ON_DEVICE] and name in found["peaks"]:  # it was in memory before the peak was measured
            found["peaks"][name] = {kind: peak + num_bytes for kind, peak in found["peaks"][name].items()}
    return found | {"references": references, "batch_bytes": num_bytes}


def linear(setting: Setting) -> dict[str, Any]:
    """Time and peak memory of a step with more and more micro-batches of one size."""
    graphs = (CAPTURED, CAPTURED_COMPILED)
    return {
        GPT2: growing(setting, GPT2_SMALL, (CAPTURED_COMPILED,), rounds=4, passes=8),
        TINY: growing(setting, TINY_GPT, graphs, rounds=12, passes=64),
    }


def growing(setting: Setting, size: Size, names: Sequence[str], rounds: int, passes: int) -> dict[str, Any]:
    """`passes` is the minimum number of micro-batches in a turn, so that no short window is timed alone."""
    nums = NUMS_MICRO_BATCHES[:3] if setting.is_tiny else NUMS_MICRO_BATCHES
    work, wait = gpt_work(setting.size(size), max(nums), setting.device), wait_for(setting.device)
    batches = {num: tuple(tensor[: num * MICRO_BATCH_SIZE] for tensor in work.batch) for num in nums}
    ways: dict[str, Callable[[], Accumulator]] = {
        OURS: lambda: accumulator_of(work.model(), work),
        CAPTURED: lambda: accumulator_of(work.model(), work, capture=True),
        CAPTURED_COMPILED: lambda: accumulator_of(work.model(), with_compiled_loss(work), capture=True),
    }
    ways = {way: ways[way] for way in names if setting.has(way)} or {OURS: ways[OURS]}

    peaks: dict[str, dict[int, Any]] = {way: {} for way in ways}
    functions, steps = {}, {num: max(1, passes // num) for num in nums}
    for way, make in ways.items():
        free(setting.device)
        before = reserved(setting.device)
        accumulator = make()
        several(partial(accumulator.step, batches[nums[0]]), 3)()  # the graphs are recorded by then
        for num in nums:
            free(setting.device)
            held = reserved(setting.device) - before
            found = peak_of(partial(accumulator.step, batches[num]), setting.device)
            peaks[way][num] = {kind: peak + held for kind, peak in found.items()}
            functions[way, num] = several(partial(accumulator.step, batches[num]), steps[num])
    times = interleaved(functions, setting.rounds(rounds), 1, wait)
    per_step = {way: {num: [t / steps[num] for t in times[way, num]] for num in nums} for way in ways}
    return {"times": per_step, "peaks": peaks}


PARTS: dict[str, Callable[[Setting], dict[str, Any]]] = {
    "gpt2": lambda setting: gpt(setting, GPT2_SMALL, rounds=8, steps=1),
    "tiny": lambda setting: gpt(setting, TINY_GPT, rounds=15, steps=3),
    "images": from_host,
    "linear": linear,
}
