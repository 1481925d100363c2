"""Compares TensorFlow, Keras's own accumulation and gradient-accumulator with the full batch: `make exactness`."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import warnings
from typing import Any

import keras
import numpy as np

from tests.problems import Problem, problems
from tests.tensorflow.training import Run, cut, flat, make_batches, make_model, update_error

from .exactness import LIMITS
from .tables import README, about, markdown_table, write_table

WAYS = ("batch", "window", "add")


def by_keras(problem: Problem) -> Run:
    """Keras accumulates a fixed number of micro-batches, which all count the same."""
    steps = problem.accumulation_steps if problem.accumulation_steps > 1 else None
    options = {"gradient_accumulation_steps": steps, "global_clipnorm": problem.clip_norm}
    run = Run(problem, lambda: keras.optimizers.SGD(0.1, **options))
    for batch in make_batches(problem):
        for micro_batch in cut(batch, problem.micro_batch_size):
            _, found = run._gradients(micro_batch)
            pairs = zip(found, run.model.trainable_variables, strict=True)
            run.optimizer.apply_gradients([(g, v) for g, v in pairs if g is not None])
    return run


def by_gradient_accumulator(problem: Problem, full: Run) -> str:
    """gradient-accumulator's model, trained by `fit`, for the cases that `fit` can express."""
    from gradient_accumulator import GradientAccumulateModel

    if problem.kind != "samples" or problem.clip_norm:
        return "–"
    plain = make_model(problem)
    model = GradientAccumulateModel(accum_steps=problem.accumulation_steps, inputs=plain.inputs, outputs=plain.outputs)
    model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    for batch in make_batches(problem):
        model.fit(batch["x"], batch["y"], batch_size=problem.micro_batch_size, shuffle=False, verbose=0)
    update = flat(plain) - full.before
    return shown(float(np.linalg.norm(update - full.update) / np.linalg.norm(full.update)))


def shown(error: float) -> str:
    return f"{error:.2f}" if error > 1e-3 else f"{error:.0e}"


def rows() -> list[list[str]]:
    found = []
    for problem in problems():
        full = Run(problem).full()
        ways = WAYS[:2] if problem.kind == "terms" else WAYS  # gradients from a tape already mix the terms
        ours = max(update_error(Run(problem).accumulated(way), full) for way in ways)
        assert ours <= LIMITS["sgd"]
        peer: Any = by_gradient_accumulator(problem, full)
        found.append([problem.name, f"{ours:.0e}", shown(update_error(by_keras(problem), full)), peer])
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    keras.config.set_floatx("float64")
    header = ["case", "bigbatch", "Keras `gradient_accumulation_steps`", "gradient-accumulator"]
    table = markdown_table(header, rows())
    on = about(("tensorflow", "keras", "gradient-accumulator"))
    write_table(README.parent / "docs" / "exactness.md", "tensorflow", f"{table}\n\n{on}")
    print(table)


if __name__ == "__main__":
    main()
