"""Full batch against accumulation, or against somebody else's loop: what to compare, and what to say of it.

A framework brings a `Trial`: a copy of the user's model and the ways to take its gradient. No cause is guessed from the
difference alone: each is the outcome of an experiment with the loss or the loop.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from itertools import chain
from typing import Any, Protocol

import numpy as np

from ..errors import LossError
from ..weight import Reduction
from .diagnosis import (
    ADDS_UP,
    CLIPPED,
    COUPLED,
    MEAN_ADDED_UP,
    Array,
    Mix,
    disagrees,
    explain_loop,
    is_clipped,
    odd_one,
    unmix,
)
from .linearity import is_same, nature
from .result import Verification, floor_for, judge, relative_error, tolerance_for
from .sketch import SIZE, sizes_of, sketch

Gradient = Mapping[str, Array]  # by the parameter's name; a parameter without a gradient is not in it
Loop = Callable[[Any, list[Any]], Any]
Rows = Sequence[int]
Halves = tuple[list[int], list[int]]  # two groups of micro-batches


class Trial(Protocol):
    """A copy of the user's model, a batch, and the ways to take its gradient."""

    reduction: Reduction
    epsilon: float
    """Of the dtype in which all this is computed."""

    @property
    def parts(self) -> Sequence[Rows]:
        """The samples of each micro-batch."""

    def full(self) -> Gradient:
        """Of the whole batch, plainly."""

    def accumulated(self) -> Gradient:
        """As the accumulator hands it to an optimizer."""

    def of(self, rows: Rows, term: int | None = None) -> tuple[Gradient, float]:
        """Of these samples in one pass, some of them perhaps several times; of one term of the loss or of their sum.

        With the loss itself.

        Always from the same state and the same random numbers, and without hooks of parameters.
        """

    def by_loop(self, loop: Loop, order: Rows | None = None) -> tuple[Gradient, Gradient]:
        """What a foreign loop leaves, and what it leaves when it runs again with nothing in between.

        `order` says which micro-batches it is given, if not all of them one after the other.
        """

    def explained(self) -> list[str]:
        """What explains any difference by itself: what a loop does with its optimizers, say."""

    def right_scales(self) -> Array:
        """How much each micro-batch should count: a row each, a column for each term."""

    def notes(self) -> list[str]:
        """What was done so that the two could be compared at all."""

    def layer_causes(self) -> list[str]:
        """Layers that see the micro-batch instead of the batch."""

    def blind_spots(self) -> list[str]:
        """What this comparison could not see."""

    def cut_elsewhere(self, is_mean: Callable[[Gradient, Gradient, Gradient], bool]) -> str | None:
        """Along which other axis the samples are, if cutting along it works (`is_mean(whole, first, second)`)."""

    def carried_over(self) -> list[str]:
        """What a pass changes so that the next one sees it, by name."""

    @property
    def is_random(self) -> bool:
        """Whether random numbers were drawn that cannot be cut like the batch."""

    @property
    def has_hooks(self) -> bool:
        """Whether hooks of parameters change their gradients."""

    def quiet(self) -> AbstractContextManager[None]:
        """Inside, such layers and dropout are out of the way."""

    def without_dropout(self) -> AbstractContextManager[None]:
        """Inside, dropout is out of the way; `notes` says so if there was any."""

    def without_hooks(self) -> AbstractContextManager[None]:
        """Inside, hooks of parameters do nothing."""


ONE_MICRO_BATCH = (
    "one micro-batch holds the whole batch, so nothing was cut and this proves nothing: pass a smaller micro_batch_size"
)
CHANGES = (
    "the loss gives another gradient each time it is called with the same batch (it keeps a state, or draws from a "
    "random generator of its own), so nothing can be compared: make it repeatable"
)
TOO_COARSE = "rounding in this precision is too coarse to tell the cause: compare in float32 or float64"
UNCLEAR = (
    "the loss is no single mean over samples: it is the sum of several means, or it couples the samples; more than "
    "that cannot be told in this precision"
)
NO_MEAN = "the loss of the whole batch is not the mean of those of its micro-batches, weighted as `weight` says"
BACKWARD = (
    "the losses of the micro-batches add up to that of the whole batch, but their gradients do not: something in the "
    "backward pass sees the micro-batch instead of the batch (a hook on an activation that clamps, a backward function "
    "of your own that normalises, an embedding with scale_grad_by_freq)"
)
MEANS = (
    "the loss behaves like one that adds up several means over different counts (over the tokens and over the samples, "
    "say): return a tuple of terms, and let `weight` return one count for each"
)
SUM_AND_MEAN = (
    "the loss adds a sum over samples and a mean: take the mean of both, or return them as a tuple of terms, and let "
    "`weight` return one count for each"
)
SUM_AND_PENALTY = (
    "the loss adds a sum over samples and something that does not depend on them (an L2 penalty, say), which every "
    "micro-batch repeats: take the mean over the samples, or use the optimizer's weight_decay"
)
LOOP_IS_RANDOM = "random numbers differ between the loop and the full batch, so the rest could not be compared"
HOOKS = (
    "hooks of parameters act on the gradient of each micro-batch instead of that of the batch: run them once, after "
    "the last backward pass"
)


def audit(trial: Trial, tolerance: float | None = None) -> Verification:
    """The accumulator against the full batch. The tolerance follows from the precision unless it is given."""
    full = trial.full()
    if not full:
        raise LossError("the loss reached none of the model's parameters: compute it with the model it is given")
    accumulated = trial.accumulated()
    causes, epsilon = trial.notes(), trial.epsilon
    if not judged(trial, full, accumulated, tolerance).is_exact:
        if not (told := trial.explained()):
            experiments = Experiments(trial)
            told = experiments.loss(full, accumulated)
            epsilon = experiments.found_epsilon
        causes += told or _unexplained(causes)
    causes += trial.blind_spots() + ([ONE_MICRO_BATCH] if len(trial.parts) < 2 else [])
    return judged(trial, full, accumulated, tolerance, causes, epsilon)


def audit_loop(trial: Trial, loop: Loop, tolerance: float | None = None) -> Verification:
    """Somebody else's loop against the full batch."""
    trial.full()  # shows whether there is dropout
    with trial.without_dropout():
        full = trial.full()
        found, again = trial.by_loop(loop)
        causes, epsilon = trial.notes(), trial.epsilon
        if not judged(trial, full, found, tolerance).is_exact:
            if not (told := trial.explained()):
                experiments = Experiments(trial)
                told = experiments.loop(loop, full, found, tolerance)
                epsilon = experiments.found_epsilon
            causes += told or _unexplained(causes)
    if max(errors_of({name: 2 * g for name, g in found.items()}, again).values(), default=1.0) < 1e-6:
        causes.append(
            "gradients are not zeroed: a second window adds to the first, which is right only if "
            "something else zeroes them after each step"
        )
    causes += trial.blind_spots() + ([ONE_MICRO_BATCH] if len(trial.parts) < 2 else [])
    return judged(trial, full, found, tolerance, causes, epsilon)


def judged(
    trial: Trial,
    full: Gradient,
    other: Gradient,
    tolerance: float | None,
    causes: Sequence[str] = (),
    epsilon: float | None = None,
) -> Verification:
    """The verdict over two gradients that were computed with this epsilon."""
    epsilon = trial.epsilon if epsilon is None else epsilon
    if tolerance is None:
        tolerance = tolerance_for(epsilon, sum(map(len, trial.parts)), len(trial.parts))
    errors = errors_of(full, other, floor_for(epsilon))
    verdict = judge(errors, list(causes), tolerance, total_error_of(full, other))
    return verdict if epsilon == trial.epsilon else replace(verdict, precision="float64 with parts in float32")


def _unexplained(known: list[str]) -> list[str]:
    return [] if known else ["the cause could not be told from the gradients"]


class Experiments:
    """What there is to try once two gradients differ."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.all_rows = sorted(chain.from_iterable(trial.parts))
        self.sizes: dict[str, int] = {}
        self.unit = 1.0
        self.found_epsilon = trial.epsilon
        """Larger if the difference turns out to be the rounding of another precision."""
        whole = self.of(self.all_rows)
        self.unit = float(np.linalg.norm(whole[:-1])) / abs(whole[-1] or 1.0) or 1.0
        whole = self.of(self.all_rows)
        first, again = self.sketch(trial.full()), self.sketch(trial.full())  # traced anew, where a framework traces
        self.is_repeatable = self._agree(first, again, 1e-3 if trial.epsilon > 1e-10 else 1e-6)
        shuffled = np.random.default_rng(0).permutation(self.all_rows).tolist()
        own, moved = 8 * max(trial.epsilon, self.epsilon), np.inf
        with suppress(Exception):  # a loss may refuse what is only tried out
            moved = float(np.linalg.norm(self.of(shuffled) - whole) / (np.linalg.norm(whole) or 1.0))
        self.noise = max(own, moved) if moved < 1e-4 else own  # more than that is no rounding: the order matters

    @staticmethod
    def _agree(one: Array, other: Array, close: float) -> bool:
        return not np.isfinite(one).all() or is_same(one, other, close)

    def of(self, rows: Rows, term: int | None = None) -> Array:
        """The gradient and behind it the loss, as long as the gradient is: whatever a loss is, both are alike."""
        gradient, loss = self.trial.of(rows, term)
        if not self.sizes:
            least = 1e-6 * max(map(np.linalg.norm, gradient.values()), default=0.0)  # less is rounding itself
            is_narrow = any(is_rounded(g) for g in gradient.values() if np.linalg.norm(g) > least)
            self.epsilon = EPSILON32 if is_narrow else 0.0
        return np.append(self.sketch(gradient), loss * self.unit)

    def sketch(self, gradient: Gradient) -> Array:
        if not self.sizes:
            self.sizes = sizes_of(gradient)
        if any(name not in self.sizes for name in gradient):  # parameters that another cut of the batch reaches
            self.sizes = self.sizes | sizes_of(gradient)
        return sketch(gradient, self.sizes)

    def with_norm(self, gradient: Gradient) -> tuple[Array, float]:
        return self.sketch(gradient), float(np.linalg.norm([np.linalg.norm(g) for g in gradient.values()]))

    def _with(self, mix: Mix, norms: list[float]) -> Mix:
        """With the norms of the gradients themselves, where sketches are shorter."""
        return replace(mix, norms=np.array(norms)) if sum(self.sizes.values()) > SIZE else mix

    def untold(self) -> str | None:
        """Why no experiment would show anything, if none would."""
        if not self.is_repeatable:
            return CHANGES
        return TOO_COARSE if self.noise > 1e-2 else None

    @property
    def close(self) -> float:
        return max(1e-9, 20 * self.noise)

    # --- the loss --------------------------------------------------------------------------------------------

    def loss(self, full: Gradient, accumulated: Gradient) -> list[str]:
        """Why accumulation is not exact: in the layers, in what passes leave behind, or in the loss."""
        trial = self.trial
        if (said := self.untold()) is not None:
            return [said]
        has_hooks = trial.has_hooks
        with trial.without_hooks():
            if has_hooks:
                full, accumulated = trial.full(), trial.accumulated()
            whole, ours = self.sketch(full), self.sketch(accumulated)
            if not np.isfinite(whole).all():
                return ["the gradient of the whole batch is not finite"]
            causes = trial.layer_causes()
            if not trial.is_random and self._adds_up(self.all_rows):
                if is_same(whole, ours, self.close):
                    return [*causes, self._rounding(whole, ours)]
                names = ", ".join(trial.carried_over()) or "a state of the model or of the loss"
                return [
                    *causes,
                    f"a pass changes what the next one sees ({names}): each micro-batch from the same start adds up to "
                    "the full batch, one after the other they do not",
                ]
            with trial.quiet():
                return causes + self.terms()

    def _rounding(self, whole: Array, ours: Array) -> str:
        by = float(np.linalg.norm(whole - ours) / (np.linalg.norm(whole) or 1.0))
        seen = (
            f"a difference of {by:.0e} is the size of rounding (the same samples in another order change the gradient "
            f"by {self.noise:.0e})"
        )
        if not 1e-12 < self.noise < 1e-4:
            return seen
        self.found_epsilon = max(EPSILON32, self.trial.epsilon)
        return f"{seen}: something in the model or the loss computes in float32"

    def _adds_up(self, rows: Rows) -> bool:
        right = self.trial.right_scales()
        whole = ours = np.zeros(1)
        for term in range(right.shape[1]):
            which = term if right.shape[1] > 1 else None
            whole = whole + self.of(rows, which)
            for part, scale in zip(self.trial.parts, right[:, term], strict=True):
                if scale:
                    ours = ours + scale * self.of(part, which)
        return is_same(ours[:-1], whole[:-1], self.close)

    def terms(self) -> list[str]:
        """What is wrong with loss or weight themselves."""
        self.trial.full()  # what it draws here
        right = self.trial.right_scales()
        num = right.shape[1]
        if num == 1:
            cause = self.term(None, right[:, 0])
            return [cause] if cause else []
        found = [(number, self.term(number, right[:, number])) for number in range(num)]
        return [f"term {number + 1} of {num}: {cause}" for number, cause in found if cause]

    def term(self, term: int | None, right: Array) -> str | None:
        trial = self.trial
        micro = [self.of(part, term) for part in trial.parts]
        finite = [k for k, g in enumerate(micro) if np.isfinite(g).all()]
        if missing := [k for k in range(len(micro)) if k not in finite and right[k]]:
            what = "gradient" if np.isfinite([micro[k][-1] for k in missing]).all() else "loss"
            return (
                f"the {what} of micro-batch {', '.join(str(k + 1) for k in missing)} alone is not finite, that of "
                "the whole batch is: a mean over nothing is 0/0 (for a micro-batch without a label let `weight` return "
                "0), and so is the gradient of a standard deviation of one sample"
            )
        whole = self.of(self.all_rows, term)
        if is_same(np.sum([right[k] * micro[k] for k in finite], axis=0)[:-1], whole[:-1], self.close):
            return None
        if len(finite) < 2:
            return None
        mix = unmix(products_of([*(micro[k] for k in finite), whole]), self.noise)
        kind, ratio, halves, refusal = self._law(finite, micro, mix, term)
        if refusal is not None:
            return f"{NO_MEAN}; why could not be found out, because the loss refuses other batches ({refusal})"
        if kind == "mean":
            if trial.reduction == "sum":
                return MEAN_ADDED_UP
            if mix.is_known and np.all(mix.coefficients >= -mix.close):
                return disagrees(np.abs(mix.coefficients), right[finite])
            names = [", ".join(str(k + 1) for k in sorted(half)) for half in halves]
            ours = np.array([right[half].sum() for half in halves])
            return disagrees(np.array([1, ratio]), ours, f"its micro-batches {names[0]} against {names[1]} with")
        if kind == "sum":
            return ADDS_UP if trial.reduction == "mean" else None
        if said := {"means": MEANS, "sum and mean": SUM_AND_MEAN, "sum and penalty": SUM_AND_PENALTY}.get(kind):
            return said
        if trial.is_random:
            return None
        if elsewhere := trial.cut_elsewhere(self._is_mean):
            return elsewhere
        values = np.array([micro[k][-1] for k in finite])
        if is_same(right[finite] @ values, whole[-1], self.close) and not is_same(values, values.mean(), 1e-3):
            return BACKWARD
        return COUPLED if kind == "coupled" else UNCLEAR

    def _law(
        self, finite: list[int], micro: list[Array], mix: Mix, term: int | None
    ) -> tuple[str, float, Halves, Exception | None]:
        """What the loss is, from the first grouping of micro-batches that shows it; or why it cannot be tried."""
        by_loss = sorted(finite, key=lambda k: micro[k][-1])  # groups as different as can be show most
        middle = -(-len(by_loss) // 2)
        groupings = (by_loss[:middle], by_loss[middle:]), (by_loss[::2], by_loss[1::2]), (by_loss[:1], by_loss[-1:])
        seen: tuple[str, float] | None = None
        refusal: Exception | None = None
        for halves in groupings:
            try:
                kind, ratio = self.nature(halves, term)
            except Exception as error:  # a loss may refuse more samples than the batch has
                refusal = error
                continue
            if kind == "mean" and mix.is_unique and not mix.is_of_a_mean:  # these groups are alike, others are not
                kind = "coupled"
            if kind not in ("coupled", "unclear"):
                return kind, ratio, halves, None
            seen = seen or (kind, ratio)
        return (*seen, groupings[0], None) if seen else ("coupled", np.nan, groupings[0], refusal)

    def nature(self, halves: Halves, term: int | None) -> tuple[str, float]:
        """What the loss is, from copies of two groups of micro-batches."""
        a, b = (list(chain.from_iterable(self.trial.parts[k] for k in half)) for half in halves)
        return nature(lambda p, q: self.of(a * p + b * q, term), self.noise)

    def _is_mean(self, whole: Gradient, first: Gradient, second: Gradient) -> bool:
        """Whether a gradient lies between two others."""
        of_all, one, other = map(self.sketch, (whole, first, second))
        away, along = of_all - other, one - other
        share = float(away @ along) / (float(along @ along) or 1.0)
        return 0 < share < 1 and is_same(away, share * along, self.close, of_all)

    # --- a loop ----------------------------------------------------------------------------------------------

    def loop(self, loop: Loop, full: Gradient, found: Gradient, tolerance: float | None) -> list[str]:
        """Why a foreign loop is not exact."""
        trial = self.trial
        if (said := self.untold()) is not None:
            return [said]
        causes = trial.layer_causes()
        has_hooks = trial.has_hooks
        with trial.without_hooks():
            if has_hooks:
                full, (found, _) = trial.full(), trial.by_loop(loop)
                if judged(trial, full, found, tolerance).is_exact:
                    return [*causes, HOOKS]
            cause = self._loop(loop, full, found, bool(causes))
            return [*causes, *([cause] if cause else [])]

    def _loop(self, loop: Loop, full: Gradient, found: Gradient, has_layers: bool) -> str | None:
        trial = self.trial
        if missing := [name for name in full if name not in found]:
            return (
                f"{len(missing)} of {len(full)} parameters have no gradient when the loop ends ({missing[0]} first): "
                "the loop zeroes them, or does not reach them"
            )
        scales = trial.right_scales()
        micro, norms = zip(*(self.with_norm(trial.of(part)[0]) for part in trial.parts), strict=True)
        whole, theirs = self.sketch(full), self.sketch(found)
        counted = [k for k, g in enumerate(micro) if scales[k].any() and np.isfinite(g).all()]
        if not np.isfinite(theirs).all():
            return "a gradient is not finite"
        if not counted:
            return None
        rows = [micro[k] for k in counted]
        ours = unmix(products_of([*rows, whole]), self.noise)
        is_sum = trial.reduction == "sum"
        right = np.ones(len(counted)) if is_sum else scales[counted].mean(axis=1)
        is_right = is_same(right @ np.array(rows), whole, self.close)
        if not is_right:
            sums_to_one = np.isclose(ours.coefficients.sum(), 1.0, rtol=10 * ours.close)
            is_all_ones = np.allclose(ours.coefficients, 1.0, rtol=ours.close)
            if ours.is_known and (sums_to_one or is_all_ones):
                right = ours.coefficients  # the loss says best over how many it is a mean
            elif not has_layers and (said := self.terms()):
                return f"no loop over these micro-batches can be exact with this loss and weight: {said[0]}"
        mix = self._with(unmix(products_of([*rows, theirs]), self.noise), [norms[k] for k in counted])
        said_of_loop = explain_loop(mix, right)
        if said_of_loop is None:
            return self._rounding(whole, theirs) if is_same(whole, theirs, self.close) else None
        if mix.is_known and (CLIPPED in said_of_loop or "not divided like" in said_of_loop):
            return self._by_place_or_size(loop, mix, right, rows, counted, said_of_loop)
        if mix.residual >= mix.allowed_residual and trial.is_random:
            return LOOP_IS_RANDOM
        return said_of_loop

    def _by_place_or_size(
        self, loop: Loop, mix: Mix, right: Array, rows: list[Array], counted: list[int], said: str
    ) -> str:
        """Whether coefficients belong to the place in the window or to the micro-batch: runs the loop backwards."""
        seen = said[said.index("it weights") :]
        turned = np.arange(len(counted))[::-1]
        order = [counted[k] for k in turned]
        found, _ = self.trial.by_loop(loop, order)
        there = unmix(products_of([*(rows[k] for k in turned), self.sketch(found)]), self.noise)
        there = there if mix.norms is None else replace(there, norms=mix.norms[turned])
        close = max(mix.close, there.close)
        now = right[turned]
        by_place = np.allclose(there.coefficients, mix.coefficients, rtol=close, atol=close) or np.allclose(
            there.coefficients / now, mix.coefficients / right, rtol=close, atol=close
        )
        if by_place:
            odd = odd_one(mix, right)
            return f"{odd}; {seen}" if odd else f"micro-batches count by their place in the window; {seen}"
        num = len(right)
        if any(is_clipped(there, by) for by in (now, np.full(num, 1 / num), np.ones(num))):
            return f"{CLIPPED}; {seen}"
        return seen


EPSILON32 = 2.0**-23


def is_rounded(gradient: Array) -> bool:
    """Whether the numbers have the digits of float32 and no more, although they are in float64."""
    numbers = np.ravel(gradient)[:10000]
    is_narrow = numbers.dtype == np.float64 and bool(np.all(numbers.astype(np.float32) == numbers))
    return is_narrow and bool(np.any((numbers * 2.0**12) % 1.0)) and bool(np.any(numbers.astype(np.float16) != numbers))


def errors_of(full: Gradient, other: Gradient, floor: float = 1e-4) -> dict[str, float]:
    """The relative error of each parameter's gradient; one that is missing on one side counts as zero there."""
    norms = {name: float(np.linalg.norm(g)) for name, g in full.items()}
    total = float(np.linalg.norm(list(norms.values())))
    errors = {}
    for name in [*full, *(name for name in other if name not in full)]:
        distance = float(np.linalg.norm(np.asarray(other.get(name, 0.0)) - np.asarray(full.get(name, 0.0))))
        errors[name] = relative_error(distance, norms.get(name, 0.0), total, floor)
    return errors


def total_error_of(full: Gradient, other: Gradient) -> float:
    """The relative error of the whole gradient."""
    names = [*full, *(name for name in other if name not in full)]
    differences = [np.linalg.norm(np.asarray(other.get(n, 0.0)) - np.asarray(full.get(n, 0.0))) for n in names]
    norm = float(np.linalg.norm([np.linalg.norm(g) for g in full.values()]))
    return relative_error(float(np.linalg.norm(differences)), norm, norm)


def products_of(vectors: Sequence[Array]) -> Array:
    """The dot products of gradients with each other."""
    rows = np.stack(vectors)
    return rows @ rows.T
