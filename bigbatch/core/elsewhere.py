"""Names that people look for in a module that does not have them, and where they are."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

_TOP = __name__.partition(".")[0]


def elsewhere(module: str, remedies: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns a `__getattr__` for a module, which says what to import instead of a name that it does not have.

    It raises ImportError: for an AttributeError, `from bigbatch import Accumulator` would show Python's own message.

    Args:
        module: The name of the module.
        remedies: What to do, by the name that was looked for. Public names of `bigbatch` itself are known.
    """

    def missing(name: str) -> Any:
        if name in remedies:
            raise ImportError(f"{module} has no {name}: {remedies[name]}")
        if not name.startswith("_") and name in sys.modules[_TOP].__all__:
            raise ImportError(f"{module} has no {name}: import it from {_TOP}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return missing
