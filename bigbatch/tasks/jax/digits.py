"""Handwritten digits with a small convolutional net. It has no BatchNorm, so accumulation is exact.

Recognises 98% of the held-out digits after 20 epochs.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax, nn

from bigbatch.tasks import data

Params = dict[str, dict[str, jax.Array]]
Batch = tuple[Any, Any]

defaults = {"batch_size": 256, "micro_batch_size": 32, "epochs": 20, "lr": 1e-2}

SHAPES = {"conv1": (3, 3, 1, 16), "conv2": (3, 3, 16, 16), "conv3": (3, 3, 16, 32), "dense": (3 * 3 * 32, 10)}


def model(seed: int = 0) -> Params:
    keys = jax.random.split(jax.random.key(seed), len(SHAPES))
    return {
        name: {"kernel": nn.initializers.lecun_normal()(key, shape), "bias": jnp.zeros(shape[-1])}
        for key, (name, shape) in zip(keys, SHAPES.items(), strict=True)
    }


def batches(batch_size: int, epoch: int, seed: int) -> list[Batch]:
    return data.digits().batches(batch_size, epoch, seed)


def logits(params: Params, x: Any) -> jax.Array:
    hidden = x[..., None]
    for name, stride, padding in (("conv1", 1, "SAME"), ("conv2", 1, "SAME"), ("conv3", 2, "VALID")):
        hidden = nn.gelu(convolve(hidden, params[name]["kernel"], stride, padding) + params[name]["bias"])
    return hidden.reshape(len(x), -1) @ params["dense"]["kernel"] + params["dense"]["bias"]


def convolve(images: jax.Array, kernel: jax.Array, stride: int, padding: str) -> jax.Array:
    return lax.conv_general_dilated(
        images, kernel, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def loss(params: Params, batch: Batch) -> jax.Array:
    x, y = batch
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, x), y).mean()


def evaluate(params: Params) -> dict[str, float]:
    predict = jax.jit(logits)
    return {"accuracy": data.accuracy(lambda x: np.asarray(predict(params, x)))}
