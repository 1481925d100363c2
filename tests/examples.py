"""The number of examples that hypothesis tries."""

import os

from hypothesis import settings


def examples(num: int) -> int:
    """`num` in the quick run, ten times as many with `--all`, or as many as BIGBATCH_EXAMPLES says."""
    given = os.environ.get("BIGBATCH_EXAMPLES")
    return int(given) if given else max(1, num * settings.default.max_examples // 100)
