"""A training that can be stopped in the middle of a window and continued by another process.

python -m tests.jax.resume FIRST LAST FOLDER: feeds the micro-batches FIRST to LAST; reads parameters and state from
FOLDER unless FIRST is 0, and writes them there.
"""

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp

from bigbatch.jax import multi_steps
from tests.problems import samples

from .feeding import cut, feed, make_params

NUM_MICRO_BATCHES = 10


def begin() -> tuple[Any, Any]:
    optimizer = multi_steps(optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.05)), 4)
    return optimizer, make_params()


def micro_batches(first: int, last: int) -> list[Any]:
    """Micro-batches of two and one digits in turn."""
    return [m for batch in samples(*[3] * (NUM_MICRO_BATCHES // 2)) for m in cut(batch, 2)][first:last]


def main(first: int, last: int, folder: Path, *, is_whole: bool = True) -> Any:
    """Trains and returns the parameters. Without `is_whole`, the sums are dropped, for a negative control."""
    optimizer, params = begin()
    state = optimizer.init(params)
    with ocp.StandardCheckpointer() as checkpointer:
        if first:
            abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, (params, state))
            params, saved = checkpointer.restore(folder / str(first), abstract)
            state = saved if is_whole else state._replace(inner_state=saved.inner_state)
        params, state = feed(optimizer, params, micro_batches(first, last), state)
        checkpointer.save(folder / str(last), (params, state))
    if last == NUM_MICRO_BATCHES:
        updates, state = optimizer.flush(state, params)
        params = optax.apply_updates(params, updates)
        np.savez(folder / "ended.npz", step=state.step, **params)
    return params


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
