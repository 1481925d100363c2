"""Work on a CUDA device, recorded once and launched as a whole; or the line that stands in the way."""

import functools
import gc
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ...core.errors import BigBatchError, CaptureError
from ..internals import end_pool

REMEDY = 'keep the host out of the loss, or pass capture="auto" to go on without where it has to be'
NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))


def record(work: Callable[[], None], device: torch.device, pool: Any) -> torch.cuda.CUDAGraph:
    """What `work` would launch, as a graph. Nothing is run. Memory that it needs in between comes from the pool."""
    graph = torch.cuda.CUDAGraph()
    generator = torch.cuda.default_generators[device.index]
    before = generator.clone_state()
    gc.collect()  # a graph that is freed while another is recorded would spoil it
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()  # what eager passes took is wanted for the pool
    with torch.cuda.stream(_stream(device)):
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            work()
            graph.capture_end()
        except Exception as error:
            _abandon(graph, generator, before, device, pool)
            if isinstance(error, BigBatchError | torch.cuda.OutOfMemoryError):
                raise
            raise refusal(error) from error
    return graph


def _abandon(graph: Any, generator: Any, before: Any, device: torch.device, pool: Any) -> None:
    """Torch leaves its allocator and its random numbers in the middle of a recording that failed."""
    try:
        graph.capture_end()
    except RuntimeError:
        end_pool(device, pool)
        generator.graphsafe_set_state(before)


@functools.cache
def _stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)


@contextmanager
def rehearsed() -> Iterator[None]:
    """Inside, what a pass does that ran without an error before is done again: an error is one of capturing it."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, BigBatchError | torch.cuda.OutOfMemoryError):
            raise
        raise refusal(error) from error


@contextmanager
def no_waiting() -> Iterator[None]:
    """Inside, whatever makes the host wait for the device is an error: it could not be recorded."""
    before = torch.cuda.get_sync_debug_mode()
    _set_sync_debug_mode("error")
    try:
        yield
    finally:
        _set_sync_debug_mode(before)


def _set_sync_debug_mode(mode: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that not every wait is found
        torch.cuda.set_sync_debug_mode(mode)


def refusal(error: Exception) -> CaptureError:
    is_waiting = "synchronizing" in str(error)
    what = "the host waits for the device, which" if is_waiting else "the pass"
    return CaptureError(f"{what} cannot be captured as a CUDA graph: {line_of(error)}: {REMEDY}")


def line_of(error: BaseException) -> str:
    """The innermost line of the user's that the error went through, and what it was."""
    frames = traceback.extract_tb(error.__traceback__)
    of_user = [frame for frame in frames if not frame.filename.startswith(NOT_THE_USERS)]
    message = (str(error).splitlines() or [""])[0]
    if not of_user:
        return message
    return f"{of_user[-1].filename}:{of_user[-1].lineno} ({of_user[-1].line}): {message}"
