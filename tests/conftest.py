"""Runs the quick tests by default, and all tests with `--all`.

Three markers say what the quick run leaves out:

    @pytest.mark.slow          leaves out the test; a quicker one proves the same on a smaller case
    @pytest.mark.each_value    runs a few combinations of the parameters, in which every value occurs
    @pytest.mark.pairwise      runs a few combinations, in which every pair of values occurs

The quick run is always a subset of the full one.
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
    """Exempts imported objects from garbage collection, which otherwise takes up to a quarter of the time."""
    gc.collect()
    gc.freeze()


def asks_for_one(config: pytest.Config) -> bool:
    """Whether the command line names single tests; these run whatever their markers are."""
    return any("::" in argument for argument in config.args)


def by_function(items: Iterable[pytest.Item], marker: str) -> dict[object, list[pytest.Item]]:
    found: dict[object, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker(marker):
            found[item.path, item.parent, getattr(item, "originalname", None)].append(item)
    return found


def values(item: pytest.Item) -> dict[str, Hashable]:
    """The value of each parameter; if values cannot be compared, their ids are."""
    callspec = getattr(item, "callspec", None)
    if callspec is None:
        raise pytest.UsageError(f"{item.nodeid} has no parameters to leave out combinations of")
    return {
        name: value if isinstance(value, bool | int | str | tuple) else id(value)
        for name, value in callspec.params.items()
    }


def covering(combinations: Sequence[dict[str, Hashable]], size: int) -> set[int]:
    """Returns the numbers of a few combinations that cover every group of `size` values; picks them greedily.

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
