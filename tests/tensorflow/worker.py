"""One worker of MultiWorkerMirroredStrategy: python -m tests.tensorflow.worker INDEX PORT PORT OUT [all].

Every case trains on the batches that `test_multi_worker.py` gives to one process whole; OUT has the weights. Without
"all" graphs are not optimized, as in the quick run.
"""

import json
import os
import sys
from typing import Any

INDEX, PORTS, OUT = int(sys.argv[1]), sys.argv[2:4], sys.argv[4]
os.environ["TF_CONFIG"] = json.dumps(
    {"cluster": {"worker": [f"127.0.0.1:{port}" for port in PORTS]}, "task": {"type": "worker", "index": INDEX}}
)

import numpy as np
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()  # before anything else of TensorFlow's runs
tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": "all" not in sys.argv})

import keras

keras.config.set_floatx("float64")
keras.config.set_dtype_policy("float64")

from bigbatch import Window
from bigbatch.tensorflow import Accumulator

from .test_multi_worker import DIGITS, SPLITS, TEXT, digits, with_an_inf
from .training import flat, make_loss, make_model, make_weight, momentum

Batch = dict[str, np.ndarray]


def own(batch: Batch, split: tuple[int, int]) -> Batch:
    mine = slice(0, split[0]) if INDEX == 0 else slice(split[0], sum(split))
    return {name: rows[mine] for name, rows in batch.items()}


def make(
    problem: Any = DIGITS, micro_batch_size: int | None = 4, optimizer: Any = momentum, **options: Any
) -> Accumulator:
    with strategy.scope():
        model = make_model(problem)
        options = {"weight": make_weight(problem), **options}
        return Accumulator(model, optimizer(), make_loss(problem), micro_batch_size, **options)


def batches() -> Any:
    accumulator = make()
    for split in SPLITS:
        step = accumulator.step(own(digits(split), split))
        assert step.is_applied
        assert step.weight == sum(split)
        yield "batch " + str(split), accumulator.model
    assert accumulator.num_traces == 1


def windows() -> Any:
    """Each worker's rows in three micro-batches, some of them empty."""
    accumulator = make(micro_batch_size=None)
    for split in SPLITS:
        mine = own(digits(split), split)
        cuts = [slice(0, 5), slice(5, 10), slice(10, None)]
        step = accumulator.step(Window([{name: rows[cut] for name, rows in mine.items()} for cut in cuts]))
        assert step.weight == sum(split)
    yield "window", accumulator.model


def gradients(in_graph: bool) -> Any:
    """The user's own, a window of two micro-batches and a short one."""
    accumulator = make(micro_batch_size=None, accumulation_steps=2)

    def on_replica(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            value = accumulator.loss(accumulator.model, {"x": x, "y": y})
        found = tape.gradient(value, accumulator.model.trainable_variables)
        accumulator.add(found, weight=tf.shape(y)[0], loss=value)

    def add(x: Any, y: Any) -> None:
        strategy.run(on_replica, args=(x, y))

    signature = [tf.TensorSpec([None, 64], tf.float64), tf.TensorSpec([None], tf.int64)]
    feed = tf.function(add, input_signature=signature) if in_graph else add
    for split in SPLITS:
        mine = own(digits(split), split)
        for cut in (slice(0, 3), slice(3, None)) if split != SPLITS[-1] else (slice(None),):
            feed(tf.constant(mine["x"][cut]), tf.constant(mine["y"][cut]))
        accumulator.flush()
        assert accumulator.last_step.weight == sum(split)
    yield "add in a graph" if in_graph else "add", accumulator.model


def terms() -> Any:
    accumulator = make(TEXT, 2)
    step = accumulator.step(own(TEXT.batches[0], (3, 2)))
    assert step.weight == (125, 5), step.weight
    yield "terms", accumulator.model


def divided() -> Any:
    """A loss that divides by the number of workers, with a penalty, and one that divides by the whole batch."""

    def loss(model: Any, batch: Batch) -> Any:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch["y"], model(batch["x"]))
        size = {"global_batch_size": 22} if name == "divided by the batch" else {}
        penalty = tf.nn.scale_regularization_loss(tf.reduce_sum(model.trainable_variables[0] ** 2))
        return tf.nn.compute_average_loss(losses, **size) + penalty

    for name in ("divided by the workers", "divided by the batch"):
        accumulator = make()
        accumulator.loss = loss
        assert accumulator.step(own(digits((14, 8)), (14, 8))).is_applied
        yield name, accumulator.model


def not_finite() -> Any:
    """On the other worker only: a plain optimizer, and one that scales the loss."""
    for name, optimizer in {
        "inf": momentum,
        "inf and a scale": lambda: keras.optimizers.LossScaleOptimizer(momentum(), initial_scale=1024.0),
    }.items():
        accumulator = make(optimizer=optimizer)
        batch = digits((14, 8))
        assert accumulator.step(own(batch, (14, 8))).is_applied
        before = flat(accumulator.model)
        assert not accumulator.step(own(with_an_inf(batch), (14, 8))).is_applied
        assert np.array_equal(flat(accumulator.model), before)
        assert accumulator.optimizer.iterations.numpy() == 1
        if name != "inf":
            assert accumulator.optimizer.dynamic_scale.numpy() == 512
        accumulator.step(own(batch, (14, 8)))
        yield name, accumulator.model


def clipping() -> Any:
    """+10.1 on one worker and -9.9 on the other."""
    with strategy.scope():
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((1,)), layer])
        accumulator = Accumulator(
            model,
            keras.optimizers.SGD(1.0, clipvalue=1.0),
            lambda model, x: tf.reduce_sum(model(x)),
            1,
            reduction="sum",
            clip_norm=1.0,
        )
    accumulator.step(np.array([[10.1 if INDEX == 0 else -9.9]]))
    yield "clipping", model


def main() -> None:
    cases = (batches(), windows(), gradients(False), gradients(True), terms(), divided(), not_finite(), clipping())
    np.savez(OUT, **{name: flat(model) for case in cases for name, model in case})


if __name__ == "__main__":
    main()
