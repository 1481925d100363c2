"""Signals that ask a run to end: Ctrl-C, SIGTERM, a terminal that closes, and the warning that a job queue sends."""

import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

from ..errors import BY_SIGNAL

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Interruption:
    """While training: the first signal asks the run to save and end, on all ranks. A second one ends it at once.

    `on_first` is called at the first signal, `on_second` at the second, before the process ends.
    """

    def __init__(self, on_first: Callable[[], None], on_second: Callable[[], None]) -> None:
        self._on_first, self._on_second = on_first, on_second
        self._asked: int | None = None
        self.is_agreed = False
        """Whether all ranks know that the run ends."""
        self._before: dict[int, Any] = {}

    @property
    def is_asked(self) -> bool:
        """Whether this process got a signal."""
        return self._asked is not None

    @property
    def code(self) -> int:
        """The exit code of the process."""
        return BY_SIGNAL + (signal.SIGTERM if self._asked is None else self._asked)

    def __enter__(self) -> "Interruption":
        wanted = [number for number in _SIGNALS if number != signal.SIGHUP or not _is_under_nohup()]
        self._before = {number: signal.signal(number, self._handle) for number in wanted}
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.is_asked:
            try:
                self._on_second()
            finally:
                os._exit(BY_SIGNAL + number)
        self._asked = number
        self._on_first()

    def __exit__(self, *_: Any) -> None:
        if self.is_asked or not self.is_agreed:  # otherwise another rank got the signal, and this one still will
            for number, before in self._before.items():
                signal.signal(number, before)


def _is_under_nohup() -> bool:
    """Whether the run was started with nohup, to continue after its terminal is closed."""
    return signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
