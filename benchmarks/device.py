"""Waiting for a device, and measuring its memory."""

import gc
from collections.abc import Callable
from typing import Any

import torch

from .memory import peak_bytes


def wait_for(device: str) -> Callable[[], Any]:
    return torch.cuda.synchronize if device == "cuda" else lambda: None


def peak_of(run: Callable[[], Any], device: str) -> dict[str, int]:
    """The peak memory in bytes while this runs, minus the memory in use before.

    `reserved` is what torch took from the device, including the private memory of CUDA graphs. `allocated` is the part
    of it that tensors used. On a CPU there is only `allocated`.
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
    """Frees memory that is no longer referenced."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def reserved(device: str) -> int:
    return torch.cuda.memory_reserved() if device == "cuda" else 0
