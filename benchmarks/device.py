"""What is asked of a device that computes on its own: to be done, and how much memory it took."""

import gc
from collections.abc import Callable
from typing import Any

import torch

from .memory import peak_bytes


def wait_for(device: str) -> Callable[[], Any]:
    return torch.cuda.synchronize if device == "cuda" else lambda: None


def peak_of(run: Callable[[], Any], device: str) -> dict[str, int]:
    """The most bytes at one time beside what was there before, with nothing else on the device at that time.

    `reserved` is what the device had to give, the private memory of captured graphs included; `allocated` is
    what of it was in use, as far as torch knows. On a CPU there is only the second.
    """
    gc.collect()
    if device != "cuda":
        return {"allocated": peak_bytes(run)}
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    reserved, allocated = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return {
        "reserved": torch.cuda.max_memory_reserved() - reserved,
        "allocated": torch.cuda.max_memory_allocated() - allocated,
    }


def free(device: str) -> None:
    """Gives back what nobody holds any more."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def reserved(device: str) -> int:
    return torch.cuda.memory_reserved() if device == "cuda" else 0
