"""The peak memory of a process."""

import re
import resource
import sys
from contextlib import suppress
from pathlib import Path


class HostPeak:
    """The peak of the resident memory since this was created, minus what was in use then."""

    def __init__(self) -> None:
        self._start = _resident("VmRSS")
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # Linux measures the peak anew
        self._before = _resident("VmHWM")

    def num_bytes(self) -> int | None:
        """What was added; None if that is not known, because the peak was earlier."""
        peak = _resident("VmHWM")
        if peak is None or self._start is None or self._before is None:
            return None
        return peak - self._start if peak > self._before or self._before <= self._start else None


def _resident(name: str) -> int | None:
    """The bytes in a line of Linux's /proc/self/status; the peak on other systems."""
    try:
        found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return int(found[1]) * 1024 if found else None
