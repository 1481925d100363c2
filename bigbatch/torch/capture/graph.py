"""Records work on a CUDA device as a graph, which is launched as a whole; or names the line that prevents it."""

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

_REMEDY = 'keep the host out of the loss, or pass capture="auto" to continue without capture where it has to be'
_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))


def record(work: Callable[[], None], device: torch.device, pool: Any) -> torch.cuda.CUDAGraph:
    """Returns what `work` launches, as a graph. Nothing is run. Temporary memory comes from the pool."""
    graph = torch.cuda.CUDAGraph()
    generator = torch.cuda.default_generators[device.index]
    before = generator.clone_state()
    gc.collect()  # a graph that is freed while another is recorded would spoil it
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()  # memory that eager passes have cached is wanted for the pool
    with capture_errors(Exception), torch.cuda.stream(_stream(device)):
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            work()
            graph.capture_end()
        except Exception:  # torch leaves its allocator and its random numbers in the middle of the recording
            try:
                graph.capture_end()
            except RuntimeError:
                end_pool(device, pool)
                generator.graphsafe_set_state(before)
            raise
    return graph


@functools.cache
def _stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)


@contextmanager
def capture_errors(kind: type[Exception] = RuntimeError) -> Iterator[None]:
    """Inside, code runs again that ran without an error before: an error becomes a CaptureError with its line."""
    try:
        yield
    except kind as error:
        if isinstance(error, BigBatchError | torch.cuda.OutOfMemoryError):
            raise
        what = "the host waits for the device, which" if "synchronizing" in str(error) else "the pass"
        where = _described(error)
        raise CaptureError(f"{what} cannot be captured as a CUDA graph: {where}: {_REMEDY}") from error


def _described(error: BaseException) -> str:
    """The innermost line of the user's code that the error came through, and its message."""
    frames = traceback.extract_tb(error.__traceback__)
    of_user = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_USERS)]
    message = (str(error).splitlines() or [""])[0]
    if not of_user:
        return message
    return f"{of_user[-1].filename}:{of_user[-1].lineno} ({of_user[-1].line}): {message}"


@contextmanager
def no_waiting() -> Iterator[None]:
    """Inside, it is an error if the host waits for the device, since that cannot be recorded."""
    before = torch.cuda.get_sync_debug_mode()
    _set_sync_debug_mode("error")
    try:
        yield
    finally:
        _set_sync_debug_mode(before)


def _set_sync_debug_mode(mode: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it does not find every wait
        torch.cuda.set_sync_debug_mode(mode)
