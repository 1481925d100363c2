"""What docs/tensorflow.md shows is run as it stands there."""

import re
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from bigbatch.tensorflow import Accumulator

PAGE = Path(__file__).parents[2] / "docs" / "tensorflow.md"


def test_code_of_the_page_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for code in blocks:
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)])
        before = model.get_weights()
        names = {
            "tf": tf,
            "model": model,
            "optimizer": keras.optimizers.SGD(0.1),
            "micro_batches": [(np.ones((n, 6), "float32"), np.arange(n) % 4) for n in (5, 5, 5, 5, 3)],
            "cross_entropy": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "Accumulator": Accumulator,
        }
        exec(compile(code, "page", "exec"), names)
        assert names["step"].weight == 3
        assert any(not np.array_equal(a, b) for a, b in zip(model.get_weights(), before, strict=True))
