"""A window that arrives one micro-batch at a time: its sums so far, in variables that outlive a call."""

from typing import Any

import tensorflow as tf

from ..core.errors import GradientError, OrderError
from ..core.options import Option, check_steps, positive
from ..core.weight import Reduction, is_number, share
from ..core.window import AccumulationSteps, steps_at
from . import checks, gradients
from .batch_norm import MomentSums
from .distributed import replicas
from .internals import converted
from .optimizers import AnyOptimizer
from .sums import BatchGradient, SumVariables
from .weight import where

_BAD_STEPS = "accumulation_steps(step) is less than 1: return a whole number of at least 1"


class PartialWindow(tf.Module):
    """The sums of the window that `add()` fills, or `step()` with a `Window` of micro-batches.

    Gradients of its trainable variables are summed, after the caller multiplied them by their share. `step()` knows the
    total weight W, so its shares are w / W. `add()` does not know W yet: it multiplies by w, and `batch_gradient`
    divides by W at the end.
    """

    accumulation_steps = Option(check_steps)

    def __init__(
        self,
        model: Any,
        optimizer: AnyOptimizer,
        strategy: tf.distribute.Strategy,
        reduction: Reduction,
        accumulation_steps: AccumulationSteps | None,
        moments: MomentSums,
    ) -> None:
        super().__init__(name="window")
        self.accumulation_steps = accumulation_steps
        self._model, self._optimizer, self._strategy = model, optimizer, strategy
        self._reduction: Reduction = reduction
        self.moments = moments
        self._sums: SumVariables | None = None
        self._seen: int | None = None
        """How many changes the variables had seen when the window was opened."""

    def num_micro_batches(self) -> int:
        """In eager code: how many were added so far."""
        return 0 if self._sums is None else self._sums.num_whole()

    def num_wanted(self, step: tf.Variable) -> tf.Tensor:
        """The length of this step's window."""
        steps: Any = self.accumulation_steps
        if callable(steps) and tf.executing_eagerly():
            steps = steps_at(steps, int(step.numpy()))
        elif callable(steps):
            steps = converted(steps, step)
        if is_number(steps):
            return tf.constant(positive("accumulation_steps(step)", steps))
        with tf.control_dependencies([tf.debugging.Assert(steps >= 1, [_BAD_STEPS])]):
            return tf.cast(steps, tf.int32)

    @property
    def sums(self) -> SumVariables:
        """The sums of the open window."""
        return self.prepare_sums(1) if self._sums is None else self._sums

    def prepare_sums(self, num_terms: int) -> SumVariables:
        """The sums, made anew if other variables are trainable now or the loss has another number of terms."""
        variables = replicas.trainable(self._model)
        checks.check_trainable(self._model, is_called=False)
        if self._sums is None or not self._sums.fits(variables, num_terms):
            with tf.init_scope():
                if self._sums is not None and self.num_micro_batches():
                    raise OrderError(
                        f"the trainable variables changed in the middle of a window ({len(self._sums.gradients)} then, "
                        f"{len(variables)} now): call flush() before that"
                    )
                self._optimizer.check_knows(self._model)
                self._sums = SumVariables(variables, self._strategy, num_terms)
        return self._sums

    def check_whole(self) -> None:
        """Across replicas, in eager code: drops the window if a micro-batch was added only in part (Ctrl-C).

        Raises OrderError unless that micro-batch was the first of its window: then nothing else is lost.
        """
        if self._sums is None or self._sums.is_whole():
            return
        num = self.num_micro_batches()
        self.clear()
        if num:
            raise OrderError(
                f"add() was interrupted when its window had {num} micro-batches, so a part of the next one may have "
                "been added, and the window was dropped: feed its micro-batches again"
            )

    def check_unchanged(self, now: int) -> None:
        """Across replicas, in eager code: drops the window if something else changed the variables since it began.

        `now` is how many changes they have seen.
        """
        num = self.num_micro_batches()
        if not num or self._seen is None:
            self._seen = now
        opened_at = int(self.sums.opened_at.numpy())
        if num and (self._seen != now or opened_at not in (-1, int(self._optimizer.num_steps()))):
            self.clear()
            raise OrderError(
                f"the variables were changed by another step in the middle of a window of {num} micro-batches, whose "
                "gradient would be that of two models, so the window was dropped: flush() before anything else steps"
            )

    def batch_gradient(self, total: tf.Tensor | None = None) -> BatchGradient:
        """Across replicas: the gradient of the whole batch, on each replica.

        Args:
            total: The total weight W, if gradients were multiplied by w / W. None if they were multiplied by w.
        """
        present = self.sums.present()
        if total is None and not present:
            raise GradientError("no variable got a gradient in this window: compute the loss with the model")

        def on_replica() -> BatchGradient:
            grads, weight, losses = self.sums.read(present)
            if total is None and self._reduction == "mean":
                factor = share(1.0, weight, where)
                grads, losses = gradients.scaled(grads, factor), losses * factor
            return BatchGradient(grads, losses, weight[None] if total is None else total, tf.identity(self.sums.count))

        gradient: BatchGradient = self._strategy.run(on_replica)
        return gradient

    def clear(self) -> None:
        """Across replicas: drops the window."""
        self._strategy.run(self.sums.clear)
        self.sums.cleared()
        self.moments.clear()
        if tf.executing_eagerly():
            self._seen = None
