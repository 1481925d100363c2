"""What ends a window: the gradient of the whole batch is unscaled, checked, clipped and applied, once."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..core.errors import GradientError, LossError
from ..core.exclusive import Exclusive
from ..core.nonfinite import NonFinite, OnNonFinite, place_in, place_of
from ..core.options import Fixed, Option, check_clip
from ..core.step import Step
from ..core.weight import Reduction, Terms, from_terms
from . import sums as arithmetic
from .capture.optimizer import CapturedOptimizer
from .checks import check_scheduler
from .distributed.ranks import Replicas
from .distributed.totals import Agreement
from .gradient_buffer import clear
from .gradients import Gradients
from .precision import Precision
from .step_result import Later, Outcome, can_be_skipped_on_device
from .sums import Sums


class Update:
    """One step of the optimizer; the same on all ranks."""

    optimizer, reduction = Fixed(), Fixed()
    scaler = Fixed()
    """The GradScaler in use: the user's, or ours with precision "fp16"."""
    clip_norm, clip_value = Option(check_clip), Option(check_clip)
    scheduler = Option(check_scheduler)

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        gradients: Gradients,
        precision: Precision,
        replicas: Replicas,
        reduction: Reduction,
        clip_norm: float | None,
        clip_value: float | None,
        scheduler: Any,
        nonfinite: NonFinite,
    ) -> None:
        self.optimizer = optimizer
        self.reduction = reduction
        self.scaler = precision.scaler
        self.clip_norm = clip_norm
        self.clip_value = clip_value
        self.scheduler = scheduler
        self.num_steps = 0
        """How many windows are done, applied or not."""
        self._gradients = gradients
        self._precision = precision
        self._replicas = replicas
        self._nonfinite = nonfinite
        self._exclusive = Exclusive(gradients.held)
        self._captured_optimizer: CapturedOptimizer | None = None
        self._pending: Outcome | None = None
        """What became of the last step, if that is not known yet."""
        self._is_skipped: Tensor | None = None

    @property
    def on_nonfinite(self) -> OnNonFinite:
        on_nonfinite: OnNonFinite = self._nonfinite.on_nonfinite
        return on_nonfinite

    @on_nonfinite.setter
    def on_nonfinite(self, value: OnNonFinite) -> None:
        self._nonfinite.on_nonfinite = value

    @property
    def max_skipped(self) -> int | None:
        max_skipped: int | None = self._nonfinite.max_skipped
        return max_skipped

    @max_skipped.setter
    def max_skipped(self, value: int | None) -> None:
        self._nonfinite.max_skipped = value

    @property
    def is_stopped(self) -> bool:
        """Whether a step was skipped with `on_nonfinite="stop"`, so that no further one is made."""
        return self._nonfinite.is_stopped

    def _step_optimizer(self) -> None:
        self._exclusive.changed()
        is_captured = self._captured_optimizer is not None and self.scaler is None and self._captured_optimizer.step()
        if not is_captured:
            self._precision.step(self.optimizer)

    def _apply(
        self, sums: Sums, losses: Callable[[], Terms], agreement: Agreement, micro_batch_size: int | None
    ) -> Step:
        """All that belongs to a step, once: unscale, run hooks, check, clip, apply, schedule."""
        has_weight = agreement.has_weight(self.reduction)
        terms = losses if has_weight else tuple(0.0 for _ in agreement.total)
        if has_weight and self._nonfinite.needs_finite_loss:
            terms = losses = _known(losses())
        outcome = self._finish(sums, losses, agreement) if has_weight else None
        self.num_steps += 1
        if isinstance(outcome, Later):
            try:
                self.settle()  # may raise, if warnings do
            finally:
                self._pending = outcome
        if self.scheduler is not None and outcome is not None and outcome.is_applied():
            self.scheduler.step()
        if self._pending is None:  # else it is said when the next step begins
            self._nonfinite.check(self.num_steps)
        return Step(
            terms=terms,
            weight=from_terms(agreement.total),
            grad_norm=0.0 if outcome is None else outcome.norm,
            num_micro_batches=agreement.num_micro_batches,
            micro_batch_size=micro_batch_size,
            is_applied=False if outcome is None else outcome.is_applied,
            reduction=self.reduction,
        )

    def _finish(self, sums: Sums, losses: Callable[[], Terms], agreement: Agreement) -> Outcome:
        """Brings the finished gradient to the parameters if it is finite."""
        if not sums:
            raise LossError(
                "the loss reached none of the optimizer's parameters: "
                "compute it with the model whose parameters the optimizer holds"
            )
        try:
            self._precision.unscale(self.optimizer, sums)
            self._replicas.agree_on_overflow(self.scaler, self.optimizer)
            self._run_hooks(sums, agreement.num_hooks)
            if self._need_not_wait(sums):
                outcome = self._finish_on_device(sums)
                self._precision.update()
                return outcome
            norm = arithmetic.norm(sums)
            place, is_overflow = self._not_finite(norm, sums, losses)
            if place is None:
                arithmetic.clip(sums, norm, self.clip_norm, self.clip_value)
                with self._gradients.handed_over(sums):
                    self._step_optimizer()
                self._nonfinite.applied()
            else:
                self._nonfinite.skipped(self.num_steps + 1, place, is_overflow=is_overflow)
            self._precision.update()
            return Outcome(norm, is_applied=place is None)
        except BaseException:
            self._precision.forget(self.optimizer)
            raise
        finally:
            clear(self._gradients.parameters)

    def _run_hooks(self, sums: Sums, num_hooks: tuple[int, ...]) -> None:
        """Those of parameters. A gradient that overflowed is for the scaler, which skips the step whatever they do.

        If any rank has hooks, all take part: the norm may take all of them.
        """
        own = self._gradients.num_hooks()
        if self._replicas.is_shared and own > max(num_hooks):
            raise GradientError(
                f"this rank had {max(num_hooks)} hooks of parameters when the step began and has {own} now, which "
                "other ranks may not have: register hooks before step() or micro_batch(); the next step runs these"
            )
        if (own or any(num_hooks)) and (self.scaler is None or math.isfinite(arithmetic.norm(sums))):
            has_changed = own > 0 and self._gradients.run_hooks(sums)
            if len(set(num_hooks)) > 1:
                self._replicas.check_hooks(num_hooks, has_changed=has_changed)

    def _not_finite(self, norm: float, sums: Sums, losses: Callable[[], Terms]) -> tuple[str | None, bool]:
        """Where it is that something is not finite, if anywhere, and whether that is for a scaler to deal with."""
        if self._nonfinite.needs_finite_loss and self.scaler is not None and (place := place_in(losses())):
            return place, False  # no scale mends a loss
        if not math.isfinite(norm):
            return place_of(self._gradients.first_not_finite(sums)), self.scaler is not None
        return place_in(losses()) if self._nonfinite.needs_finite_loss else None, False

    # --- without waiting for the device ------------------------------------------------------------------

    def _need_not_wait(self, sums: Sums) -> bool:
        """Whether nobody on the host has to know if the gradient is finite: a schedule and a scaler would."""
        return (
            self._precision.device == "cuda"
            and self.scheduler is None
            and self.scaler is None
            and self._nonfinite.on_nonfinite == "skip"
            and not self._replicas.is_sharded
            and len({p.get_device() for p in sums}) == 1
            and can_be_skipped_on_device(self.optimizer, sums)
        )

    def _finish_on_device(self, sums: Sums) -> Outcome:
        """The same, but it is the device that looks whether the gradient is finite. The host may be a window ahead."""
        norms, total = arithmetic.norm_on_device(sums)
        arithmetic.clip_on_device(sums, total, self.clip_norm, self.clip_value)
        parameters, number = list(sums), self.num_steps + 1

        def skipped(first: int | None) -> None:
            place = place_of(None if first is None else self._gradients.name(parameters[first]))
            self._nonfinite.skipped(number, place, is_overflow=False)

        outcome = Later(norms, total, if_applied=self._nonfinite.applied, if_skipped=skipped)
        with self._gradients.handed_over(sums), self._skipping(~torch.isfinite(total)):
            self._step_optimizer()
        return outcome

    @contextmanager
    def _skipping(self, is_skipped: Tensor) -> Iterator[None]:
        """Inside, the optimizer leaves a step out if the device says so."""
        optimizer: Any = self.optimizer
        if self._is_skipped is None:
            self._is_skipped = torch.zeros((), device=is_skipped.device)
        optimizer.grad_scale, optimizer.found_inf = None, self._is_skipped.copy_(is_skipped)
        try:
            yield
        finally:
            del optimizer.grad_scale, optimizer.found_inf

    def _seen(self) -> list[int]:
        """Differs from what it was before if the parameters do: others stepped, or something was loaded."""
        return self._exclusive.num_changes() + self._gradients.marks()

    def settle(self) -> None:
        """Waits until it is known what became of the last step."""
        if self._pending is not None:
            self._pending.norm()
            self._pending = None


def _known(losses: Terms) -> Callable[[], Terms]:
    return lambda: losses
