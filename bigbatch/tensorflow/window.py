"""A partly filled window: its sums so far, in variables that outlive a call."""

from typing import Any

import tensorflow as tf

from ..core.errors import GradientError, OrderError
from ..core.options import Option, check_steps, positive
from ..core.weight import Reduction, is_number, share
from ..core.window import AccumulationSteps, steps_at
from . import checks, gradients
from .distributed import replicas
from .internals import converted
from .optimizer import Optimizer
from .sums import Summed, Sums
from .weight import where

_BAD_STEPS = "accumulation_steps(step) is less than 1: return a whole number of at least 1"


class PartialWindow(tf.Module):
    """The sums of the window that `add()` fills, or `step()` with a `Window` of micro-batches.

    The caller multiplies gradients by their share before they are added. `step()` knows the total weight W, so its
    shares are w / W. `add()` does not know it yet: it multiplies by w, and `summed` divides by W at the end.

    Args:
        model: Its trainable variables have the sums.
        optimizer: What steps.
        strategy: The strategy of the model.
        reduction: "mean" or "sum".
        accumulation_steps: How many micro-batches a window has that is fed by `add()`.
    """

    accumulation_steps = Option(check_steps)

    def __init__(
        self,
        model: Any,
        optimizer: Optimizer,
        strategy: tf.distribute.Strategy,
        reduction: Reduction,
        accumulation_steps: AccumulationSteps | None,
    ) -> None:
        super().__init__(name="window")
        self.accumulation_steps = accumulation_steps
        self._model = model
        self._optimizer = optimizer
        self._strategy = strategy
        self._reduction: Reduction = reduction
        self._sums: Sums | None = None
        self._seen: int | None = None
        """How often the variables had been changed when the window was opened."""

    def num_micro_batches(self) -> int:
        """In eager code: how many there are so far."""
        return 0 if self._sums is None else self._sums.num_whole()

    def num_wanted(self, step: tf.Variable) -> tf.Tensor:
        """How many micro-batches the window has that ends with this step."""
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
    def sums(self) -> Sums:
        """Those of the window that is open."""
        return self.sums_for(1) if self._sums is None else self._sums

    def sums_for(self, num_terms: int) -> Sums:
        """Sums for the variables that are trainable now, and for a loss of so many terms."""
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
                self._sums = Sums(variables, self._strategy, num_terms)
        return self._sums

    def end_micro_batch(self) -> None:
        """Across replicas: counts what each of them has added as one micro-batch."""
        self.sums.end(self._optimizer.num_steps())

    def check_whole(self) -> None:
        """Across replicas, in eager code: drops the window if a micro-batch was added in part (Ctrl-C).

        If it was the first of its window, nothing else is lost, and nothing is raised.
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

        Args:
            now: How often they have been changed.
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

    def summed(self, total: tf.Tensor | None = None) -> Summed:
        """Across replicas: what the window adds up to, on each replica.

        Args:
            total: The total weight, if gradients were multiplied by w / W. None if they were multiplied by w.
        """
        present = self.sums.present()
        if total is None and not present:
            raise GradientError("no variable got a gradient in this window: compute the loss with the model")

        def on_replica() -> Summed:
            grads, weight, losses = self.sums.read(present)
            if total is None and self._reduction == "mean":
                rest = share(1.0, weight, where)
                grads, losses = gradients.scaled(grads, rest), losses * rest
            return Summed(grads, losses, weight[None] if total is None else total, tf.identity(self.sums.count))

        summed: Summed = self._strategy.run(on_replica)
        return summed

    def clear(self) -> None:
        """Across replicas: leaves nothing of the window."""
        self._strategy.run(self.sums.clear)
        self.sums.cleared()
        if tf.executing_eagerly():
            self._seen = None
