"""Dropout by the key of the step, noise in the optimizer, order and noise of the batches from NumPy and Python."""

import random
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax


def model(seed):
    one, two = jax.random.split(jax.random.key(seed))
    return {"first": jax.random.normal(one, (6, 24)) / 3, "second": jax.random.normal(two, (24, 3)) / 3}


def batches(batch_size):
    x = np.random.default_rng(0).normal(size=(53, 6)).astype(np.float32)
    order = np.random.permutation(53)
    for start in range(0, 53, batch_size):
        time.sleep(0.01)
        part = x[order[start : start + batch_size]]
        yield part + np.float32(0.1 * random.random()), part[:, :3].argmax(1)


def loss(params, batch, key):
    x, y = batch
    hidden = jnp.tanh(x @ params["first"]) * jax.random.bernoulli(key, 0.7, (len(x), 24)) / 0.7
    return optax.softmax_cross_entropy_with_integer_labels(hidden @ params["second"], y).mean()


def optimizer(params, lr):
    return optax.chain(optax.add_noise(0.01, 0.55, 0), optax.adam(lr))


defaults = {"batch_size": 16, "micro_batch_size": 3, "lr": 0.05, "clip_norm": 0.5, "warmup_steps": 5,
            "schedule": "cosine", "compare": False}  # fmt: skip
