"""The end of a window: the gradient of the whole batch is unscaled, checked, clipped and applied, once."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ..core.errors import GradientError, LossError, OrderError
from ..core.nonfinite import NonFinite, place_in, place_of
from ..core.options import Option, check_clip
from ..core.step import Step
from ..core.weight import Reduction, Terms, from_terms, has_weight
from .distributed.ranks import Ranks
from .distributed.totals import Totals
from .gradients import Gradients, clear
from .optimizers import Optimizers, as_tuple, check_schedulers
from .precision import Precision
from .step_result import PendingResult, StepResult
from .sums import Sums

Losses = Callable[[], Terms]
_NOTHING_DONE = StepResult(0.0, is_applied=False)


class Update:
    """Makes one step of the optimizers out of the finished gradient; the same on all ranks.

        step = update(sums, losses, totals, micro_batch_size)

    stands for

        scaler.unscale_(optimizer)
        norm = get_total_norm(gradients)
        if norm.isfinite():
            clip_grads_with_norm_(parameters, clip_norm, norm)
            clip_grad_value_(parameters, clip_value)
            optimizer.step()
            scheduler.step()
        scaler.update()

    and `update.without_step(…)` for the same without the optimizer, the schedule and `scaler.update()`: the gradient
    is left in .grad. If there are several optimizers and schedules, each has its turn.
    """

    clip_norm, clip_value = Option(check_clip), Option(check_clip)
    scheduler = Option(check_schedulers)

    def __init__(
        self,
        optimizers: Optimizers,
        gradients: Gradients,
        precision: Precision,
        ranks: Ranks,
        nonfinite: NonFinite,
        reduction: Reduction,
    ) -> None:
        self.clip_norm = self.clip_value = self.scheduler = None
        self.num_steps = 0
        self._optimizers = optimizers
        self._gradients = gradients
        self._precision = precision
        self._scaler = precision.scaler
        self._ranks = ranks
        self._nonfinite = nonfinite
        self._reduction: Reduction = reduction
        self._pending: PendingResult | None = None
        """The result of the last step, if it is not known yet."""

    def __call__(self, sums: Sums, losses: Losses, totals: Totals, micro_batch_size: int | None = None) -> Step:
        """Applies the gradient and returns what was done."""
        terms = self._known_terms(losses, totals)
        result: StepResult | PendingResult = _NOTHING_DONE
        if self._has_weight(totals):
            with self._starting_over_if_it_fails():
                self._prepare(sums, totals.num_hooks)
                if terms is None and self._need_not_wait(sums):
                    result = self._apply_on_device(sums)
                else:
                    result = self._check_and_clip(sums, terms)
                    if result.is_applied:
                        self._apply(sums)
                        self._nonfinite.applied()
                    if self._scaler is not None:
                        self._scaler.update()
        self.num_steps += 1
        if isinstance(result, PendingResult):
            try:
                self.settle()  # may raise, if warnings are errors
            finally:
                self._pending = result
        elif self.scheduler is not None and result.is_applied:
            for scheduler in as_tuple(self.scheduler):
                scheduler.step()
        if self._pending is None:  # else the next step does it
            self._nonfinite.check(self.num_steps)
        return self._step(result, losses if terms is None else terms, totals, micro_batch_size)

    def without_step(self, sums: Sums, losses: Losses, totals: Totals, micro_batch_size: int | None = None) -> Step:
        """Leaves the gradient in .grad if it is finite, for the user to go on with; else .grad stays None."""
        self.settle()  # what an earlier step has to say comes first
        terms = self._known_terms(losses, totals)
        result = _NOTHING_DONE
        if self._has_weight(totals):
            with self._starting_over_if_it_fails():
                self._prepare(sums, totals.num_hooks)
                result = self._check_and_clip(sums, terms, is_step=False)
                if result.is_applied:
                    self._gradients.leave(sums)
                    self._nonfinite.applied()
        self._nonfinite.check(self.num_steps + 1)
        return self._step(
            result._replace(is_applied=False), losses if terms is None else terms, totals, micro_batch_size
        )

    def _step(
        self, result: StepResult | PendingResult, terms: Losses | Terms, totals: Totals, micro_batch_size: int | None
    ) -> Step:
        return Step(
            terms=terms,
            weight=from_terms(totals.total),
            grad_norm=result.norm,
            num_micro_batches=totals.num_micro_batches,
            micro_batch_size=micro_batch_size,
            is_applied=result.is_applied,
            reduction=self._reduction,
        )

    def _has_weight(self, totals: Totals) -> bool:
        return has_weight(totals.total, totals.num_micro_batches, self._reduction)

    def _known_terms(self, losses: Losses, totals: Totals) -> Terms | None:
        """The loss if there is none, or if the step depends on it; else None, so that the host need not wait."""
        if not self._has_weight(totals):
            return tuple(0.0 for _ in totals.total)
        return losses() if self._nonfinite.needs_finite_loss else None

    def check_not_held_back(self) -> None:
        """Raises OrderError inside of accelerate's `accumulate()`, where optimizers do nothing (1.15)."""
        for one in (*self._optimizers.all, *as_tuple(self.scheduler)):
            state = getattr(one, "gradient_state", None)
            if state is not None and not getattr(state, "sync_gradients", True):
                raise OrderError(
                    f"accelerate's accumulate() holds back the {type(one).__name__} for windows of "
                    f"{getattr(state, 'num_steps', 'several')} passes, so this step would not be made: leave "
                    "accumulate() out, and make the Accelerator with gradient_accumulation_steps=1"
                )

    @contextmanager
    def _starting_over_if_it_fails(self) -> Iterator[None]:
        """After an error inside, nothing is left of this gradient."""
        try:
            yield
        except BaseException:
            self._precision.forget(self._optimizers.all)
            clear(self._gradients.parameters())
            raise

    def _prepare(self, sums: Sums, num_hooks: tuple[int, ...]) -> None:
        """Unscales the gradient and runs the hooks of parameters.

        Args:
            sums: The gradient of the whole batch.
            num_hooks: How many hooks the parameters have on each rank.
        """
        if not sums:
            raise LossError(
                "the loss reached none of the optimizer's parameters: "
                "compute it with the model whose parameters the optimizer holds"
            )
        if self._scaler is not None:
            self._precision.unscale(self._optimizers.all, sums)
            for optimizer in self._optimizers.all:
                self._ranks.agree_on_overflow(self._scaler, optimizer)
        self._run_hooks(sums, num_hooks)

    def _check_and_clip(self, sums: Sums, loss_terms: Terms | None, *, is_step: bool = True) -> StepResult:
        """Returns the norm, and whether the gradient may be applied, clipped now; reports one that is not finite.

        Args:
            sums: The gradient of the whole batch.
            loss_terms: The loss, which must be finite too; None if only the gradient decides.
            is_step: Whether a step is skipped if the gradient is not finite.
        """
        norm = sums.norm()
        place, is_overflow = None, False
        if not math.isfinite(norm) or loss_terms is not None:
            place, is_overflow = self._place_not_finite(norm, sums, loss_terms)
        if place is None:
            sums.clip(norm, self.clip_norm, self.clip_value)
        else:
            self._nonfinite.skipped(self.num_steps + 1, place, is_overflow=is_overflow, is_step=is_step)
        return StepResult(norm, is_applied=place is None)

    def _apply(self, sums: Sums) -> None:
        """Steps the optimizers."""
        self._gradients.exclusive.changed()
        with self._gradients.handed_over(sums):
            self._optimizers.step(self._scaler)

    def _run_hooks(self, sums: Sums, num_hooks: tuple[int, ...]) -> None:
        """Runs the hooks of parameters, unless the gradient overflowed: then the GradScaler skips the step anyway.

        If any rank has hooks, all take part: the norm may be one over all ranks.
        """
        own = self._gradients.check_hooks()
        if self._ranks.is_distributed and own > max(num_hooks):
            raise GradientError(
                f"this rank had {max(num_hooks)} hooks of parameters when the step began and has {own} now, which "
                "other ranks may not have: register hooks before step() or micro_batch(); the next step runs these"
            )
        if (own or any(num_hooks)) and (self._scaler is None or math.isfinite(sums.norm())):
            has_changed = own > 0 and self._gradients.run_hooks(sums)
            if len(set(num_hooks)) > 1:
                self._ranks.check_hooks(num_hooks, has_changed=has_changed)

    def _place_not_finite(self, norm: float, sums: Sums, loss_terms: Terms | None) -> tuple[str | None, bool]:
        """Returns where the first non-finite value is (or None), and whether the GradScaler handles it."""
        in_loss = None if loss_terms is None else place_in(loss_terms)
        if not math.isfinite(norm) and (in_loss is None or self._scaler is None):
            return place_of(self._gradients.first_not_finite(sums)), self._scaler is not None
        return in_loss, False  # no other scale makes a loss finite

    # --- without waiting for the device ------------------------------------------------------------------

    def _need_not_wait(self, sums: Sums) -> bool:
        """Whether nothing on the host depends on the gradient being finite, as a schedule and a GradScaler do."""
        return (
            self._precision.device == "cuda"
            and self.scheduler is None
            and self._scaler is None
            and not self._ranks.is_sharded
            and len({p.get_device() for p in sums}) == 1
            and self._optimizers.can_be_skipped_on_device(sums)
        )

    def _apply_on_device(self, sums: Sums) -> PendingResult:
        """Has the device check whether the gradient is finite, and skip the step if it is not.

        The host does not wait, so it may be a window ahead.
        """
        norms, total = sums.norms_on_device()
        sums.clip(total, self.clip_norm, self.clip_value)
        parameters, number = list(sums), self.num_steps + 1

        def skipped(first: int | None) -> None:
            place = place_of(None if first is None else self._gradients.name(parameters[first]))
            self._nonfinite.skipped(number, place, is_overflow=False)

        pending = PendingResult(norms, total, if_applied=self._nonfinite.applied, if_skipped=skipped)
        with self._optimizers.skipping(~torch.isfinite(total)):
            self._apply(sums)
        return pending

    def settle(self) -> None:
        """Waits until it is known whether the last step was applied."""
        if self._pending is not None:
            self._pending.norm()
            self._pending = None
