"""Features of the tensorflow backend only: sparse and ragged inputs, traces, measurable memory."""

import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from .cases import BATCH_SIZE, CASES, Subclassed, compiled, fitted, gap, images, sgd


@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}], ids=str)
def test_sparse_inputs(options: dict) -> None:
    sparse = pytest.importorskip("scipy.sparse")  # installed with scikit-learn
    x, y = images()().values()

    def build():
        return keras.Sequential([layers.Input((64,), sparse=True), layers.Dense(10)])

    fits = [
        fitted(compiled(size, build=build, **options), sparse.csr_matrix(x), y, batch_size=BATCH_SIZE)
        for size in (16, None)
    ]
    assert gap(*fits) < 1e-5


class SumOfRows(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.head = layers.Dense(10)

    def build(self, shape) -> None:
        self.head.build((None, 5))

    def call(self, rows):
        return self.head(tf.reduce_sum(rows, axis=1))


def test_ragged_inputs() -> None:
    y = images()()["y"]
    lengths = np.random.default_rng(0).integers(1, 9, len(y))
    values = np.random.default_rng(1).normal(size=(lengths.sum(), 5)).astype("float32")
    rows = tf.RaggedTensor.from_row_lengths(values, lengths)
    data = tf.data.Dataset.from_tensor_slices((rows, y)).batch(BATCH_SIZE)
    assert gap(*(fitted(compiled(size, build=SumOfRows), data) for size in (16, None))) < 1e-5


def test_batches_of_any_size_share_a_trace() -> None:
    calls = []

    class Noting(layers.Layer):
        def call(self, x):
            calls.append(x.shape)
            return x

    model = compiled(build=lambda: keras.Sequential([layers.Input((64,)), Noting(), layers.Dense(10)]))
    x, y = images()().values()

    def sizes(*nums):
        for num in nums:
            yield x[:num], y[:num]

    fitted(model, sizes(53, 7), steps_per_epoch=2, epochs=1)
    num_traces = len(calls)
    fitted(model, sizes(1, 16, 17, 32, 40, 53, 2), steps_per_epoch=7, epochs=1)
    assert len(calls) == num_traces


@pytest.mark.parametrize("jit_compile", [False, True])
def test_an_empty_batch(jit_compile: bool) -> None:
    """It counts for nothing, and neither does the NaN that it makes of a mean which a layer adds to the loss."""
    x, y = (array[:8] for array in images()().values())
    types = tf.TensorSpec((None, 64)), tf.TensorSpec((None,), "int32")

    def fit(*sizes):
        data = tf.data.Dataset.from_generator(lambda: ((x[:num], y[:num]) for num in sizes), output_signature=types)
        model = compiled(3, build=Subclassed, optimizer=sgd(0.0), jit_compile=jit_compile)
        return fitted(model, data.repeat(), steps_per_epoch=len(sizes))

    assert gap(fit(8, 0, 5), fit(8, 5)) < 1e-5


MEMORY = r"""
import re, sys
import keras, numpy as np
from keras import layers
from bigbatch.keras import accumulate

def peak():
    return int(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1])  # a child's ru_maxrss is its parent's

convolutions = [layers.Conv2D(16, 3, padding="same", activation="relu") for _ in range(12)]
model = keras.Sequential([layers.Input((32, 32, 4)), *convolutions, layers.GlobalAveragePooling2D(), layers.Dense(10)])
if int(sys.argv[1]):
    accumulate(model, int(sys.argv[1]))
model.compile("sgd", "mse", metrics=["mae"])
x, y = np.ones((512, 32, 32, 4), "float32"), np.ones((512, 10), "float32")
model.fit(x[:4], y[:4], batch_size=4, verbose=0)
before = peak()
model.fit(x, y, batch_size=512, verbose=0)
print(peak() - before)
"""


def test_memory() -> None:
    """512 samples in micro-batches of 16, each way in a new process: memory holds the activations of 16."""

    def grown_by(micro_batch_size: int) -> int:
        command = [sys.executable, "-c", MEMORY, str(micro_batch_size)]
        root = Path(__file__).parents[2]
        done = subprocess.run(command, check=True, cwd=root, capture_output=True, text=True, timeout=300)
        return int(done.stdout)

    full = grown_by(0)
    assert full > 100_000  # KiB
    assert grown_by(16) < full / 3


def test_masked_rows_under_xla() -> None:
    """XLA compiles the shorter last micro-batch for sizes that have none, too: its rows are then none."""
    case = next(case for case in CASES if case.name == "masked rows, weighted")
    assert gap(case.fit(case.micro_batch_size, jit_compile=True), case.plain()) < 1e-5
