"""Runs the code blocks about JAX in docs/jax.md and README.md."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from bigbatch.jax import multi_steps, value_and_grad
from tests.problems import samples

from .training import classifier, logits_of

ROOT = Path(__file__).parents[2]
BLOCKS = [
    code
    for page in ("docs/jax.md", "docs/checkpoints.md", "README.md")
    for code in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    if page == "docs/jax.md" or "bigbatch.jax" in code
]


def what_the_reader_has():
    """The names that the pages assume a reader has: parameters, an optimizer, a loader."""

    def cross_entropies(logits, y):
        return optax.softmax_cross_entropy_with_integer_labels(logits, y)

    def cross_entropy(logits, y):
        return cross_entropies(logits, y).mean()

    def loss(params, batch):
        return cross_entropy(logits_of(params, batch["x"]), batch["y"])

    def dropout(key, x):
        return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), 2 * x, 0)

    optimizer = optax.adam(1e-2)
    return {
        "jax": jax,
        "jnp": jnp,
        "optax": optax,
        "NamedSharding": NamedSharding,
        "PartitionSpec": PartitionSpec,
        "params": classifier(),
        "optimizer": optimizer,
        "state": optimizer.init(classifier()),
        "batch": samples(20)[0],
        "loader": samples(8, 8, 8, 8, 8, 5),
        "loss": loss,
        "apply": logits_of,
        "cross_entropy": cross_entropy,
        "cross_entropies": cross_entropies,
        "dropout": dropout,
        "multi_steps": multi_steps,
        "value_and_grad": value_and_grad,
        "step_gradient": value_and_grad(loss, 8),
    }


@pytest.mark.parametrize("code", BLOCKS, ids=range(len(BLOCKS)))
def test_code_of_the_page_runs(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = what_the_reader_has()
    before = names["params"]
    exec(compile(code, "page", "exec"), names)
    if "apply_updates" in code:
        pairs = zip(jax.tree.leaves(before), jax.tree.leaves(names["params"]), strict=True)
        assert all(not np.array_equal(a, b) for a, b in pairs)
    elif "grads" in code:
        assert all(np.any(leaf) for leaf in jax.tree.leaves(names["grads"]))
