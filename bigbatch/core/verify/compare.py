"""Compares the accumulated gradient with that of the full batch, and names the cause if they differ."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

from ..errors import LossError
from .diagnosis import Experiments
from .result import Verification, errors_of, floor_for, judge, tolerance_for, total_error_of
from .trial import Gradient, Loop, Trial


def audit(trial: Trial, tolerance: float | None = None, loop: Loop | None = None) -> Verification:
    """Compares accumulation with the full batch.

    Args:
        trial: The model and the batch.
        tolerance: The largest relative error that counts as exact; it follows from the precision if it is None.
        loop: The user's own loop, compared instead of the accumulator.
    """
    with nullcontext() if loop is None else trial.without_dropout():
        full = trial.full()
        if not full:
            raise LossError("the loss reached none of the model's parameters: compute it with the model it is given")
        found, again = (trial.accumulated(), None) if loop is None else trial.by_loop(loop)
        causes, epsilon = trial.notes(), trial.epsilon
        if not _verdict(trial, full, found, tolerance):
            reasons = trial.explained()
            if not reasons:
                reasons, epsilon = _experiment(trial, full, found, tolerance, loop)
            if not reasons and not causes:
                reasons = ["the cause could not be determined from the gradients"]
            causes += reasons
    if again is not None:
        twice = {name: 2 * gradient for name, gradient in found.items()}
        if max(errors_of(twice, again).values(), default=1.0) < 1e-6:
            causes.append(
                "gradients are not zeroed: a second window adds to the first, which is right only if something else "
                "zeroes them after each step"
            )
    causes += trial.mode()
    if len(trial.parts) < 2:
        causes.append(
            "one micro-batch holds the whole batch, so nothing was cut and this proves nothing: pass a smaller "
            "micro_batch_size"
        )
    return _verdict(trial, full, found, tolerance, causes, epsilon)


def _experiment(
    trial: Trial, full: Gradient, found: Gradient, tolerance: float | None, loop: Loop | None
) -> tuple[list[str], float]:
    """Why the two gradients differ, and the epsilon of the precision in which they turn out to be computed."""
    experiments = Experiments(trial)
    if (obstacle := experiments.obstacle()) is not None:
        return [obstacle], trial.epsilon
    has_hooks = trial.has_hooks
    with trial.without_hooks():
        if has_hooks:
            full, found = trial.full(), trial.accumulated() if loop is None else trial.by_loop(loop)[0]
        if loop is None:
            return experiments.explain_loss(full, found), experiments.epsilon
        if has_hooks and _verdict(trial, full, found, tolerance):
            return [
                *trial.layer_causes(),
                "hooks of parameters act on the gradient of each micro-batch instead of that of the batch: run them "
                "once, after the last backward pass",
            ], trial.epsilon
        return experiments.explain_loop(loop, full, found), experiments.epsilon


def _verdict(
    trial: Trial,
    full: Gradient,
    found: Gradient,
    tolerance: float | None,
    causes: Sequence[str] = (),
    epsilon: float | None = None,
) -> Verification:
    """The verdict on two gradients that were computed with this epsilon: the trial's if it is None."""
    epsilon = trial.epsilon if epsilon is None else epsilon
    if tolerance is None:
        tolerance = tolerance_for(epsilon, sum(map(len, trial.parts)), len(trial.parts))
    errors = errors_of(full, found, floor_for(epsilon))
    verdict = judge(errors, list(causes), tolerance, total_error_of(full, found))
    return verdict if epsilon == trial.epsilon else replace(verdict, precision="float64 with parts in float32")
