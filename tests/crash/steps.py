"""Many small steps: memory stays flat, and no file handle or thread leaks.

`python -m tests.crash.steps --framework torch --steps 100000 [--report FILE]`
"""

import argparse
import gc
import os
import random
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np

ALLOWED = 0.02
NUM_WATCHED = 100
Step = Callable[[int], None]


def drawn(number: int) -> tuple[np.ndarray, np.ndarray]:
    """Yields ragged batches; one in 97 has a non-finite value."""
    draw = random.Random(number)
    size = draw.randint(1, 12)
    x = np.full((size, 8), draw.random(), np.float32)
    if number % 97 == 50:
        x[0, 0] = np.nan
    return x, np.full((size, 3), 0.1, np.float32)


def of_torch(folder: Path) -> tuple[Step, Callable[[], None]]:
    """Takes turns with whole batches, windows, micro-batches, checkpoints and loaded states."""
    import torch

    from bigbatch import Window
    from bigbatch.torch import Accumulator, Checkpoints

    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss(model: Any, batch: Any) -> Any:
        return (model(batch[0]) - batch[1]).square().mean()

    accumulator = Accumulator(model, optimizer, loss, 4, accumulation_steps=2, clip_norm=1.0)
    checkpoints = Checkpoints(folder, accumulator, every=None)

    def step(number: int) -> None:
        batch = tuple(map(torch.from_numpy, drawn(number)))
        if number % 3 == 0:
            accumulator.step(batch)
        elif number % 3 == 1:
            accumulator.step(Window([batch, batch]))
        else:
            for _ in range(2):
                with accumulator.micro_batch(weight=len(batch[0])) as micro:
                    micro.backward(loss(model, batch))
        if number % 1000 == 999:
            checkpoints.save()
            accumulator.load_state_dict(accumulator.state_dict())

    return step, checkpoints.close


def of_tensorflow(folder: Path) -> tuple[Step, Callable[[], None]]:
    import keras
    import tensorflow as tf

    from bigbatch.tensorflow import Accumulator, Checkpoints

    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(3)])
    optimizer = keras.optimizers.Adam(1e-3)

    def loss(model: Any, batch: Any) -> Any:
        return tf.reduce_mean(tf.square(model(batch[0]) - batch[1]))

    accumulator = Accumulator(model, optimizer, loss, 4, clip_norm=1.0)
    checkpoints = Checkpoints(folder, accumulator, every=None)

    def step(number: int) -> None:
        accumulator.step(tuple(map(tf.constant, drawn(number))))
        if number % 1000 == 999:
            checkpoints.save()

    return step, checkpoints.close


def of_jax(folder: Path) -> tuple[Step, Callable[[], None]]:
    import jax
    import jax.numpy as jnp
    import optax

    from bigbatch.jax import Checkpoints, value_and_grad

    def loss(params: Any, batch: Any) -> Any:
        return jnp.square(jnp.tanh(batch[0] @ params["a"]) @ params["b"] - batch[1]).mean()

    optimizer = optax.apply_if_finite(optax.adamw(1e-3), 10)

    @jax.jit
    def update(params: Any, state: Any, batch: Any) -> Any:
        _, gradient = value_and_grad(loss, 4)(params, batch)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    params = {"a": jnp.full((8, 16), 0.1), "b": jnp.full((16, 3), 0.1)}
    state = [(params, optimizer.init(params))]
    checkpoints = Checkpoints(folder, every=None)

    def step(number: int) -> None:
        state[0] = update(*state[0], drawn(number))
        if number % 1000 == 999:
            checkpoints.update(state[0])
            checkpoints.save()

    return step, checkpoints.close


FRAMEWORKS = {"torch": of_torch, "tensorflow": of_tensorflow, "jax": of_jax}


def resident() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def handles() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    return found


def soak(framework: str, num_steps: int) -> dict[str, Any]:
    """Measures memory, handles and threads after a tenth of the steps and at the end."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about skipped steps
        step, close = FRAMEWORKS[framework](Path(folder))
        began = time.monotonic()
        sizes = []
        files: set[str] = set()
        for number in range(num_steps):
            step(number)
            if number == num_steps // 10:
                close()
                files, threads = handles(), threading.active_count()
            if number >= num_steps // 10 and number % max(1, num_steps // NUM_WATCHED) == 0:
                sizes.append(resident())
        close()
        return {
            "framework": framework,
            "steps": num_steps,
            "seconds": round(time.monotonic() - began, 1),
            "mib": round(sizes[0] / 2**20, 1),
            "growth": max(sizes) / sizes[0] - 1,
            "handles": sorted(handles() - files),
            "threads": threading.active_count() - threads,
        }


def complaints(found: dict[str, Any]) -> list[str]:
    wrong = []
    if found["growth"] > ALLOWED:
        wrong.append(f"resident memory grew by {found['growth']:.1%}, {ALLOWED:.0%} is allowed")
    if found["handles"]:
        wrong.append(f"{len(found['handles'])} file handles are left over: {found['handles'][0]}")
    if found["threads"] > 0:
        wrong.append(f"{found['threads']} threads are left over")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--framework", choices=FRAMEWORKS, default="torch")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--report", type=Path)
    options = parser.parse_args()
    found = soak(options.framework, options.steps)
    line = (
        f"{found['framework']}: {found['steps']} steps in {found['seconds']} s, resident memory {found['mib']} MiB, at "
        f"most {found['growth']:+.2%} from a tenth on; {len(found['handles'])} file handles and {found['threads']} "
        "threads left over"
    )
    print(line)
    if options.report is not None:
        options.report.parent.mkdir(parents=True, exist_ok=True)
        with options.report.open("a") as file:
            file.write(f"- {line}\n")
    if wrong := complaints(found):
        sys.exit("; ".join(wrong))


if __name__ == "__main__":
    main()
