"""The shared problems in JAX: models, losses, and the distance of two gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.problems import IGNORED, VOCABULARY, Problem

Batch = dict[str, Any]


def dense(key: Any, num_in: int, num_out: int) -> dict[str, Any]:
    return {"kernel": jax.random.normal(key, (num_in, num_out)) / num_in**0.5, "bias": jnp.zeros(num_out)}


def apply(layer: dict[str, Any], x: Any) -> Any:
    return x @ layer["kernel"] + layer["bias"]


def classifier(width: int = 24) -> dict[str, Any]:
    first, second = jax.random.split(jax.random.key(0))
    return {"first": dense(first, 64, width), "second": dense(second, width, 10)}


def language() -> dict[str, Any]:
    embed, mix, head, length = jax.random.split(jax.random.key(0), 4)
    return {
        "embed": jax.random.normal(embed, (VOCABULARY, 12)),
        "mix": dense(mix, 12, 16),
        "head": dense(head, 16, VOCABULARY),
        "length": dense(length, 16, 1),
    }


def logits_of(params: Any, x: Any) -> Any:
    return apply(params["second"], jnp.tanh(apply(params["first"], x)))


def samples_loss(params: Any, batch: Batch) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits_of(params, batch["x"]), batch["y"]).mean()


def hidden_of(params: Any, x: Any) -> Any:
    seen = jnp.cumsum(params["embed"][x], 1) / jnp.arange(1, x.shape[1] + 1)[:, None]
    return jnp.tanh(apply(params["mix"], seen))


def tokens_loss(params: Any, batch: Batch) -> Any:
    """A mean over the unmasked tokens, or 0/0 if there are none."""
    counts = batch["y"] != IGNORED
    logits = apply(params["head"], hidden_of(params, batch["x"]))
    each = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(counts, batch["y"], 0))
    return (each * counts).sum() / counts.sum()


def terms_loss(params: Any, batch: Batch) -> Any:
    found = apply(params["length"], hidden_of(params, batch["x"]).mean(1))[:, 0]
    return tokens_loss(params, batch), 0.5 * jnp.square(found - batch["z"]).mean()


def num_tokens(batch: Batch) -> Any:
    return (batch["y"] != IGNORED).sum()


LOSSES = {"samples": samples_loss, "tokens": tokens_loss, "terms": terms_loss}
WEIGHTS = {"samples": None, "tokens": num_tokens, "terms": lambda batch: (num_tokens(batch), len(batch["x"]))}


def make_params(problem: Problem) -> Any:
    return classifier() if problem.kind == "samples" else language()


def full_batch(problem: Problem, params: Any, batch: Batch) -> tuple[Any, Any]:
    """The gradient of the plain full batch, term by term, without bigbatch."""

    def total(params: Any, batch: Batch) -> Any:
        found = LOSSES[problem.kind](params, batch)
        return sum(found) if isinstance(found, tuple) else found

    return jax.jit(jax.value_and_grad(total))(params, batch)


def gap(found: Any, right: Any) -> float:
    """The distance of two nests of arrays, relative to the norm of the correct one."""
    assert jax.tree.structure(found) == jax.tree.structure(right)
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True))
    assert all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs)
    distance = np.sqrt(sum(float(np.sum(np.abs(np.asarray(a) - np.asarray(b)) ** 2)) for a, b in pairs))
    return float(distance / np.sqrt(sum(float(np.sum(np.abs(np.asarray(b)) ** 2)) for _, b in pairs)))


def assert_equal(found: Any, right: Any, within: float = 1e-12) -> None:
    assert gap(found, right) <= within
