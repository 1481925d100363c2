"""Dropout by a layer, a dataset that TensorFlow shuffles, noise by NumPy, by TensorFlow's own generator, by Keras."""

import time

import keras
import numpy as np
import tensorflow as tf


def model():
    return keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(24, "tanh"), keras.layers.Dropout(0.3), keras.layers.Dense(3)]
    )


def batches(batch_size):
    x = np.random.default_rng(0).normal(size=(53, 6)).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :3].argmax(1))).shuffle(53).batch(batch_size)
    for x, y in data:
        time.sleep(0.01)
        noise = np.random.normal(scale=0.1, size=x.shape) + tf.random.get_global_generator().normal(x.shape)
        yield x + tf.cast(noise, tf.float32) + 0.1 * keras.random.normal(x.shape), y


def loss(model, batch):
    x = batch[0] + 0.1 * keras.random.normal((1, 6))
    losses = keras.losses.sparse_categorical_crossentropy(batch[1], model(x, training=True), from_logits=True)
    return tf.reduce_mean(losses)


def optimizer(lr):
    return keras.optimizers.Adam(lr)


defaults = {"batch_size": 16, "micro_batch_size": 3, "lr": 0.05, "clip_norm": 0.5, "warmup_steps": 5,
            "schedule": "cosine", "compare": False}  # fmt: skip
