"""Full batch against accumulation, or against somebody else's loop: what to compare, and what to say of it.

A framework brings a `Trial`: a copy of the user's model and the ways to take its gradient.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from .diagnosis import Array, Mix, explain_loop, explain_loss, unmix
from .errors import LossError
from .verification import Verification, judge, relative_error
from .weight import Reduction

Gradient = Mapping[str, Array]  # by the parameter's name; a parameter without a gradient is not in it
Loop = Callable[[Any, list[Any]], Any]


class Trial(Protocol):
    """A copy of the user's model, a batch, and the ways to take its gradient."""

    reduction: Reduction

    def full(self) -> Gradient:
        """Of the whole batch, plainly."""

    def accumulated(self) -> Gradient:
        """As the accumulator hands it to an optimizer."""

    def micro(self, number: int) -> Gradient:
        """Of one micro-batch alone."""

    def by_loop(self, loop: Loop) -> tuple[Gradient, Gradient]:
        """What a foreign loop leaves, and what it leaves when it runs again with nothing in between."""

    def right_scales(self) -> Array:
        """How much each micro-batch should count: a row each, a column for each term."""

    def notes(self) -> list[str]:
        """What was done so that the two could be compared at all."""

    def layer_causes(self) -> list[str]:
        """Layers that see the micro-batch instead of the batch."""

    def quiet(self) -> AbstractContextManager[None]:
        """Inside, such layers and dropout are out of the way."""

    def without_dropout(self) -> AbstractContextManager[None]:
        """Inside, dropout is out of the way; `notes` says so if there was any."""


def audit(trial: Trial, tolerance: float) -> Verification:
    """The accumulator against the full batch."""
    full = trial.full()
    if not full:
        raise LossError("the loss reached none of the model's parameters: compute it with the model it is given")
    accumulated = trial.accumulated()
    errors = errors_of(full, accumulated)
    causes = trial.notes()
    verdict = judge(errors, [], tolerance)
    if not verdict.is_exact:
        found = trial.layer_causes()
        with trial.quiet():
            found += _loss_causes(trial, tolerance)
        causes += found or _unexplained(verdict)
    return judge(errors, causes, tolerance, total_error_of(full, accumulated))


def audit_loop(trial: Trial, loop: Loop, tolerance: float) -> Verification:
    """Somebody else's loop against the full batch."""
    trial.full()  # shows whether there is dropout
    with trial.without_dropout():
        full = trial.full()
        found, again = trial.by_loop(loop)
        errors = errors_of(full, found)
        causes = trial.notes()
        verdict = judge(errors, [], tolerance)
        if not verdict.is_exact:
            told = [*trial.layer_causes(), *_explained(trial, found, explain_loop)]
            causes += told or _unexplained(verdict)
    if max(errors_of({name: 2 * g for name, g in found.items()}, again).values(), default=1.0) < 1e-6:
        causes.append(
            "gradients are not zeroed: a second window adds to the first, which is right only if "
            "something else zeroes them after each step"
        )
    return judge(errors, causes, tolerance, total_error_of(full, found))


def _loss_causes(trial: Trial, tolerance: float) -> list[str]:
    """What is wrong with loss or weight themselves."""
    full = trial.full()
    if judge(errors_of(full, trial.accumulated()), [], tolerance).is_exact or len(trial.right_scales()) < 2:
        return []
    return _explained(trial, full, lambda mix, right: explain_loss(mix, right, trial.reduction))


def _explained(trial: Trial, gradient: Gradient, explain: Callable[[Mix, Array], str | None]) -> list[str]:
    """What the mix of micro-batches in a gradient says about it."""
    right = trial.right_scales()
    if right.shape[1] > 1:
        return ["a term of the loss is no mean over its weight, or couples the samples of a batch"]
    counted = np.flatnonzero(right[:, 0])  # the mean over nothing may be 0/0
    products = products_of([*(trial.micro(int(k)) for k in counted), gradient])
    if not np.isfinite(products).all():
        return ["a gradient is not finite"]
    cause = explain(unmix(products), right[counted, 0])
    return [cause] if cause else []


def _unexplained(verdict: Verification) -> list[str]:
    if verdict.is_exact:
        return []
    if verdict.max_error < 1e-4:
        return [
            f"a difference of {verdict.max_error:.0e} is the size of rounding in float32: something in the model or "
            "the loss computes in less than float64"
        ]
    return ["the cause could not be told from the gradients"]


def errors_of(full: Gradient, other: Gradient) -> dict[str, float]:
    """The relative error of each parameter's gradient; one that is missing on one side counts as zero there."""
    norms = {name: float(np.linalg.norm(g)) for name, g in full.items()}
    total = float(np.linalg.norm(list(norms.values())))
    errors = {}
    for name in [*full, *(name for name in other if name not in full)]:
        distance = float(np.linalg.norm(np.asarray(other.get(name, 0.0)) - np.asarray(full.get(name, 0.0))))
        errors[name] = relative_error(distance, norms.get(name, 0.0), total)
    return errors


def total_error_of(full: Gradient, other: Gradient) -> float:
    """The relative error of the whole gradient."""
    names = [*full, *(name for name in other if name not in full)]
    differences = [np.linalg.norm(np.asarray(other.get(n, 0.0)) - np.asarray(full.get(n, 0.0))) for n in names]
    norm = float(np.linalg.norm([np.linalg.norm(g) for g in full.values()]))
    return relative_error(float(np.linalg.norm(differences)), norm, norm)


def products_of(found: Sequence[Gradient]) -> Array:
    """The dot products of gradients with each other."""
    products = np.zeros((len(found), len(found)))
    for name in {name for gradient in found for name in gradient}:
        like = next(g[name] for g in found if name in g)
        rows = np.stack([np.ravel(g.get(name, np.zeros_like(like))) for g in found])
        products += (rows @ rows.conj().T).real
    return products
