"""The memory that a stretch of work adds at its peak."""

import re
import resource
import sys
from contextlib import suppress
from pathlib import Path

STATUS = Path("/proc/self/status")
RESET = Path("/proc/self/clear_refs")


class HostPeak:
    """The largest resident set since `__init__`, less what there was then."""

    def __init__(self) -> None:
        self._start = resident("VmRSS")
        with suppress(OSError):
            RESET.write_text("5")  # Linux counts the peak anew
        self._before = resident("VmHWM")

    def num_bytes(self) -> int | None:
        """What was added; None where nothing can be told, since the peak was before."""
        peak = resident("VmHWM")
        if peak is None or self._start is None or self._before is None:
            return None
        return peak - self._start if peak > self._before or self._before <= self._start else None


def resident(name: str) -> int | None:
    """Bytes of a line of Linux's /proc; elsewhere the one number that there is."""
    try:
        found = re.search(rf"^{name}:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE)
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return int(found[1]) * 1024 if found else None
