"""What ends a window: the gradient of the whole batch is unscaled, checked, clipped and applied, once."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.amp import GradScaler

from ..core.errors import LossError
from ..core.step import Step
from ..core.weight import Reduction, Terms, from_terms
from . import checks, gradients
from .agreement import Agreement
from .captured_optimizer import CapturedOptimizer
from .gradients import Gradients, Sums
from .precision import Precision
from .replicas import Replicas


class Update:
    """One step of the optimizer; the same on all ranks."""

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
    ) -> None:
        self.optimizer = optimizer
        self.reduction: Reduction = reduction
        self.clip_norm = clip_norm
        self.clip_value = clip_value
        self.scheduler = scheduler
        self.num_steps = 0
        """How many windows are done, applied or not."""
        self._gradients = gradients
        self._precision = precision
        self._replicas = replicas
        self._captured_optimizer: CapturedOptimizer | None = None

    @property
    def scaler(self) -> GradScaler | None:
        """The GradScaler in use: the user's, or ours with precision "fp16"."""
        return self._precision.scaler

    def _step_optimizer(self) -> None:
        is_captured = self._captured_optimizer is not None and self.scaler is None and self._captured_optimizer.step()
        if not is_captured:
            self._precision.step(self.optimizer)

    def _apply(
        self, sums: Sums, losses: Callable[[], Terms], agreement: Agreement, micro_batch_size: int | None
    ) -> Step:
        """All that belongs to a step, once: unscale, check, clip, apply, schedule."""
        has_weight = agreement.has_weight(self.reduction)
        terms = losses if has_weight else tuple(0.0 for _ in agreement.total)
        norm = self._finish(sums) if has_weight else 0.0
        is_applied = has_weight and math.isfinite(norm)
        if is_applied and self.scheduler is not None:
            self.scheduler.step()
        self.num_steps += 1
        return Step(
            terms=terms,
            weight=from_terms(agreement.total),
            grad_norm=norm,
            num_micro_batches=agreement.num_micro_batches,
            micro_batch_size=micro_batch_size,
            is_applied=is_applied,
            reduction=self.reduction,
        )

    def _finish(self, sums: Sums) -> float:
        """Brings the finished gradient to the parameters if it is finite; returns its norm."""
        if not sums:
            raise LossError(
                "the loss reached none of the optimizer's parameters: "
                "compute it with the model whose parameters the optimizer holds"
            )
        try:
            self._precision.unscale(self.optimizer, sums)
            self._replicas.agree_on_overflow(self.scaler, self.optimizer)
            norm = gradients.norm(sums)
            if math.isfinite(norm):
                gradients.clip(sums, norm, self.clip_norm, self.clip_value)
                with self._gradients.handed_over(sums):
                    self._step_optimizer()
            elif self.scaler is None:  # with a scaler an overflow now and then is how it finds its scale
                checks.tell_not_finite(self._gradients.first_not_finite(sums), self.num_steps + 1)
            self._precision.update()
        except BaseException:
            self._precision.forget(self.optimizer)
            raise
        finally:
            gradients.clear(self._gradients.parameters)
        return norm
