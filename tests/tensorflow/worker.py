"""One worker of MultiWorkerMirroredStrategy: python -m tests.tensorflow.worker INDEX PORT PORT OUT SPLITS."""

import json
import os
import sys

INDEX, PORTS, OUT = int(sys.argv[1]), sys.argv[2:4], sys.argv[4]
SPLITS = json.loads(sys.argv[5])
os.environ["TF_CONFIG"] = json.dumps(
    {"cluster": {"worker": [f"127.0.0.1:{port}" for port in PORTS]}, "task": {"type": "worker", "index": INDEX}}
)

import numpy as np
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()  # before anything else of TensorFlow's runs

import keras

keras.config.set_floatx("float64")
keras.config.set_dtype_policy("float64")

from bigbatch.tensorflow import Accumulator
from tests.problems import Problem, samples

from .training import make_loss, make_model, sgd


def main() -> None:
    results = {}
    for split in SPLITS:
        (batch,) = samples(sum(split))
        own = slice(0, split[0]) if INDEX == 0 else slice(split[0], None)
        mine = {name: rows[own] for name, rows in batch.items()}
        with strategy.scope():
            problem = Problem("digits", "samples", (batch,), 4)
            model = make_model(problem)
            accumulator = Accumulator(model, sgd(), make_loss(problem), micro_batch_size=4)
        step = accumulator.step(mine)
        assert step.is_applied
        assert step.weight == sum(split), step
        results[json.dumps(split)] = np.concatenate([np.ravel(v.numpy()) for v in model.trainable_variables])
    np.savez(OUT, **results)


if __name__ == "__main__":
    main()
