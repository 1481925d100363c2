"""Runs the TensorFlow code blocks of README and docs."""

import re
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from bigbatch.tensorflow import Accumulator

DOCS = Path(__file__).parents[2] / "docs"


def test_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = [
        code
        for page in ("tensorflow.md", "checkpoints.md", "../README.md")
        for code in re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)
        if page == "tensorflow.md" or "bigbatch.tensorflow" in code
    ]
    assert blocks
    for code in blocks:
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)])
        before = model.get_weights()
        optimizer = keras.optimizers.SGD(0.1)
        cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        micro_batches = [(np.ones((n, 6), "float32"), np.arange(n) % 4) for n in (5, 5, 5, 5, 3)]

        def loss(model: Any, batch: Any, cross_entropy: Any = cross_entropy) -> Any:
            return cross_entropy(batch[1], model(batch[0]))

        names = {
            "tf": tf,
            "keras": keras,
            "encoder": model,
            "decoder": keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)]),
            "model": model,
            "optimizer": optimizer,
            "micro_batches": micro_batches,
            "dataset": micro_batches,
            "cross_entropy": cross_entropy,
            "accumulator": Accumulator(model, optimizer, loss, 2),
            "Accumulator": Accumulator,
        }
        exec(compile(code, "page", "exec"), names)
        assert names["step"].weight == 3
        assert any(not np.array_equal(a, b) for a, b in zip(model.get_weights(), before, strict=True))
