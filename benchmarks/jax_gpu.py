"""Compares JAX on a GPU with the full batch, a hand-written scan and optax: the part `jax` of `benchmarks.gpu`."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bigbatch.jax import multi_steps, value_and_grad

from .measured import parsed, write
from .sizes import BATCH_SIZE, GPT2, GPT2_SMALL, MICRO_BATCH_SIZE, REHEARSAL, TINY, TINY_GPT, Size
from .timing import interleaved, several

NUM = BATCH_SIZE // MICRO_BATCH_SIZE
TOLERANCE = 3e-2
FULL, BY_HAND = "full batch", "`lax.scan` by hand"


def adamw() -> optax.GradientTransformation:
    """AdamW with an epsilon that makes the first update nearly the gradient itself, so that a wrong scale shows."""
    return optax.adamw(1e-2, eps=1.0, weight_decay=0.0)


@dataclass(frozen=True)
class GPT:
    size: Size

    def params(self) -> Any:
        def normal(*shape: int) -> Any:
            return jnp.asarray(draw.normal(0, 0.02, shape), jnp.float32)

        draw, width, num = np.random.default_rng(0), self.size.width, self.size.layers
        return {
            "tokens": normal(self.size.classes, width),
            "places": normal(self.size.length, width),
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
            heads = (*x.shape[:2], self.size.heads, self.size.width // self.size.heads)
            implementation = "cudnn" if has_gpu() else None
            seen = jax.nn.dot_product_attention(
                *(a.reshape(heads) for a in (q, k, v)), is_causal=True, implementation=implementation
            )
            x = x + seen.reshape(x.shape) @ layer["project"]
            return x + jax.nn.gelu(norm(x) * layer["scale"][1] @ layer["widen"]) @ layer["narrow"], None

        x, _ = jax.lax.scan(block, x, params["blocks"])
        logits = (norm(x) @ params["tokens"].T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    def batch(self) -> Any:
        """Random tokens."""
        shape = BATCH_SIZE, self.size.length + 1
        return jnp.asarray(np.random.default_rng(1).integers(self.size.classes, size=shape), jnp.int32)

    def hand_scan(self, params: Any, batch: Any) -> Any:
        def body(sums: Any, micro_batch: Any) -> Any:
            return jax.tree.map(jnp.add, sums, jax.value_and_grad(self.loss)(params, micro_batch)), None

        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        sums, _ = jax.lax.scan(body, zeros, batch.reshape(NUM, MICRO_BATCH_SIZE, -1))
        return jax.tree.map(lambda leaf: leaf / NUM, sums)


def norm(x: Any) -> Any:
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(-1, keepdims=True)
    return (wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype)


class Contestant:
    """A compiled function of parameters, state and micro-batch, called for each micro-batch of a step."""

    def __init__(self, params: Any, gradient_of: Callable[..., Any], optimizer: Any, micro_batches: Any, **extra: Any):
        def step(params: Any, state: Any, batch: Any) -> Any:
            _, grads = gradient_of(params, batch)
            updates, state = optimizer.update(grads, state, params, **extra)
            return optax.apply_updates(params, updates), state

        held = jax.tree.map(partial(jnp.array, copy=True), (params, optimizer.init(params)))  # because it is donated
        self.held, self.micro_batches = held, micro_batches
        self.compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*held, micro_batches[0]).compile()

    def step(self) -> Any:
        for micro_batch in self.micro_batches:
            self.held = self.compiled(*self.held, micro_batch)
        return self.held[0]

    def peak(self) -> int:
        """Bytes according to the compiler, including parameters and state."""
        found = self.compiled.memory_analysis()
        outputs = found.output_size_in_bytes - found.alias_size_in_bytes
        return int(found.argument_size_in_bytes + outputs + found.temp_size_in_bytes)


def contestants(model: GPT, params: Any) -> dict[str, Contestant]:
    batch = model.batch()
    cut = [batch[k : k + MICRO_BATCH_SIZE] for k in range(0, BATCH_SIZE, MICRO_BATCH_SIZE)]
    plain, ours = jax.value_and_grad(model.loss), value_and_grad(model.loss, MICRO_BATCH_SIZE)
    return {
        FULL: Contestant(params, plain, adamw(), [batch]),
        BY_HAND: Contestant(params, model.hand_scan, adamw(), [batch]),
        "bigbatch, `value_and_grad`": Contestant(params, ours, adamw(), [batch]),
        "bigbatch, `multi_steps`, fed": Contestant(
            params, plain, multi_steps(adamw(), NUM), cut, weight=MICRO_BATCH_SIZE
        ),
        "optax, `MultiSteps`, fed": Contestant(params, plain, optax.MultiSteps(adamw(), NUM), cut),
    }


def errors(made: dict[str, Contestant], params: Any) -> dict[str, float]:
    """The relative error of each first update, against the hand-written scan."""

    def flat(tree: Any) -> Any:
        return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(tree)])

    start = flat(params)
    updates = {name: flat(one.step()) - start for name, one in made.items()}
    size = jnp.linalg.norm(updates[BY_HAND])
    assert size > 0, "the scan by hand made no step"
    found = {name: float(jnp.linalg.norm(update - updates[BY_HAND]) / size) for name, update in updates.items()}
    assert all(error <= TOLERANCE for error in found.values()), found
    return found


def measure(size: Size, rounds: int, steps: int) -> dict[str, Any]:
    model = GPT(size)
    params = model.params()
    made = contestants(model, params)
    found: dict[str, Any] = {"errors": errors(made, params)}
    found["peaks"] = {name: {"allocated": one.peak()} for name, one in made.items()}

    def wait() -> None:
        jax.block_until_ready([one.held for one in made.values()])

    times = interleaved({name: several(one.step, steps) for name, one in made.items()}, rounds, 2, wait)
    found["times"] = {name: [seconds / steps for seconds in times[name]] for name in made}
    return found


def has_gpu() -> bool:
    return jax.default_backend() == "gpu"


def main() -> None:
    options = parsed()
    if options.device == "cuda" and not has_gpu():
        print("JAX is left out: it sees no GPU.")
        return
    sizes = {GPT2: (GPT2_SMALL, 10, 1), TINY: (TINY_GPT, 10, 20)}
    found: dict[str, Any] = {}
    for name, (size, rounds, steps) in sizes.items():
        found[name] = measure(REHEARSAL, 3, 2) if options.tiny else measure(size, rounds, steps)
    device = jax.devices()[0].device_kind if has_gpu() else None
    write("jax", found, ("jax", "optax"), device, options)


if __name__ == "__main__":
    main()
