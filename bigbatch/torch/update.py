"""The end of a window: the gradient of the whole batch is unscaled, checked, clipped and applied, once."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..core.errors import GradientError, LossError, OrderError
from ..core.nonfinite import NonFinite, place_in, place_of
from ..core.options import Option, check_clip
from ..core.step import Step
from ..core.weight import Reduction, Terms, from_terms, has_weight
from .capture.optimizer import CapturedOptimizer
from .checks import check_scheduler
from .distributed.ranks import Ranks
from .distributed.totals import Totals
from .gradients import Gradients, clear
from .precision import Precision
from .step_result import PendingResult, StepResult, can_be_skipped_on_device
from .sums import Sums

Losses = Callable[[], Terms]


class Update:
    """Makes one step of the optimizer out of the finished gradient; the same on all ranks.

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
    """

    clip_norm, clip_value = Option(check_clip), Option(check_clip)
    scheduler = Option(check_scheduler)

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        gradients: Gradients,
        precision: Precision,
        ranks: Ranks,
        nonfinite: NonFinite,
        reduction: Reduction,
    ) -> None:
        self.clip_norm = self.clip_value = self.scheduler = None
        self.num_steps = 0
        self.captured_optimizer: CapturedOptimizer | None = None
        self._optimizer = optimizer
        self._gradients = gradients
        self._precision = precision
        self._scaler = precision.scaler
        self._ranks = ranks
        self._nonfinite = nonfinite
        self._reduction: Reduction = reduction
        self._pending: PendingResult | None = None
        """The result of the last step, if it is not known yet."""
        self._is_skipped: Tensor | None = None

    def __call__(self, sums: Sums, losses: Losses, totals: Totals, micro_batch_size: int | None = None) -> Step:
        """Applies the gradient and returns what was done."""
        loss_terms: Terms | None = None  # only if the step depends on them; otherwise the host need not wait
        result: StepResult | PendingResult
        weight = from_terms(totals.total)
        if not has_weight(totals.total, totals.num_micro_batches, self._reduction):
            loss_terms = tuple(0.0 for _ in totals.total)
            result = StepResult(0.0, is_applied=False)
        else:
            if self._nonfinite.needs_finite_loss:
                loss_terms = losses()
            result = self._finish(sums, loss_terms, totals.num_hooks)
        self.num_steps += 1
        if isinstance(result, PendingResult):
            try:
                self.settle()  # may raise, if warnings are errors
            finally:
                self._pending = result
        elif self.scheduler is not None and result.is_applied:
            self.scheduler.step()
        if self._pending is None:  # else the next step does it
            self._nonfinite.check(self.num_steps)
        return Step(
            terms=losses if loss_terms is None else loss_terms,
            weight=weight,
            grad_norm=result.norm,
            num_micro_batches=totals.num_micro_batches,
            micro_batch_size=micro_batch_size,
            is_applied=result.is_applied,
            reduction=self._reduction,
        )

    def check_not_held_back(self) -> None:
        """Raises OrderError inside of accelerate's `accumulate()`, where optimizers do nothing (1.15)."""
        for one in (self._optimizer, self.scheduler):
            state = getattr(one, "gradient_state", None)
            if state is not None and not getattr(state, "sync_gradients", True):
                raise OrderError(
                    f"accelerate's accumulate() holds back the {type(one).__name__} for windows of "
                    f"{getattr(state, 'num_steps', 'several')} passes, so this step would not be made: leave "
                    "accumulate() out, and make the Accelerator with gradient_accumulation_steps=1"
                )

    def _finish(self, sums: Sums, loss_terms: Terms | None, num_hooks: tuple[int, ...]) -> StepResult | PendingResult:
        """Brings the finished gradient to the parameters if it is finite.

        Args:
            sums: The gradient of the whole batch.
            loss_terms: The loss, which must be finite too; None if only the gradient decides.
            num_hooks: How many hooks the parameters have on each rank.
        """
        if not sums:
            raise LossError(
                "the loss reached none of the optimizer's parameters: "
                "compute it with the model whose parameters the optimizer holds"
            )
        try:
            if self._scaler is not None:
                self._precision.unscale(self._optimizer, sums)
                self._ranks.agree_on_overflow(self._scaler, self._optimizer)
            self._run_hooks(sums, num_hooks)
            if loss_terms is None and self._need_not_wait(sums):
                return self._finish_on_device(sums)
            norm = sums.norm()
            place, is_overflow = None, False
            if not math.isfinite(norm) or loss_terms is not None:
                place, is_overflow = self._place_not_finite(norm, sums, loss_terms)
            if place is None:
                sums.clip(norm, self.clip_norm, self.clip_value)
                self._apply(sums)
                self._nonfinite.applied()
            else:
                self._nonfinite.skipped(self.num_steps + 1, place, is_overflow=is_overflow)
            if self._scaler is not None:
                self._scaler.update()
            return StepResult(norm, is_applied=place is None)
        except BaseException:
            self._precision.forget(self._optimizer)
            clear(self._gradients.parameters())
            raise

    def _apply(self, sums: Sums) -> None:
        """Steps the optimizer."""
        self._gradients.exclusive.changed()
        with self._gradients.handed_over(sums):
            if self._scaler is not None:
                self._scaler.step(self._optimizer)
            elif self.captured_optimizer is None or not self.captured_optimizer.step():
                self._optimizer.step()

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
            and can_be_skipped_on_device(self._optimizer, sums)
        )

    def _finish_on_device(self, sums: Sums) -> PendingResult:
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
        with self._skipping(~torch.isfinite(total)):
            self._apply(sums)
        return pending

    @contextmanager
    def _skipping(self, is_skipped: Tensor) -> Iterator[None]:
        """Inside, the optimizer skips its step if this number on the device says so."""
        optimizer: Any = self._optimizer
        if self._is_skipped is None:
            self._is_skipped = torch.zeros((), device=is_skipped.device)
        optimizer.grad_scale, optimizer.found_inf = None, self._is_skipped.copy_(is_skipped)
        try:
            yield
        finally:
            del optimizer.grad_scale, optimizer.found_inf

    def settle(self) -> None:
        """Waits until it is known whether the last step was applied."""
        if self._pending is not None:
            self._pending.norm()
            self._pending = None
