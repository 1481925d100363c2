"""Runs the code blocks about Keras in docs/keras.md and the README."""

import re
from pathlib import Path

import keras
import numpy as np
import pytest

from .cases import images, mlp

ROOT = Path(__file__).parents[2]
BLOCKS = [
    code
    for page in (ROOT / "docs" / "keras.md", ROOT / "README.md")
    for code in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    if page.name == "keras.md" or "bigbatch.keras" in code
]


@pytest.mark.parametrize("code", BLOCKS, ids=range(len(BLOCKS)))
def test_code_of_the_page_runs(code: str) -> None:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([mlp(), keras.layers.Softmax()])
    before = model.get_weights()
    exec(compile(code, "page", "exec"), {"model": model, **images()()})
    assert not any(np.array_equal(a, b) for a, b in zip(model.get_weights(), before, strict=True))


def test_there_is_code() -> None:
    assert len(BLOCKS) >= 2
