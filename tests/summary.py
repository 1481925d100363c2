"""Sums up a run of `make test`: time by suite, the slowest tests, avoidable skips, and commands to repeat failures.

python -m tests.summary build/tests --budget 720
"""

import argparse
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

AVOIDABLE = ("not installed", "could not import")
"""Words in the reason for a skip that an installation would have avoided."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="holds a JUnit file for each suite, and a file `start`")
    parser.add_argument("--budget", type=float, help="fail if the run took more seconds than this")
    given = parser.parse_args()
    seconds = time.time() - (given.folder / "start").stat().st_mtime
    suites = {path.stem: list(ElementTree.parse(path).iter("testcase")) for path in sorted(given.folder.glob("*.xml"))}
    cases = [case for name, found in suites.items() if not name.startswith(OTHER_RANKS) for case in found]
    print("\nsuite                 tests  seconds")
    for name, found in suites.items():
        print(f"{name:20} {len(found):6} {sum(map(duration, found)):8.0f}")
    print("\nthe ten slowest tests")
    for case in sorted(cases, key=duration, reverse=True)[:10]:
        print(f"{duration(case):8.1f} s  {case.get('classname')}::{case.get('name')}")
    if avoidable := skips(cases):
        print("\nskipped because something is not installed")
        for reason, num in avoidable.most_common():
            print(f"{num:8}  {reason}")
    # a test that fails on several ranks is one command
    failed = list(dict.fromkeys(rerun(name, case) for name in suites for case in suites[name] if has_failed(case)))
    if failed:
        print("\nfailed; to repeat")
        print("\n".join(f"  {command}" for command in failed))
    skipped = sum(case.find("skipped") is not None for case in cases)
    print(f"\ntotal: {int(seconds) // 60} min {seconds % 60:.0f} s")
    print(f"{len(cases) - len(failed) - skipped} passed, {len(failed)} failed, {skipped} skipped")
    if given.budget and seconds > given.budget:
        print(f"that is more than the budget of {given.budget / 60:.0f} minutes", file=sys.stderr)
        return 1
    return 0


OTHER_RANKS = tuple(f"ranks-{rank}" for rank in range(1, 10))
"""All ranks run the same tests, so only those of rank 0 are counted."""


def has_failed(case: ElementTree.Element) -> bool:
    return case.find("failure") is not None or case.find("error") is not None


def rerun(suite: str, case: ElementTree.Element) -> str:
    """The command that runs this test alone."""
    parts = case.get("classname", "").split(".")
    length = next((k for k in range(len(parts), 0, -1) if Path(*parts[:k]).with_suffix(".py").exists()), len(parts))
    test = "::".join([f"{'/'.join(parts[:length])}.py", *parts[length:], case.get("name", "")])
    start = ".venv/bin/python"
    if suite.startswith("keras-"):
        start = f"KERAS_BACKEND={suite.removeprefix('keras-')} {start}"
    if suite.startswith("ranks-"):
        start = f".venv/bin/torchrun --standalone --nproc-per-node {suite.rpartition('-')[2]}"
    return f"{start} -m pytest '{test}'"


def duration(case: ElementTree.Element) -> float:
    return float(case.get("time", 0))


def skips(cases: list[ElementTree.Element]) -> Counter[str]:
    """Counts by reason the skips that an installation would have avoided."""
    found = [case.find("skipped") for case in cases]
    reasons = [skipped.get("message", "") for skipped in found if skipped is not None]
    return Counter(reason for reason in reasons if any(word in reason for word in AVOIDABLE))


if __name__ == "__main__":
    sys.exit(main())
