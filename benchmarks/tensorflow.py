"""Compares a window in TensorFlow with the full batch and other tools: `python -m benchmarks.tensorflow`."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import json
import resource
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from bigbatch.tensorflow import Accumulator

from .tables import RESULTS, about, markdown_table, write_table
from .timing import compare, interleaved, several

ROUNDS = 40
WARMUP = 2
STEPS = 25
"""The steps of one turn."""
BATCH_SIZE, MICRO_BATCH_SIZE = 256, 32
FULL = "full batch, one `tf.function`"
OURS = "bigbatch, `step(batch)`"
LOOP = "Python loop of `tf.function` micro-steps"
KERAS = "Keras, `gradient_accumulation_steps`"
PACKAGES = ("tensorflow", "keras", "gradient-accumulator")
COMMAND = "python -m benchmarks.tensorflow"

cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def mlp() -> Any:
    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense
    return keras.Sequential([keras.Input((64,)), dense(128, "relu"), dense(128, "relu"), dense(10)])


def loss(model: Any, batch: Any) -> Any:
    return cross_entropy(batch[1], model(batch[0], training=True))


def micro_batches(batch: Any) -> list[Any]:
    """Micro-batches as from a dataset: cut before anything is timed, because cutting outside a graph is slow."""
    return [tuple(t[k : k + MICRO_BATCH_SIZE] for t in batch) for k in range(0, BATCH_SIZE, MICRO_BATCH_SIZE)]


def plain_step(model: Any, optimizer: Any) -> Callable[[Any], Any]:
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            value = loss(model, batch)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(value, variables), variables, strict=True))
        return value

    return step


def full_batch(model: Any, batch: Any) -> Callable[[], Any]:
    step = plain_step(model, keras.optimizers.SGD(0.1))
    return lambda: step(batch)


def ours(model: Any, batch: Any) -> Callable[[], Any]:
    accumulator = Accumulator(model, keras.optimizers.SGD(0.1), loss, MICRO_BATCH_SIZE)
    return lambda: accumulator.step(batch)


def python_loop(model: Any, batch: Any) -> Callable[[], Any]:
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
    num = BATCH_SIZE // MICRO_BATCH_SIZE
    sums = [tf.Variable(tf.zeros(v.shape), trainable=False) for v in model.trainable_variables]

    @tf.function
    def micro_step(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            value = loss(model, batch) / num
        for total, gradient in zip(sums, tape.gradient(value, model.trainable_variables), strict=True):
            total.assign_add(gradient)
        return value

    @tf.function
    def apply() -> None:
        optimizer.apply_gradients(zip([tf.identity(s) for s in sums], model.trainable_variables, strict=True))
        for total in sums:
            total.assign(tf.zeros_like(total))

    cut = micro_batches(batch)

    def step() -> None:
        for micro_batch in cut:
            micro_step(micro_batch)
        apply()

    return step


def by_keras(model: Any, batch: Any) -> Callable[[], Any]:
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=BATCH_SIZE // MICRO_BATCH_SIZE)
    micro_step = plain_step(model, optimizer)

    cut = micro_batches(batch)

    def step() -> None:
        for micro_batch in cut:
            micro_step(micro_batch)

    return step


def by_gradient_accumulator(model: Any, batch: Any) -> Callable[[], Any]:
    """gradient-accumulator's train_step, compiled as `fit` compiles it."""
    from gradient_accumulator import GradientAccumulateModel

    num = BATCH_SIZE // MICRO_BATCH_SIZE
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = GradientAccumulateModel(accum_steps=num, inputs=model.inputs, outputs=model.outputs)
    wrapped.compile(keras.optimizers.SGD(0.1), cross_entropy)
    micro_step = tf.function(wrapped.train_step)

    cut = micro_batches(batch)

    def step() -> None:
        for micro_batch in cut:
            micro_step(micro_batch)

    return step


CONTESTANTS = {
    FULL: full_batch,
    OURS: ours,
    LOOP: python_loop,
    KERAS: by_keras,
    "gradient-accumulator": by_gradient_accumulator,
}


def assert_same_update(batch: Any) -> None:
    """Asserts that one step from the same start leads to the same weights, and that the weights change."""
    start = mlp().get_weights()
    ends = {}
    for name, make in CONTESTANTS.items():
        model = mlp()
        make(model, batch)()
        ends[name] = model.get_weights()
    for name, end in ends.items():
        assert max(np.abs(a - b).max() for a, b in zip(end, start, strict=True)) > 1e-4, f"{name} made no step"
        error = max(np.abs(a - b).max() for a, b in zip(end, ends[FULL], strict=True))
        assert error <= 1e-6, f"{name} is {error:.1e} away from the full batch after one step"


def time_table(rounds: int) -> str:
    data = load_digits()
    x = tf.constant(data.data[:BATCH_SIZE] / 16, tf.float32)
    batch = (x, tf.constant(data.target[:BATCH_SIZE]))
    assert_same_update(batch)
    functions = {name: several(make(mlp(), batch), STEPS) for name, make in CONTESTANTS.items()}
    found = compare(interleaved(functions, rounds, WARMUP), FULL)
    rows = [(name, f"{found[name].ratio:.2f}", f"{found[name].low:.2f}–{found[name].high:.2f}") for name in CONTESTANTS]
    table = markdown_table(("", "time per step, full batch = 1", "quartiles"), rows)
    seconds = found[FULL].seconds / STEPS
    note = f"Median of {rounds} rounds of {STEPS} steps; the full batch took {1000 * seconds:.2f} ms."
    return f"{table}\n\n{note} {about(PACKAGES, command=COMMAND)}."


def peak_of(way: str) -> int:
    """The growth of the largest resident set of a fresh process that trains a few steps, in bytes."""
    command = [sys.executable, "-m", "benchmarks.tensorflow", "peak", way]
    return int(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]))


def peak(way: str) -> int:
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(256, "tanh") for _ in range(12)]
    model = keras.Sequential([keras.Input((64, 256)), *layers, keras.layers.Flatten(), keras.layers.Dense(10)])
    batch = (tf.random.normal([512, 64, 256]), tf.random.uniform([512], 0, 10, tf.int64))
    optimizer = keras.optimizers.SGD(0.1)
    step = plain_step(model, optimizer) if way == "full" else Accumulator(model, optimizer, loss, 32).step
    step(tuple(t[:8] for t in batch))  # memory allocated only once does not count
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(3):
        step(batch)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


def memory_table() -> str:
    full, cut = peak_of("full"), peak_of("cut")
    rows = [
        ("full batch of 512", f"{full / 2**20:.0f}", "100%"),
        ("in 16 micro-batches of 32", f"{cut / 2**20:.0f}", f"{100 * cut / full:.0f}%"),
    ]
    return f"{markdown_table(('', 'MiB', 'of the full batch'), rows)}\n\n{about(PACKAGES, command=COMMAND)}."


def main(rounds: int = ROUNDS) -> None:
    memory, time = memory_table(), time_table(rounds)
    write_table(RESULTS, "tensorflow", time)
    write_table(RESULTS, "tensorflow memory", memory)
    print(time, memory, sep="\n\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["peak"]:
        print(json.dumps(peak(sys.argv[2])))
    else:
        main(*map(int, sys.argv[1:]))
