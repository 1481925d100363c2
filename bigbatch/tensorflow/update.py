"""The end of a window: the gradient of the whole batch is checked, clipped and applied, once."""

import sys
from typing import Any, NamedTuple

import tensorflow as tf

from ..core.errors import LossError
from ..core.exclusive import Exclusive
from ..core.options import Option, check_clip
from ..core.step import Step
from ..core.weight import Reduction, from_terms
from . import gradients
from .internals import is_for_xla
from .layers import warn_of_batch_norms
from .nonfinite import SkippedSteps
from .optimizer import Optimizer
from .sums import Summed
from .weight import WEIGHT

_SKIPPED = "bigbatch: a step was skipped, since its gradient is not finite; no variable was changed"


class Result(NamedTuple):
    """What a step did, as tensors."""

    losses: tf.Tensor
    total: tf.Tensor
    norm: tf.Tensor
    is_applied: tf.Tensor
    num_micro_batches: tf.Tensor
    record: tf.Tensor | None = None
    """Of the steps that were skipped; see nonfinite.py."""


class Update(tf.Module):
    """Makes one step of the optimizer with the finished gradient; the same on all replicas.

        result = update(summed)

    stands for

        gradients, norm = tf.clip_by_global_norm(gradients, clip_norm)
        if tf.math.is_finite(norm):
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    Args:
        model: Its trainable variables are changed.
        optimizer: What is stepped.
        strategy: The strategy of the model.
        reduction: "mean" or "sum".
        skipped_steps: Records steps that are not finite.
        exclusive: Is told that the variables have changed.
        clip_norm: The largest norm of the gradient; None for any.
        clip_value: The largest absolute value in the gradient; None for any.
    """

    clip_norm, clip_value = Option(check_clip), Option(check_clip)

    def __init__(
        self,
        model: Any,
        optimizer: Optimizer,
        strategy: tf.distribute.Strategy,
        reduction: Reduction,
        skipped_steps: SkippedSteps,
        exclusive: Exclusive,
        *,
        clip_norm: float | None,
        clip_value: float | None,
    ) -> None:
        super().__init__(name="update")
        self.clip_norm, self.clip_value = clip_norm, clip_value
        self.is_ready = False
        self._model = model
        self._optimizer = optimizer
        self._strategy = strategy
        self._reduction: Reduction = reduction
        self._skipped_steps = skipped_steps
        self._exclusive = exclusive
        with strategy.scope():
            self.num_steps = tf.Variable(0, trainable=False, dtype=tf.int64, name="num_steps")
            """How many windows are done, applied or not."""

    def prepare(self) -> None:
        """Makes what no graph can make: the optimizer's variables."""
        if self.is_ready:
            return
        self._optimizer.check_knows(self._model)
        self.is_ready = True
        with tf.init_scope(), self._strategy.scope():
            self._optimizer.build(self._model)
        warn_of_batch_norms(self._model)

    def __call__(self, summed: Summed, *, is_loss_checked: bool = True) -> Result:
        """Applies the gradient if it is finite and the window has any weight; across replicas.

        Args:
            summed: What the window adds up to, on each replica.
            is_loss_checked: Whether the loss must be finite, too, if the policy says so.
        """
        skipped_steps, is_scaling = self._skipped_steps, self._optimizer.is_scaling
        clipped, *clipping = self._strategy.run(self._clip, args=(summed,))
        norm, is_finite, has_weight = map(self._of_one_replica, clipping)
        losses, total, num_micro_batches = map(
            self._of_one_replica, (summed.losses, summed.total, summed.num_micro_batches)
        )
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

        # an optimizer that scales the loss must see what is not finite, to lower its scale
        tf.cond(
            has_weight & (is_finite | is_scaling),
            apply,
            lambda: tf.cond(has_weight, skip, skipped_steps.without_weight),
        )
        self.num_steps.assign_add(1)
        return Result(losses, total, norm, has_weight & is_finite, num_micro_batches, tf.identity(skipped_steps.record))

    def _of_one_replica(self, value: Any) -> tf.Tensor:
        """A value that all replicas have alike, as one tensor."""
        return self._strategy.experimental_local_results(value)[0]

    def options(self) -> tuple[Any, ...]:
        """The options that are built into a graph. If one changes, the graph must be made again."""
        return self.clip_norm, self.clip_value, self._skipped_steps.policy.on_nonfinite

    def _clip(self, summed: Summed) -> tuple[Any, ...]:
        """On a replica: the clipped gradient, its norm before, whether that is finite, and if there is any weight."""
        grads = summed.gradients
        if all(g is None for g in grads):
            raise LossError("the loss reached none of the model's trainable variables: compute it with the model")
        loss_scale = self._optimizer.scaled(tf.ones([], WEIGHT))
        norm = gradients.norm(grads) / loss_scale
        if self.clip_norm is not None:
            grads = gradients.clipped_by_norm(grads, norm, self.clip_norm)
        if self.clip_value is not None:
            grads = gradients.clipped_by_value(grads, self.clip_value, loss_scale)
        has_weight = tf.reduce_any(summed.total > 0)
        if self._reduction == "sum":
            has_weight |= summed.num_micro_batches > 0
        return grads, norm, tf.math.is_finite(norm), has_weight

    def step(self, result: Result, micro_batch_size: int | None = None) -> Step:
        """In eager code: what was done, for the user; raises or stops first if a step was skipped and they want that.

        Args:
            result: What the update returned.
            micro_batch_size: The size of the largest micro-batch, if it is known.
        """
        losses, total, norm, is_applied, num_micro_batches, record = result
        is_scaling = self._optimizer.is_scaling
        if record is not None and self._skipped_steps.report(record, self._model, is_scaling=is_scaling):
            self._exclusive.changed()
        return Step(
            terms=lambda: tuple(map(float, losses)),
            weight=lambda: from_terms(tuple(map(float, total))),
            grad_norm=lambda: float(norm),
            num_micro_batches=lambda: int(num_micro_batches),
            micro_batch_size=micro_batch_size,
            is_applied=lambda: bool(is_applied),
            reduction=self._reduction,
        )
