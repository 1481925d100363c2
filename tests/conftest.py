"""Two sizes of the tests: the quick ones by default, everything with `--all`.

Three markers say what the quick run leaves out:

    @pytest.mark.slow          the whole test; a quicker one proves the same on a smaller case
    @pytest.mark.each_value    all but a few combinations of its parameters: every value of each stays
    @pytest.mark.pairwise      likewise, but every pair of values of two parameters stays

The quick run is always a part of the full one.
"""

import gc
import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence

import pytest
from hypothesis import settings

settings.register_profile("fast", max_examples=100)
settings.register_profile("thorough", max_examples=1000)
MARKERS = ("each_value", "pairwise")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the slow tests and every combination of parameters too")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("thorough" if config.getoption("--all") else "fast")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--all") or config.getoption("-m") or asks_for_one(config):
        return
    left_out = {item for item in items if item.get_closest_marker("slow")}
    for marker, size in zip(MARKERS, (1, 2), strict=True):
        for combinations in by_function(items, marker).values():
            kept = covering([values(item) for item in combinations], size)
            left_out.update(item for k, item in enumerate(combinations) if k not in kept)
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    """Keeps the garbage collector from looking at what was imported again and again: up to a quarter of the time."""
    gc.collect()
    gc.freeze()


def asks_for_one(config: pytest.Config) -> bool:
    """Whether single tests are named on the command line: those run whatever their markers."""
    return any("::" in argument for argument in config.args)


def by_function(items: Iterable[pytest.Item], marker: str) -> dict[object, list[pytest.Item]]:
    found: dict[object, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker(marker):
            found[item.path, item.parent, getattr(item, "originalname", None)].append(item)
    return found


def values(item: pytest.Item) -> dict[str, Hashable]:
    """The value of each parameter; those that cannot be compared are told apart as objects."""
    callspec = getattr(item, "callspec", None)
    if callspec is None:
        raise pytest.UsageError(f"{item.nodeid} has no parameters to leave out combinations of")
    return {
        name: value if isinstance(value, bool | int | str | tuple) else id(value)
        for name, value in callspec.params.items()
    }


def covering(combinations: Sequence[dict[str, Hashable]], size: int) -> set[int]:
    """A few combinations in which each group of `size` values that occurs in any of them occurs; found greedily.

    >>> sorted(covering([{"a": a, "b": b} for a in range(3) for b in range(2)], 1))
    [0, 3, 4]
    """
    groups = [set(itertools.combinations(each.items(), min(size, len(each)))) for each in combinations]
    missing = set().union(*groups) if groups else set()
    kept: set[int] = set()
    while missing:
        best = max(range(len(groups)), key=lambda k: len(groups[k] & missing))
        kept.add(best)
        missing -= groups[best]
    return kept
