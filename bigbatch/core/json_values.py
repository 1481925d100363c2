"""Values that are not finite, in JSON."""

import json
import math
from typing import Any


def to_json(value: Any) -> Any:
    """Replaces NaN and infinities, which JSON does not have, by the strings "nan", "inf" and "-inf"."""
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [to_json(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def json_line(record: dict[str, Any]) -> str:
    """One line of a file of JSON lines."""
    return json.dumps(to_json(record), allow_nan=False) + "\n"


def from_json(value: Any) -> Any:
    """The inverse of `to_json`."""
    if isinstance(value, dict):
        return {key: from_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [from_json(item) for item in value]
    return float(value) if value in ("nan", "inf", "-inf") else value
