"""One of two workers of a MultiWorkerMirroredStrategy: `python -m tests.keras.worker INDEX PORT PORT FOLDER`."""

import json
import os
import sys

index, *ports = map(int, sys.argv[1:4])
folder = sys.argv[4]
os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
cluster = {"worker": [f"localhost:{port}" for port in ports]}
os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})

import keras
import numpy as np
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
keras.config.set_floatx("float64")

from .cases import CASES

NAMES = ["digits", "masked rows, weighted"]

if __name__ == "__main__":
    results = {}
    for name in NAMES:
        case = next(case for case in CASES if case.name == name)
        with strategy.scope():
            model, history = case.fit(8)
        data = case.data()
        evaluated = model.evaluate(**data, batch_size=20, verbose=0, return_dict=True)
        results[name] = {"history": history, "evaluated": evaluated}
        np.savez(f"{folder}/{name}-{index}.npz", *model.get_weights())
    with open(f"{folder}/{index}.json", "w") as file:
        json.dump(results, file)
