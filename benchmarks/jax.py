"""Compares a window in JAX with the full batch, a hand-written scan and optax: `python -m benchmarks.jax`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from optax.microbatching import microbatch
from sklearn.datasets import load_digits

from bigbatch.jax import multi_steps, value_and_grad

from .tables import RESULTS, about, markdown_table, write_table
from .timing import compare, interleaved

ROUNDS, WARMUP = 120, 3
STEPS = 25
"""The steps of one turn. The first step after another contestant is slower, and training makes many in a row."""
BATCH_SIZE, MICRO_BATCH_SIZE = 256, 32
NUM = BATCH_SIZE // MICRO_BATCH_SIZE
HAND = "`lax.scan` by hand"
PACKAGES = ("jax", "optax")
COMMAND = "python -m benchmarks.jax"


def mlp() -> list[tuple[Any, Any]]:
    sizes, init = (64, 128, 128, 10), jax.nn.initializers.he_normal()
    keys = jax.random.split(jax.random.key(0), 3)
    return [(init(key, (a, b)), jnp.zeros(b)) for key, a, b in zip(keys, sizes[:-1], sizes[1:], strict=True)]


def loss(params: Any, batch: Any) -> Any:
    x, y = batch
    for kernel, bias in params[:-1]:
        x = jax.nn.relu(x @ kernel + bias)
    return optax.softmax_cross_entropy_with_integer_labels(x @ params[-1][0] + params[-1][1], y).mean()


def hand_scan(params: Any, batch: Any) -> Any:
    def body(sums: Any, micro_batch: Any) -> Any:
        return jax.tree.map(jnp.add, sums, jax.value_and_grad(loss)(params, micro_batch)), None

    cut = jax.tree.map(lambda leaf: leaf.reshape(NUM, MICRO_BATCH_SIZE, *leaf.shape[1:]), batch)
    sums, _ = lax.scan(body, (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)), cut)
    return jax.tree.map(lambda leaf: leaf / NUM, sums)


def optax_microbatch(params: Any, batch: Any) -> Any:
    accumulated = microbatch(jax.value_and_grad(loss), argnums=1, microbatch_size=MICRO_BATCH_SIZE)
    return jax.tree.map(lambda leaf: leaf / NUM, accumulated(params, batch))


def in_one_call(gradient_of: Callable[..., Any], batch: Any) -> Callable[[], Any]:
    """Steps of Adam, one compiled call each."""
    optimizer = optax.adam(1e-3)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any) -> Any:
        _, grads = gradient_of(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return stepping(step, mlp(), optimizer)


def fed(optimizer: Any, batch: Any, *, is_donated: bool, **extra: Any) -> Callable[[], Any]:
    """One micro-batch at a time, one compiled call each."""

    @partial(jax.jit, donate_argnums=(0, 1) if is_donated else ())
    def micro_step(params: Any, state: Any, micro_batch: Any) -> Any:
        grads = jax.grad(loss)(params, micro_batch)
        updates, state = optimizer.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    starts = range(0, BATCH_SIZE, MICRO_BATCH_SIZE)
    micro_batches = [jax.tree.map(lambda leaf, k=k: leaf[k : k + MICRO_BATCH_SIZE], batch) for k in starts]

    def step(params: Any, state: Any) -> Any:
        for micro_batch in micro_batches:
            params, state = micro_step(params, state, micro_batch)
        return params, state

    return stepping(step, mlp(), optimizer)


def stepping(step: Callable[..., Any], params: Any, optimizer: Any) -> Callable[[], Any]:
    held = jax.tree.map(partial(jnp.array, copy=True), [params, optimizer.init(params)])  # copied: donated later

    def turn() -> Any:
        for _ in range(STEPS):
            held[:] = step(*held)
        return jax.block_until_ready(held)[0]

    return turn


def check(contestants: dict[str, Callable[[], Any]]) -> None:
    """Asserts that all end with the same weights. Micro-batches are equal here, so even a mean of means is right."""
    found = [jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(turn())]) for turn in contestants.values()]
    assert all(jnp.abs(weights - found[0]).max() < 1e-4 for weights in found)


def time_rows() -> list[list[str]]:
    x, y = load_digits(return_X_y=True)
    batch = jnp.asarray(x[:BATCH_SIZE] / 16, jnp.float32), jnp.asarray(y[:BATCH_SIZE])
    contestants = {
        "full batch": in_one_call(jax.value_and_grad(loss), batch),
        HAND: in_one_call(hand_scan, batch),
        "bigbatch, `value_and_grad`": in_one_call(value_and_grad(loss, MICRO_BATCH_SIZE), batch),
        "bigbatch, `value_and_grad` with `weight`": in_one_call(
            value_and_grad(loss, MICRO_BATCH_SIZE, weight=lambda batch: (batch[1] >= 0).sum()), batch
        ),
        "optax, `microbatch`": in_one_call(optax_microbatch, batch),
    }
    for suffix, is_donated in (("", True), (", not donated", False)):
        ours, theirs = multi_steps(optax.adam(1e-3), NUM), optax.MultiSteps(optax.adam(1e-3), NUM)
        options = {"batch": batch, "is_donated": is_donated}
        contestants[f"bigbatch, `multi_steps`, fed{suffix}"] = fed(ours, **options, weight=MICRO_BATCH_SIZE)
        contestants[f"optax, `MultiSteps`, fed{suffix}"] = fed(theirs, **options)
    check(contestants)
    times = interleaved(contestants, ROUNDS, WARMUP)
    times = {name: times[name] for name in contestants}
    by_hand, full = compare(times, HAND), compare(times, "full batch")
    return [
        [name, f"{one.ratio:.2f}", f"{one.low:.2f}–{one.high:.2f}", f"{full[name].ratio:.2f}"]
        for name, one in by_hand.items()
    ]


def memory_rows() -> list[list[str]]:
    """Temporary memory of the gradient according to the compiler, for a model with large activations."""

    def deep_loss(params: Any, x: Any) -> Any:
        for kernel in params:
            x = jnp.tanh(x @ kernel)
        return jnp.square(x).mean()

    def mebibytes(function: Callable[..., Any]) -> float:
        params = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 12
        lowered = jax.jit(function).lower(params, jax.ShapeDtypeStruct((512, 16, 64), jnp.float32))
        return lowered.compile().memory_analysis().temp_size_in_bytes / 2**20

    full = mebibytes(jax.value_and_grad(deep_loss))
    rows = [["full batch", f"{full:.2f}", "1.00"]]
    for num in (4, 16, 32, 64):
        found = mebibytes(value_and_grad(deep_loss, 512 // num))
        rows.append([f"bigbatch, in {num} micro-batches", f"{found:.2f}", f"{found / full:.2f}"])
    return rows


def main() -> None:
    times = markdown_table(["", "hand-written scan = 1", "quartiles", "full batch = 1"], time_rows())
    memory = markdown_table(["batch of 512", "MiB", "full batch = 1"], memory_rows())
    write_table(RESULTS, "jax", f"{times}\n\n{about(PACKAGES, command=COMMAND)}")
    write_table(RESULTS, "jax memory", f"{memory}\n\n{about(PACKAGES, command=COMMAND)}")
    print(times, memory, sep="\n\n")


if __name__ == "__main__":
    main()
