"""A task of JAX that is written for a test."""

from pathlib import Path

TINY = """
import jax
import jax.numpy as jnp
import numpy as np
import optax

def model(seed):
    one, two = jax.random.split(jax.random.key(seed))
    return {
        "dense1": {"kernel": jax.random.normal(one, (6, 12)) / 3, "bias": jnp.zeros(12)},
        "dense2": {"kernel": jax.random.normal(two, (12, 3)) / 3, "bias": jnp.zeros(3)},
    }

def batches(batch_size, epoch, seed):
    x = np.random.default_rng((seed, epoch)).normal(size=(53, 6)).astype(np.float32)
    return [(x[k : k + batch_size], x[k : k + batch_size, :3].argmax(1)) for k in range(0, 53, batch_size)]

def logits(params, x, kept=1.0):
    hidden = jnp.tanh(x @ params["dense1"]["kernel"] + params["dense1"]["bias"]) * kept
    return hidden @ params["dense2"]["kernel"] + params["dense2"]["bias"]

def loss(params, batch):
    x, y = batch
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, x), y).mean()

def evaluate(params):
    x = np.random.default_rng(0).normal(size=(100, 6)).astype(np.float32)
    return {"accuracy": (logits(params, x).argmax(1) == x[:, :3].argmax(1)).mean()}

defaults = {"batch_size": 16, "micro_batch_size": 3, "epochs": 3, "lr": 0.05}
"""
EVEN = TINY.replace("53", "48")
"""All batches have one size: half as much to compile."""
DROPOUT = """
def loss(params, batch, key):
    x, y = batch
    kept = jax.random.bernoulli(key, 0.7, (len(x), 12)) / 0.7
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, x, kept), y).mean()

def optimizer(params, lr):
    return optax.chain(optax.add_noise(0.01, 0.55, 0), optax.adam(lr))
"""


def write(folder: Path, code: str = "", start: str = TINY) -> Path:
    path = folder / "tiny.py"
    path.write_text(start + code, encoding="utf-8")
    return path
