"""JAX on a GPU: step time and peak memory of two GPTs beside the full batch and optax.MultiSteps.

`python -m benchmarks.jax_gpu` prints the table; `… --memory MODEL WAY` one peak, in a process of its own.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bigbatch.jax import multi_steps, value_and_grad

from .tables import about, markdown_table
from .timing import compare, interleaved

BATCH_SIZE, MICRO_BATCH_SIZE = 64, 8
NUM = BATCH_SIZE // MICRO_BATCH_SIZE
ROUNDS, WARMUP = 10, 2


@dataclass(frozen=True)
class GPT:
    layers: int
    width: int
    heads: int
    length: int
    vocabulary: int
    steps: int
    """In a turn."""

    def params(self) -> Any:
        def normal(*shape: int) -> Any:
            return jnp.asarray(draw.normal(0, 0.02, shape), jnp.float32)

        draw, width, num = np.random.default_rng(0), self.width, self.layers
        return {
            "tokens": normal(self.vocabulary, width),
            "places": normal(self.length, width),
            "blocks": {
                "attend": normal(num, width, 3 * width),
                "project": normal(num, width, width),
                "widen": normal(num, width, 4 * width),
                "narrow": normal(num, 4 * width, width),
                "scale": jnp.ones((num, 2, width)),
            },
        }

    def loss(self, params: Any, batch: Any) -> Any:
        """The mean over all predicted tokens, computed in bf16."""
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
        x = params["tokens"][batch[:, :-1]] + params["places"]

        def block(x: Any, layer: Any) -> Any:
            q, k, v = jnp.split(norm(x) * layer["scale"][0] @ layer["attend"], 3, axis=-1)
            heads = (*x.shape[:2], self.heads, self.width // self.heads)
            seen = jax.nn.dot_product_attention(*(a.reshape(heads) for a in (q, k, v)), is_causal=True,
                                                implementation=ATTENTION)  # fmt: skip
            x = x + seen.reshape(x.shape) @ layer["project"]
            return x + jax.nn.gelu(norm(x) * layer["scale"][1] @ layer["widen"]) @ layer["narrow"], None

        x, _ = jax.lax.scan(block, x, params["blocks"])
        logits = (norm(x) @ params["tokens"].T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    def batch(self) -> Any:
        """The text of Python's help topics, byte by byte."""
        text = np.frombuffer("".join(topics.values()).encode("ascii", "replace"), np.uint8)
        return jnp.asarray(np.resize(text, (BATCH_SIZE, self.length + 1)), jnp.int32)


def norm(x: Any) -> Any:
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(-1, keepdims=True)
    return (wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype)


MODELS = {
    "GPT-2 small, 1024 tokens": GPT(12, 768, 12, 1024, 50304, steps=3),
    "tiny GPT (4×128, 64 tokens)": GPT(4, 128, 4, 64, 256, steps=50),
}
ATTENTION = "cudnn" if jax.default_backend() == "gpu" else None


def in_one_call(model: GPT, gradient_of: Callable[..., Any]) -> Callable[[], Any]:
    optimizer = optax.adamw(1e-4)

    def step(params: Any, state: Any, batch: Any) -> Any:
        _, grads = gradient_of(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    batch = model.batch()
    compiled = jax.jit(step, donate_argnums=(0, 1))
    return stepping(model, lambda params, state: compiled(params, state, batch), optimizer)


def fed(model: GPT, optimizer: Any, **extra: Any) -> Callable[[], Any]:
    def micro_step(params: Any, state: Any, micro_batch: Any) -> Any:
        grads = jax.grad(model.loss)(params, micro_batch)
        updates, state = optimizer.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    compiled = jax.jit(micro_step, donate_argnums=(0, 1))
    micro_batches = [model.batch()[k : k + MICRO_BATCH_SIZE] for k in range(0, BATCH_SIZE, MICRO_BATCH_SIZE)]

    def step(params: Any, state: Any) -> Any:
        for micro_batch in micro_batches:
            params, state = compiled(params, state, micro_batch)
        return params, state

    return stepping(model, step, optimizer)


def stepping(model: GPT, step: Callable[..., Any], optimizer: Any) -> Callable[[], Any]:
    params = model.params()
    held = [params, optimizer.init(params)]

    def turn() -> Any:
        for _ in range(model.steps):
            held[:] = step(*held)
        return jax.block_until_ready(held)[0]

    return turn


def hand_scan(model: GPT) -> Callable[..., Any]:
    def gradient_of(params: Any, batch: Any) -> Any:
        def body(sums: Any, micro_batch: Any) -> Any:
            return jax.tree.map(jnp.add, sums, jax.value_and_grad(model.loss)(params, micro_batch)), None

        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        sums, _ = jax.lax.scan(body, zeros, batch.reshape(NUM, MICRO_BATCH_SIZE, -1))
        return jax.tree.map(lambda leaf: leaf / NUM, sums)

    return gradient_of


WAYS: dict[str, Callable[[GPT], Callable[[], Any]]] = {
    "full batch": lambda model: in_one_call(model, jax.value_and_grad(model.loss)),
    "`lax.scan` by hand": lambda model: in_one_call(model, hand_scan(model)),
    "bigbatch, `value_and_grad`": lambda model: in_one_call(model, value_and_grad(model.loss, MICRO_BATCH_SIZE)),
    "bigbatch, `multi_steps`, fed": lambda model: fed(
        model, multi_steps(optax.adamw(1e-4), NUM), weight=MICRO_BATCH_SIZE
    ),
    "optax, `MultiSteps`, fed": lambda model: fed(model, optax.MultiSteps(optax.adamw(1e-4), NUM)),
}


def peak(model: str, way: str) -> float:
    """GiB at the peak, of a process that does nothing else."""
    command = [sys.executable, "-m", "benchmarks.jax_gpu", "--memory", model, way]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout.splitlines()[-1])) / 2**30


def main() -> None:
    if sys.argv[1:2] == ["--memory"]:
        WAYS[sys.argv[3]](MODELS[sys.argv[2]])()
        print(json.dumps((jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)))
        return
    rows = []
    peaks = {(name, way): peak(name, way) for name in MODELS for way in WAYS}  # before this process takes memory
    for name, model in MODELS.items():
        contestants = {way: make(model) for way, make in WAYS.items()}
        times = interleaved(contestants, ROUNDS, WARMUP)
        for way, found in compare(times, "full batch").items():
            each = 1000 * found.seconds / model.steps
            rows.append([f"{name}: {way}", f"{each:.1f}", f"{found.ratio:.2f}", f"{peaks[name, way]:.2f}"])
    print(markdown_table(["", "ms per step", "full batch = 1", "peak GiB"], sorted(rows)))
    print(jax.devices()[0].device_kind, about(("jax", "optax")), sep=", ")


if __name__ == "__main__":
    main()
