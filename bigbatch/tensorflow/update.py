"""The end of a window: the gradient of the whole batch is checked, clipped and applied, once."""

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from ..core.auxiliary import metrics
from ..core.errors import LossError
from ..core.exclusive import Exclusive
from ..core.options import Option, check_clip
from ..core.step import Step
from ..core.weight import Reduction, from_terms
from . import gradients
from .auxiliary import Auxiliary
from .batch_norm import BatchNorm
from .distributed.replicas import trainable
from .gradients import Gradient, cast
from .internals import is_for_xla
from .layers import warn_of_batch_norms
from .nonfinite import SkippedSteps
from .optimizers import AnyOptimizer
from .sums import BatchGradient
from .weight import WEIGHT

_SKIPPED = "bigbatch: a step was skipped, because its gradient is not finite; no variable was changed"


class Result(NamedTuple):
    """What a step did, as tensors. core/step.py describes them."""

    losses: tf.Tensor
    total: tf.Tensor
    norm: tf.Tensor
    is_applied: tf.Tensor
    num_micro_batches: tf.Tensor
    record: tf.Tensor | None = None
    """The record of skipped steps; see nonfinite.py."""
    aux: Sequence[Any] = ()
    """The leaves of aux for the whole batch."""


class Update(tf.Module):
    """Takes one step of the optimizer with the finished gradient; the same on all replicas.

        result = update(gradient)

    stands for

        gradients, norm = tf.clip_by_global_norm(gradients, clip_norm)
        if tf.math.is_finite(norm):
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    """

    clip_norm, clip_value = Option(check_clip), Option(check_clip)

    def __init__(
        self,
        model: Any,
        optimizer: AnyOptimizer,
        strategy: tf.distribute.Strategy,
        reduction: Reduction,
        batch_norm: BatchNorm,
        skipped_steps: SkippedSteps,
        exclusive: Exclusive,
        clip_norm: float | None,
        clip_value: float | None,
    ) -> None:
        super().__init__(name="update")
        self.clip_norm, self.clip_value = clip_norm, clip_value
        self._model, self._optimizer, self._strategy = model, optimizer, strategy
        self._reduction: Reduction = reduction
        self._skipped_steps, self._exclusive = skipped_steps, exclusive
        self._batch_norm: BatchNorm = batch_norm
        self.is_ready = False
        with strategy.scope():
            self.num_steps = tf.Variable(0, trainable=False, dtype=tf.int64, name="num_steps")
            """How many steps were taken, applied or not."""

    def prepare(self) -> None:
        """Creates the optimizer's variables, which a graph cannot do."""
        if self.is_ready:
            return
        self._optimizer.check_knows(self._model)
        self.is_ready = True
        with tf.init_scope(), self._strategy.scope():
            self._optimizer.build(self._model)
        warn_of_batch_norms(self._model, self._batch_norm)

    def __call__(self, gradient: BatchGradient, *, is_loss_checked: bool = True) -> Result:
        """Across replicas: applies the gradient if it is finite and the window has any weight.

        Args:
            gradient: The gradient of the whole batch, on each replica.
            is_loss_checked: Whether the loss must be finite too, if the policy says so.
        """
        skipped_steps, is_scaling = self._skipped_steps, self._optimizer.is_scaling
        clipped, *clipping = self._strategy.run(self._clip, args=(gradient,))
        norm, is_finite, has_weight = map(self._of_one_replica, clipping)
        losses, total, num_micro_batches = map(self._of_one_replica, gradient[1:4])
        if is_loss_checked and skipped_steps.policy.needs_finite_loss and not is_scaling:
            is_finite &= tf.reduce_all(tf.math.is_finite(losses))

        def apply() -> None:
            with self._optimizer.without_reduction():
                self._strategy.run(lambda grads: self._optimizer.apply(grads, self._model), args=(clipped,))
            if is_scaling:
                tf.cond(is_finite, skipped_steps.applied, record)
            else:
                skipped_steps.applied()

        def record() -> None:
            variable = self._strategy.run(gradients.first_not_finite, args=(clipped,))
            skipped_steps.skipped(self.num_steps + 1, self._of_one_replica(variable))

        def skip() -> None:
            record()
            if not skipped_steps.policy.raises and not is_for_xla():
                tf.print(_SKIPPED, output_stream=sys.stderr)

        # an optimizer with a loss scale must see a gradient that is not finite, to lower the scale
        tf.cond(
            has_weight & (is_finite | is_scaling),
            apply,
            lambda: tf.cond(has_weight, skip, skipped_steps.without_weight),
        )
        self.num_steps.assign_add(1)
        is_applied, written = has_weight & is_finite, tf.identity(skipped_steps.record)
        return Result(losses, total, norm, is_applied, num_micro_batches, written, gradient.aux)

    def without_step(self, gradient: BatchGradient) -> tuple[list[Gradient], Result]:
        """Across replicas: the clipped gradient without the loss scale, in the dtypes of the variables; no step."""
        clipped, *clipping = self._strategy.run(self._clip, args=(gradient,))
        norm, losses, total, num = map(self._of_one_replica, (clipping[0], *gradient[1:4]))
        scale = self._optimizer.scaled(tf.ones([], WEIGHT))
        grads = [
            None if g is None else cast(gradients.scaled([self._of_one_replica(g)], 1 / scale)[0], v.dtype)
            for g, v in zip(clipped, trainable(self._model), strict=True)
        ]
        return grads, Result(losses, total, norm, tf.constant(False), num, None, gradient.aux)

    def _of_one_replica(self, value: Any) -> tf.Tensor:
        """A value that is the same on all replicas, as one tensor."""
        return self._strategy.experimental_local_results(value)[0]

    def options(self) -> tuple[Any, ...]:
        """The options that are built into a graph. If one changes, a new graph is traced."""
        return self.clip_norm, self.clip_value, self._skipped_steps.policy.on_nonfinite

    def _clip(self, gradient: BatchGradient) -> tuple[Any, ...]:
        """On a replica: the clipped gradient, its norm before, whether that is finite, and whether it has weight."""
        grads = gradient.gradients
        if all(g is None for g in grads):
            raise LossError("the loss reached none of the model's trainable variables: compute it with the model")
        loss_scale = self._optimizer.scaled(tf.ones([], WEIGHT))
        norm = gradients.norm(grads) / loss_scale
        if self.clip_norm is not None:
            grads = gradients.clipped_by_norm(grads, norm, self.clip_norm)
        if self.clip_value is not None:
            grads = gradients.clipped_by_value(grads, self.clip_value, loss_scale)
        has_weight = tf.reduce_any(gradient.total > 0)
        if self._reduction == "sum":
            has_weight |= gradient.num_micro_batches > 0
        return grads, norm, tf.math.is_finite(norm), has_weight

    def step(self, result: Result, micro_batch_size: int | None = None, auxiliary: Auxiliary | None = None) -> Step:
        """In eager code: the `Step` for the user. If the step was skipped, raises or stops first as the policy says."""
        losses, total, norm, is_applied, num_micro_batches, record, leaves = result
        is_scaling = self._optimizer.is_scaling
        if record is not None and self._skipped_steps.report(record, self._model, is_scaling=is_scaling):
            self._exclusive.changed()
        step = Step(
            terms=lambda: tuple(map(float, losses)),
            weight=lambda: from_terms(tuple(map(float, total))),
            grad_norm=lambda: float(norm),
            num_micro_batches=lambda: int(num_micro_batches),
            micro_batch_size=micro_batch_size,
            is_applied=lambda: bool(is_applied),
            reduction=self._reduction,
        )
        if auxiliary is not None:
            step.aux = lambda: auxiliary.rebuilt(leaves)
            step.metrics = lambda: metrics(step.aux)
            step.summed = auxiliary.summed()
        return step
