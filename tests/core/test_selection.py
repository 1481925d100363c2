"""The tests that `make test` selects, and its summary."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import covering

ROOT = Path(__file__).parents[2]
SIZES = {"way": 3, "dtype": 4, "is_fed": 2}
COMBINATIONS = [dict(zip(SIZES, each, strict=True)) for each in itertools.product(*map(range, SIZES.values()))]


def groups(combination: dict[str, int], size: int) -> set[tuple[tuple[str, int], ...]]:
    return set(itertools.combinations(combination.items(), size))


@pytest.mark.parametrize(("size", "most"), [(1, 4), (2, 14)])
def test_every_value_or_pair_is_kept_in_a_few_combinations(size: int, most: int) -> None:
    kept = [COMBINATIONS[k] for k in covering(COMBINATIONS, size)]
    wanted = set().union(*(groups(each, size) for each in COMBINATIONS))
    assert set().union(*(groups(each, size) for each in kept)) == wanted
    assert len(kept) <= most < len(COMBINATIONS)


MARKED = """
import pytest

@pytest.mark.slow
def test_slow(): pass

@pytest.mark.each_value
@pytest.mark.parametrize("a", [1, 2, 3])
@pytest.mark.parametrize("b", [1, 2])
def test_some(a, b): pass

def test_quick(): pass
"""


@pytest.mark.parametrize(("options", "num"), [([], 4), (["--all"], 8)])
def test_what_the_markers_leave_out(options: list[str], num: int, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "test_it.py").write_text(MARKED)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert f"{num} passed" in done.stdout, done.stdout + done.stderr


REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="quick" time="0.1"/>
<testcase classname="tests.core.test_step" name="long[1]" time="7.5"><failure message="x"/></testcase>
<testcase classname="tests.a" name="page" time="0"><skipped message="Chromium is not installed"/></testcase>
<testcase classname="tests.a" name="gpu" time="0"><skipped message="no GPU"/></testcase>
</testsuite></testsuites>"""


def test_the_summary_names_the_slowest_and_what_could_be_installed(tmp_path: Path) -> None:
    (tmp_path / "start").touch()
    for name in ("torch", "ranks-0-of-2", "ranks-1-of-2"):
        (tmp_path / f"{name}.xml").write_text(REPORT)
    command = [sys.executable, "-m", "tests.summary", str(tmp_path)]
    done = subprocess.run([*command, "--budget", "720"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "2 passed, 2 failed, 4 skipped"
    assert "2  Chromium is not installed" in done.stdout
    assert "no GPU" not in done.stdout
    assert done.stdout.index("tests.core.test_step::long[1]") < done.stdout.index("tests.a::quick")
    assert ".venv/bin/python -m pytest 'tests/core/test_step.py::long[1]'" in done.stdout
    assert "torchrun --standalone --nproc-per-node 2 -m pytest 'tests/core/test_step.py::long[1]'" in done.stdout
    late = subprocess.run([*command, "--budget", "0.0001"], cwd=ROOT, capture_output=True, text=True)
    assert late.returncode == 1
    assert "more than the budget" in late.stderr
