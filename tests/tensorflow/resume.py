"""A run that can be stopped in the middle of a window and taken up by another process.

python -m tests.tensorflow.resume REPLICAS FIRST LAST STATE WITH: feeds the micro-batches FIRST to LAST; reads STATE
unless FIRST is 0, and writes it. Without WITH the accumulator's own state is left out.
"""

import os
import sys
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

NUM_MICRO_BATCHES = 10


def main(num_replicas: int, first: int, last: int, path: str, is_whole: bool) -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    from bigbatch.tensorflow import Accumulator

    strategy: Any = tf.distribute.get_strategy()
    if num_replicas == 2:
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(4)])
        optimizer = keras.optimizers.Adam(0.05)
        accumulator = Accumulator(model, optimizer, accumulation_steps=4, clip_norm=0.5)
    parts = {"model": model, "optimizer": optimizer, **({"accumulator": accumulator} if is_whole else {})}
    checkpoint = tf.train.Checkpoint(**parts)
    if first:
        checkpoint.read(path)

    def on_replica(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x))
            loss = tf.reduce_mean(losses)
        accumulator.add(tape.gradient(loss, model.trainable_variables), weight=tf.shape(y)[0], loss=loss)

    for number in range(first, last):
        draw = np.random.default_rng(number)
        x, y = draw.normal(size=(3 + number % 3, 6)), draw.integers(0, 4, 3 + number % 3)
        pair = (
            strategy.experimental_distribute_values_from_function(lambda _, part=part: tf.constant(part))
            for part in (x, y)
        )
        strategy.run(on_replica, args=tuple(pair))
    if last == NUM_MICRO_BATCHES:
        accumulator.flush()
        np.save(path + ".npy", np.concatenate([np.ravel(v.numpy()) for v in model.trainable_variables]))
    checkpoint.write(path)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5:] == ["with"])
