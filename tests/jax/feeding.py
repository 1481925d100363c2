"""Small models for the shared problems, trained on the full batch or fed one micro-batch at a time."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.problems import IGNORED, VOCABULARY, Problem, samples

Batch = dict[str, Any]


def make_params(problem: Problem | None = None, dtype: Any = jnp.float64) -> Any:
    """A classifier of digits, or a model of the next token."""
    draw = np.random.default_rng(0)
    width_in, width_out = (VOCABULARY, VOCABULARY) if problem and problem.kind == "tokens" else (64, 10)
    shapes = {"in": (width_in, 12), "bias": (12,), "out": (12, width_out)}
    return {name: jnp.asarray(0.3 * draw.normal(size=shape), dtype) for name, shape in shapes.items()}


def loss(params: Any, batch: Batch) -> jax.Array:
    """The mean over the samples, or over the tokens that are not ignored."""
    x = jnp.asarray(batch["x"])
    hidden = params["in"][x] if jnp.issubdtype(x.dtype, jnp.integer) else x.astype(params["in"].dtype) @ params["in"]
    logits = jnp.tanh(hidden + params["bias"]) @ params["out"]
    of_each = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(batch["y"], 0))
    mask = jnp.asarray(batch["y"]) != IGNORED
    return jnp.sum(of_each * mask) / jnp.sum(mask)


def weight(batch: Batch) -> int:
    return int((batch["y"] != IGNORED).sum())


value_and_grad = jax.jit(jax.value_and_grad(loss))


def cut(batch: Batch, micro_batch_size: int) -> list[Batch]:
    starts = range(0, len(batch["x"]), micro_batch_size)
    return [{name: part[start : start + micro_batch_size] for name, part in batch.items()} for start in starts]


def seven(num: int = 3) -> list[Batch]:
    """Batches of seven digits, for micro-batches of 2, 2, 2 and 1."""
    return list(samples(*[7] * num))


def train_full(inner: Any, params: Any, batches: Iterable[Batch]) -> Any:
    """The plain loop, without bigbatch."""
    inner = optax.with_extra_args_support(inner)
    state, update = inner.init(params), jax.jit(inner.update)
    for batch in batches:
        value, grads = value_and_grad(params, batch)
        updates, state = update(grads, state, params, value=value)
        params = optax.apply_updates(params, updates)
    return params


def feed(optimizer: Any, params: Any, micro_batches: Iterable[Batch], state: Any = None) -> tuple[Any, Any]:
    """Feeds one micro-batch after the other, without a flush at the end."""
    state = optimizer.init(params) if state is None else state
    update = jax.jit(optimizer.update)
    for micro_batch in micro_batches:
        value, grads = value_and_grad(params, micro_batch)
        updates, state = update(grads, state, params, weight=jnp.array(weight(micro_batch)), value=value)
        params = optax.apply_updates(params, updates)
    return params, state


def train_fed(optimizer: Any, params: Any, batches: Iterable[Batch], micro_batch_size: int) -> tuple[Any, Any]:
    """Trains with one window per batch; a short window is flushed."""
    state, flush = optimizer.init(params), jax.jit(optimizer.flush)
    for batch in batches:
        params, state = feed(optimizer, params, cut(batch, micro_batch_size), state)
        updates, state = flush(state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def apart(ours: Any, full: Any, start: Any) -> float:
    """The distance of two trainings from the same start, relative to the update of the full batch."""
    ours, full, start = (np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(p)]) for p in (ours, full, start))
    return float(np.linalg.norm(ours - full) / np.linalg.norm(full - start))
