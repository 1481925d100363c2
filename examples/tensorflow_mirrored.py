"""Trains on handwritten digits with two replicas. Each cuts its part of the batch; gradients are reduced once per step.

The replicas here are two logical CPUs. With GPUs, use `tf.distribute.MirroredStrategy()`.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from bigbatch.tensorflow import Accumulator

BATCH_SIZE, MICRO_BATCH_SIZE, EPOCHS = 384, 32, 15

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

images, classes = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(images))
x, y = (images[order] / 16.0).astype("float32"), classes[order]
x_train, y_train, x_test, y_test = x[:1500], y[:1500], x[1500:], y[1500:]


def loss(model: keras.Model, batch: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
    logits = model(batch[0], training=True)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(batch[1], logits))


with strategy.scope():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)])
    accumulator = Accumulator(model, keras.optimizers.Adam(1e-2), loss, micro_batch_size=MICRO_BATCH_SIZE)

data = tf.data.Dataset.from_tensor_slices((x_train, y_train)).batch(BATCH_SIZE)
for epoch in range(EPOCHS):
    for batch in strategy.experimental_distribute_dataset(data):  # the last batch does not divide evenly
        step = accumulator.step(batch)
    size = f"{step.weight:.0f} samples in {step.num_micro_batches} micro-batches"
    print(f"epoch {epoch + 1:2}: loss of the last batch {step.loss:.4f}, {size}")
accuracy = np.mean(np.argmax(model(x_test), 1) == y_test)
print(f"accuracy on held-out digits: {accuracy:.1%}; traces: {accumulator.num_traces}")
