"""When the next checkpoint is due: by steps, or by time."""

import re
import reprlib
import time

from ..errors import OptionError

_UNITS = {"s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0}


class Every:
    """When the next checkpoint is due: `100` steps, or `"10min"` (also s and h) after the last one."""

    def __init__(self, every: int | str | None) -> None:
        self.num_steps, self.seconds = _parsed(every)
        self._last_step = 0
        self._last_time = time.monotonic()

    def is_due(self, step: int) -> bool:
        if self.num_steps is not None:
            return step - self._last_step >= self.num_steps
        return self.seconds is not None and time.monotonic() - self._last_time >= self.seconds

    def saved(self, step: int) -> None:
        self._last_step, self._last_time = step, time.monotonic()


def _parsed(every: int | str | None) -> tuple[int | None, float | None]:
    """The number of steps, or of seconds."""
    if every is None:
        return None, None
    found = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]+)?)\s*([a-z]*)\s*", str(every))
    if found is not None and not isinstance(every, bool):
        number, unit = found[1], found[2]
        if not unit and number.isdigit() and int(number) > 0:
            return int(number), None
        if unit in _UNITS and float(number) > 0:
            return None, float(number) * _UNITS[unit]
    raise OptionError(f"cannot read {reprlib.repr(every)} as an interval: pass steps (100) or a time (10min)")
