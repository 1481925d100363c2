"""Signals that ask a run to end: Ctrl-C, what a system sends before it kills, and a queue's warning."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from ..errors import code_of_signal

SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)
]  # Windows has only the first two


class Interruption:
    """While training: the first signal asks the run to save and end, the same on all ranks; a second ends it at once.

    `tell` is called with the first, `leave` before the second ends the process.
    """

    def __init__(self, tell: Callable[[], None], leave: Callable[[], None]) -> None:
        self._tell, self._leave = tell, leave
        self._asked: int | None = None
        self.is_agreed = False
        self._before: dict[int, Any] = {}

    @property
    def is_asked(self) -> bool:
        return self._asked is not None

    @property
    def code(self) -> int:
        """With which the process ends."""
        return code_of_signal(signal.SIGTERM if self._asked is None else self._asked)

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():  # no other may
            self._before = {number: signal.signal(number, self._ask) for number in SIGNALS}
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.is_asked:
            try:
                self._leave()
            finally:
                os._exit(code_of_signal(number))
        self._asked = number
        self._tell()

    def __exit__(self, *_: Any) -> None:
        if self.is_asked or not self.is_agreed:  # else only another rank was asked so far, and this one will be
            for number, before in self._before.items():
                signal.signal(number, before)
