"""Runs that can be stopped in the middle of a window and continued by another process.

python -m tests.tensorflow.resume FIRST LAST FOLDER: for each kind of run, feeds the micro-batches FIRST to LAST; reads
its state from FOLDER unless FIRST is 0, and writes it there.
"""

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

from bigbatch.tensorflow import Accumulator
from bigbatch.tensorflow.batch import any_size

from .training import mirrored

NUM_MICRO_BATCHES = 10
KINDS = ("eager", "graph", "two replicas in a graph", "bfloat16", "branches")


def data(number: int, replica: int = 0) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(10 * number + replica)
    size = 3 + (number + replica) % 3
    return draw.normal(size=(size, 6)), draw.integers(0, 4, size)


class Resumable:
    """Windows of 4 micro-batches; only the first one of each window uses the extra layer of `branches`."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.strategy: Any = tf.distribute.get_strategy()
        if "replicas" in kind:
            self.strategy = mirrored()
        with self.strategy.scope():
            keras.utils.set_random_seed(0)
            dtype = "bfloat16" if kind == "bfloat16" else "float64"
            dense = keras.layers.Dense
            self.model = keras.Sequential([keras.Input((6,)), dense(8, "tanh", dtype=dtype), dense(4, dtype=dtype)])
            if kind == "branches":
                self.model.extra = dense(4, dtype=dtype)
                self.model.extra.build((None, 6))
            self.optimizer = keras.optimizers.Adam(0.05)
            self.accumulator = Accumulator(self.model, self.optimizer, accumulation_steps=4, clip_norm=0.5)
        self.run = self._run
        if "graph" in kind:
            self.run = tf.function(self._run, input_signature=[any_size(part) for part in self.pair(0)])

    def _run(self, x: Any, y: Any) -> None:
        self.strategy.run(self._on_replica, args=(x, y))

    def _on_replica(self, x: Any, y: Any) -> None:
        variables = self.model.trainable_variables
        with tf.GradientTape() as tape:
            logits = self.model(x)
            if self.kind == "branches" and self.is_first:
                logits = logits + self.model.extra(x)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, tf.cast(logits, tf.float64)))
        self.accumulator.add(tape.gradient(loss, variables), weight=tf.shape(y)[0], loss=loss)

    def feed(self, number: int) -> None:
        self.is_first = number % 4 == 0
        self.run(*self.pair(number))

    def pair(self, number: int) -> Any:
        def own(context: Any) -> Any:
            return tuple(map(tf.constant, data(number, context.replica_id_in_sync_group)))

        if "replicas" not in self.kind:
            return tuple(map(tf.constant, data(number)))
        return self.strategy.experimental_distribute_values_from_function(own)

    def parts(self, is_whole: bool) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer}
        return {**parts, "accumulator": self.accumulator} if is_whole else parts

    def weights(self) -> np.ndarray:
        return np.concatenate([np.ravel(v.numpy()).astype(np.float64) for v in self.model.trainable_variables])


def main(first: int, last: int, folder: Path, is_whole: bool = True, kinds: tuple[str, ...] = KINDS) -> None:
    for kind in kinds:
        run = Resumable(kind)
        checkpoint = tf.train.Checkpoint(**run.parts(is_whole))
        path = str(folder / kind.replace(" ", "_"))
        if first:
            checkpoint.read(path).assert_existing_objects_matched()
        for number in range(first, last):
            run.feed(number)
        if last == NUM_MICRO_BATCHES:
            run.accumulator.flush()
            np.save(path + ".npy", run.weights())
        checkpoint.write(path)


if __name__ == "__main__":
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
