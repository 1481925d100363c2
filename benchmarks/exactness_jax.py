"""Compares one step of SGD in JAX with that of the full batch: `python -m benchmarks.exactness_jax`."""

import os

os.environ["JAX_ENABLE_X64"] = "1"

from typing import Any

import jax
import optax
from optax.microbatching import microbatch

from bigbatch.core.window import cuts
from bigbatch.jax import multi_steps, value_and_grad
from tests.jax.training import LOSSES, WEIGHTS, Batch, full_batch, gap, make_params
from tests.problems import Problem, problems

from .tables import README, about, markdown_table, write_table


def clipped(problem: Problem) -> optax.GradientTransformationExtraArgs:
    clip = optax.clip_by_global_norm(problem.clip_norm) if problem.clip_norm else optax.identity()
    return optax.chain(clip, optax.sgd(0.1))


def by_gradient(problem: Problem, gradient_of: Any) -> Any:
    """The update after all batches, with a function that returns the gradient of a whole batch."""
    optimizer, params = clipped(problem), make_params(problem)
    state = optimizer.init(params)
    for batch in problem.batches:
        updates, state = optimizer.update(gradient_of(params, batch), state, params)
        params = optax.apply_updates(params, updates)
    return jax.tree.map(lambda new, old: new - old, params, make_params(problem))


def fed(problem: Problem, optimizer: Any, *, is_ours: bool) -> Any:
    """The update after all micro-batches, fed one at a time."""
    params = make_params(problem)
    state = optimizer.init(params)
    for batch in problem.batches:
        for part in cuts(len(batch["x"]), problem.micro_batch_size):
            micro_batch = {name: array[part] for name, array in batch.items()}
            extra = {"weight": weight_of(problem, micro_batch)} if is_ours else {}
            grads = jax.grad(LOSSES[problem.kind])(params, micro_batch)
            updates, state = optimizer.update(grads, state, params, **extra)
            params = optax.apply_updates(params, updates)
        if is_ours:
            updates, state = optimizer.flush(state, params)
            params = optax.apply_updates(params, updates)
    return jax.tree.map(lambda new, old: new - old, params, make_params(problem))


def weight_of(problem: Problem, micro_batch: Batch) -> Any:
    weight = WEIGHTS[problem.kind]
    return len(micro_batch["x"]) if weight is None else weight(micro_batch)


def by_microbatch(problem: Problem, params: Any, batch: Batch) -> Any:
    """optax's `microbatch`, with the mean over its sums as in its documentation."""
    num = len(batch["x"]) // problem.micro_batch_size

    def loss(params: Any, batch: Batch) -> Any:
        found = LOSSES[problem.kind](params, batch)
        return sum(found) if isinstance(found, tuple) else found

    sums = microbatch(jax.grad(loss), argnums=1, microbatch_size=problem.micro_batch_size)(params, batch)
    return jax.tree.map(lambda leaf: leaf / num, sums)


def shown(error: float) -> str:
    return f"{error:.2f}" if not error <= 1e-3 else f"{error:.0e}"


def row(problem: Problem) -> list[str]:
    full = by_gradient(problem, lambda params, batch: full_batch(problem, params, batch)[1])
    loss, weight, size = LOSSES[problem.kind], WEIGHTS[problem.kind], problem.micro_batch_size
    ours = gap(by_gradient(problem, lambda *args: value_and_grad(loss, size, weight=weight)(*args)[1]), full)
    assert ours <= 1e-12
    if problem.kind == "terms":  # one gradient already mixes the terms
        ours_fed = theirs = "–"
    else:
        found = gap(fed(problem, multi_steps(clipped(problem), problem.accumulation_steps), is_ours=True), full)
        assert found <= 1e-12
        ours_fed = shown(found)
        peer = optax.MultiSteps(clipped(problem), problem.accumulation_steps)
        theirs = shown(gap(fed(problem, peer, is_ours=False), full))
    try:
        cut = shown(gap(by_gradient(problem, lambda *args: by_microbatch(problem, *args)), full))
    except ValueError:
        cut = "refused"
    return [problem.name, shown(ours), ours_fed, theirs, cut]


def main() -> None:
    header = ["case", "`value_and_grad`", "`multi_steps`", "optax `MultiSteps`", "optax `microbatch`"]
    table = markdown_table(header, [row(problem) for problem in problems()])
    write_table(README.parent / "docs" / "exactness.md", "jax", f"{table}\n\n{about(('jax', 'optax'))}")
    print(table)


if __name__ == "__main__":
    main()
