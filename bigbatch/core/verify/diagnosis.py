"""Experiments that show why two gradients differ. No cause is guessed from the difference alone."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain

import numpy as np

from .loss_kind import Kind, is_same, loss_kind
from .mix import Mix, explain_loop, unmix
from .sketch import SIZE, sizes_of, sketch
from .trial import Array, Gradient, Loop, Rows, Trial

_EPSILON32 = 2.0**-23
_Halves = tuple[list[int], list[int]]  # two groups of micro-batches


class Experiments:
    """Tries the loss on other samples, or the loop on another order, to see which cause fits."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.epsilon = trial.epsilon
        """Larger than the trial's if part of the model turns out to compute in float32."""
        self._all_rows = sorted(chain.from_iterable(trial.parts))
        gradient, loss = trial.gradient_of(self._all_rows)
        self._sizes = sizes_of(gradient)
        whole = self._sketch(gradient)
        self._loss_unit = float(np.linalg.norm(whole)) / abs(loss or 1.0) or 1.0
        whole = np.append(whole, loss * self._loss_unit)
        first, again = self._sketch(trial.full()), self._sketch(trial.full())  # traced anew, where a framework traces
        close = 1e-3 if trial.epsilon > 1e-10 else 1e-6
        self.is_repeatable = not np.isfinite(first).all() or is_same(first, again, close)
        own, moved = 8 * max(trial.epsilon, _epsilon_in(gradient)), np.inf
        with suppress(Exception):  # a loss may refuse samples in another order
            shuffled = np.random.default_rng(0).permutation(self._all_rows).tolist()
            moved = float(np.linalg.norm(self._gradient_of(shuffled) - whole) / (np.linalg.norm(whole) or 1.0))
        self.rounding = max(own, moved) if moved < 1e-4 else own  # more than that is not rounding: the order matters
        self._close = max(1e-9, 20 * self.rounding)

    def obstacle(self) -> str | None:
        """Why no experiment would show anything, or None."""
        if not self.is_repeatable:
            return (
                "the loss gives another gradient each time it is called with the same batch (it keeps a state, or "
                "draws from a random generator of its own), so nothing can be compared: make it repeatable"
            )
        if self.rounding > 1e-2:
            return "rounding in this precision is too coarse to tell the cause: compare in float32 or float64"
        return None

    def _gradient_of(self, rows: Rows, term: int | None = None) -> Array:
        """The gradient with the loss appended, scaled to the gradient's norm: the same laws hold for both."""
        gradient, loss = self.trial.gradient_of(rows, term)
        return np.append(self._sketch(gradient), loss * self._loss_unit)

    def _sketch(self, gradient: Gradient) -> Array:
        self._sizes = self._sizes | sizes_of(gradient)  # another cut of the batch may reach other parameters
        return sketch(gradient, self._sizes)

    # --- the loss --------------------------------------------------------------------------------------------

    def explain_loss(self, full: Gradient, accumulated: Gradient) -> list[str]:
        """Why accumulation is not exact: the layers, a state that passes change, the loss or its weight."""
        trial = self.trial
        whole, ours = self._sketch(full), self._sketch(accumulated)
        if not np.isfinite(whole).all():
            return ["the gradient of the whole batch is not finite"]
        causes = trial.layer_causes()
        if trial.is_random or not self._adds_up():
            with trial.quiet():
                return causes + self._explain_terms()
        if is_same(whole, ours, self._close):
            return [*causes, self._explain_rounding(whole, ours)]
        names = ", ".join(trial.carried_over()) or "a state of the model or of the loss"
        return [
            *causes,
            f"a pass changes what the next one sees ({names}): micro-batches that start from the same state add up to "
            "the full batch, but run one after the other they do not",
        ]

    def _explain_rounding(self, whole: Array, ours: Array) -> str:
        error = float(np.linalg.norm(whole - ours) / (np.linalg.norm(whole) or 1.0))
        cause = (
            f"a difference of {error:.0e} is the size of rounding (the same samples in another order change the "
            f"gradient by {self.rounding:.0e})"
        )
        if not 1e-12 < self.rounding < 1e-4:
            return cause
        self.epsilon = max(_EPSILON32, self.trial.epsilon)
        return f"{cause}: something in the model or the loss computes in float32"

    def _adds_up(self) -> bool:
        """Whether the micro-batches, each from the same start, add up to the whole batch."""
        right = self.trial.right_scales()
        whole = ours = np.zeros(1)
        for number, scales in enumerate(right.T):
            term = number if right.shape[1] > 1 else None
            whole = whole + self._gradient_of(self._all_rows, term)
            for part, scale in zip(self.trial.parts, scales, strict=True):
                if scale:
                    ours = ours + scale * self._gradient_of(part, term)
        return is_same(ours[:-1], whole[:-1], self._close)

    def _explain_terms(self) -> list[str]:
        """What is wrong with the loss or its weight, term by term."""
        self.trial.full()  # records the random draws of this mode
        columns = self.trial.right_scales().T
        if len(columns) == 1:
            cause = self._explain_term(None, columns[0])
            return [cause] if cause else []
        causes = [self._explain_term(number, right) for number, right in enumerate(columns)]
        return [f"term {number} of {len(causes)}: {cause}" for number, cause in enumerate(causes, 1) if cause]

    def _explain_term(self, term: int | None, right: Array) -> str | None:
        trial = self.trial
        micro = [self._gradient_of(part, term) for part in trial.parts]
        finite = [k for k, g in enumerate(micro) if np.isfinite(g).all()]
        if missing := [k for k in range(len(micro)) if k not in finite and right[k]]:
            what = "gradient" if np.isfinite([micro[k][-1] for k in missing]).all() else "loss"
            return (
                f"the {what} of micro-batch {_listed(missing)} alone is not finite, that of "
                "the whole batch is: a mean over nothing is 0/0 (for a micro-batch without a label let `weight` return "
                "0), and so is the gradient of a standard deviation of one sample"
            )
        whole = self._gradient_of(self._all_rows, term)
        if len(finite) < 2:
            return None
        if is_same(np.sum([right[k] * micro[k] for k in finite], axis=0)[:-1], whole[:-1], self._close):
            return None
        if not right[finite].any():
            return (
                "`weight` returns 0 for every micro-batch, so this loss is not trained: return the number of samples "
                "or tokens that it averages over"
            )
        mix = self._mix([micro[k] for k in finite], whole)
        try:
            kind, ratio, halves = self._kind(finite, micro, mix, term)
        except Exception as error:
            if elsewhere := trial.cut_elsewhere(self._is_mean):  # it may refuse what is cut along a wrong axis
                return elsewhere
            return (
                "the loss of the whole batch is not the mean of those of its micro-batches, weighted as `weight` says; "
                f"the cause is unknown because the loss fails on other batches ({error})"
            )
        if kind == "mean":
            if trial.reduction == "sum":
                return 'the loss is a mean but reduction="sum" adds it up: pass reduction="mean", or add up in the loss'
            if mix.is_known and np.all(mix.coefficients >= -mix.close):
                return _disagrees(np.abs(mix.coefficients), right[finite])
            ours = np.array([right[half].sum() for half in halves])
            first, second = map(_listed, map(sorted, halves))
            return _disagrees(np.array([1, ratio]), ours, f"its micro-batches {first} against {second} as")
        if kind == "sum" and trial.reduction == "sum":
            return None
        if kind in ("coupled", "unclear"):
            if trial.is_random:
                return None
            if elsewhere := trial.cut_elsewhere(self._is_mean):
                return elsewhere
            losses = np.array([micro[k][-1] for k in finite])
            if is_same(right[finite] @ losses, whole[-1], self._close) and not is_same(losses, losses.mean(), 1e-3):
                return (
                    "the losses of the micro-batches add up to that of the whole batch, but their gradients do not: "
                    "something in the backward pass sees the micro-batch instead of the batch (a hook on an activation "
                    "that clamps, a backward function of your own that normalises, an embedding with "
                    "scale_grad_by_freq)"
                )
        return _CAUSES[kind]

    def _kind(self, finite: list[int], micro: list[Array], mix: Mix, term: int | None) -> tuple[Kind, float, _Halves]:
        """Splits the micro-batches into two groups in several ways, until one shows the kind of the loss.

        Raises the loss's error if it refuses all groups.
        """
        by_loss = sorted(finite, key=lambda k: micro[k][-1])  # groups as different as can be show most
        middle = -(-len(by_loss) // 2)
        groupings = (by_loss[:middle], by_loss[middle:]), (by_loss[::2], by_loss[1::2]), (by_loss[:1], by_loss[-1:])
        vague: tuple[Kind, float, _Halves] | None = None
        refusal: Exception | None = None
        for halves in groupings:
            a, b = (list(chain.from_iterable(self.trial.parts[k] for k in half)) for half in halves)
            try:
                kind, ratio = loss_kind(lambda p, q: self._gradient_of(a * p + b * q, term), self.rounding)  # noqa: B023
            except Exception as error:  # a loss may refuse more samples than the batch has
                refusal = error
                continue
            if kind == "mean" and mix.is_unique and not mix.is_of_a_mean:  # these groups are alike, others are not
                kind = "coupled"
            if kind not in ("coupled", "unclear"):
                return kind, ratio, halves
            vague = vague or (kind, ratio, halves)
        if vague is None and refusal is not None:
            raise refusal
        return vague or ("coupled", np.nan, groupings[0])

    def _is_mean(self, whole: Gradient, first: Gradient, second: Gradient) -> bool:
        """Whether a gradient lies between two others."""
        of_all, one, other = map(self._sketch, (whole, first, second))
        away, along = of_all - other, one - other
        share = float(away @ along) / (float(along @ along) or 1.0)
        return 0 < share < 1 and is_same(away, share * along, self._close, of_all)

    # --- the user's own loop ---------------------------------------------------------------------------------

    def explain_loop(self, loop: Loop, full: Gradient, found: Gradient) -> list[str]:
        """Why the user's own loop is not exact."""
        causes = self.trial.layer_causes()
        cause = self._explain_loop(loop, full, found, has_layer_causes=bool(causes))
        return [*causes, cause] if cause else causes

    def _explain_loop(self, loop: Loop, full: Gradient, found: Gradient, *, has_layer_causes: bool) -> str | None:
        trial = self.trial
        if missing := [name for name in full if name not in found]:
            return (
                f"{len(missing)} of {len(full)} parameters have no gradient when the loop ends ({missing[0]} first): "
                "the loop zeroes them, or does not reach them"
            )
        micro, norms = [], []
        for part in trial.parts:
            gradient, _ = trial.gradient_of(part)
            micro.append(self._sketch(gradient))
            norms.append(_norm(gradient))
        whole, theirs = self._sketch(full), self._sketch(found)
        if not np.isfinite(theirs).all():
            return "a gradient is not finite"
        scales = trial.right_scales()
        counted = [k for k, g in enumerate(micro) if scales[k].any() and np.isfinite(g).all()]
        if not counted:
            return None
        rows = [micro[k] for k in counted]
        right = np.ones(len(counted)) if trial.reduction == "sum" else scales[counted].mean(axis=1)
        if not is_same(right @ np.array(rows), whole, self._close):
            ours = self._mix(rows, whole)
            sums_to_one = np.isclose(ours.coefficients.sum(), 1.0, rtol=10 * ours.close)
            if ours.is_known and (sums_to_one or np.allclose(ours.coefficients, 1.0, rtol=ours.close)):
                right = ours.coefficients  # the loss knows best over how many it is a mean
            elif not has_layer_causes and (causes := self._explain_terms()):
                return f"no loop over these micro-batches can be exact with this loss and weight: {causes[0]}"

        def backwards() -> Mix:
            order = counted[::-1]
            gradient, _ = trial.by_loop(loop, order)
            return self._mix([micro[k] for k in order], self._sketch(gradient), [norms[k] for k in order])

        mix = self._mix(rows, theirs, [norms[k] for k in counted])
        if trial.is_random and not mix.is_complete:
            return "random numbers differ between the loop and the full batch, so the rest could not be compared"
        cause = explain_loop(mix, right, backwards)
        if cause is None and is_same(whole, theirs, self._close):
            return self._explain_rounding(whole, theirs)
        return cause

    def _mix(self, rows: list[Array], vector: Array, norms: list[float] | None = None) -> Mix:
        """One gradient as a mix of others; `norms` are the real ones, where sketches only keep them roughly."""
        stacked = np.stack([*rows, vector])
        mix = unmix(stacked @ stacked.T, self.rounding)
        is_folded = sum(self._sizes.values()) > SIZE
        return replace(mix, norms=np.array(norms)) if norms is not None and is_folded else mix


_CAUSES: dict[Kind, str] = {
    "sum": 'the loss adds up over samples instead of taking the mean: pass reduction="sum", or divide in the loss',
    "means": (
        "the loss behaves like one that adds up several means over different counts (over the tokens and over the "
        "samples, say): return a tuple of terms, and let `weight` return one count for each"
    ),
    "sum and mean": (
        "the loss adds a sum over samples and a mean: take the mean of both, or return them as a tuple of terms, and "
        "let `weight` return one count for each"
    ),
    "sum and penalty": (
        "the loss adds a sum over samples and something that does not depend on them (an L2 penalty, say), which every "
        "micro-batch repeats: take the mean over the samples, or use the optimizer's weight_decay"
    ),
    "coupled": (
        "the loss couples the samples of a batch: the loss of the whole batch is not a weighted mean of the losses of "
        "its micro-batches (a contrastive loss, a BatchNorm that normalises by what it is fed, a root of a mean), so "
        "it cannot be cut"
    ),
    "unclear": (
        "the loss is not a single mean over samples: it is the sum of several means, or it couples the samples; which "
        "of the two cannot be told in this precision"
    ),
}


def _disagrees(found: Array, ours: Array, whom: str = "its micro-batches") -> str:
    return (
        f"the loss weights {whom} {_percent(found)}, but `weight` says {_percent(ours)}: "
        "return from `weight` the number of samples or tokens the loss averages over"
    )


def _percent(coefficients: Array) -> str:
    return " : ".join(f"{100 * c / sum(coefficients):.3g}%" for c in coefficients)


def _listed(micro_batches: Sequence[int]) -> str:
    return ", ".join(str(k + 1) for k in micro_batches)


def _norm(gradient: Gradient) -> float:
    return float(np.linalg.norm([np.linalg.norm(g) for g in gradient.values()]))


def _epsilon_in(gradient: Gradient) -> float:
    """The epsilon of float32 if a float64 gradient was rounded to float32 somewhere, else 0."""
    smallest = 1e-6 * max(map(np.linalg.norm, gradient.values()), default=0.0)  # less is rounding itself
    return _EPSILON32 if any(_is_rounded(g) for g in gradient.values() if np.linalg.norm(g) > smallest) else 0.0


def _is_rounded(gradient: Array) -> bool:
    """Whether float64 numbers have the digits of float32 and no more."""
    numbers = np.ravel(gradient)[:10000]
    is_narrow = numbers.dtype == np.float64 and bool(np.all(numbers.astype(np.float32) == numbers))
    return is_narrow and bool(np.any((numbers * 2.0**12) % 1.0)) and bool(np.any(numbers.astype(np.float16) != numbers))
