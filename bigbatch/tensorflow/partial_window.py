"""A window that is fed one micro-batch at a time, and may outlive a call: what is added up is in variables."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ..core.errors import GradientError, OptionError, OrderError
from ..core.options import Option, check_steps, positive
from ..core.step import Step
from ..core.weight import is_number
from ..core.window import AccumulationSteps, steps_at
from . import checks, gradients
from . import exclusive as users
from .checks import WEIGHT
from .distributed.one_replica import check_loss
from .gradients import Gradient
from .internals import converted
from .sums import OTHER_VARIABLES, Sums
from .update import Update


class OpenWindow(tf.Module):
    """Sums of gradients, and the step at the window's end."""

    accumulation_steps = Option(check_steps)

    def __init__(self, update: Update, accumulation_steps: AccumulationSteps | None) -> None:
        super().__init__(name="window")
        self.update = update
        self.strategy = update.strategy
        self.reduction = update.reduction
        self.accumulation_steps = accumulation_steps
        self._sums: Sums | None = None
        self._changes: Any = None
        self.is_traced = False
        """Whether a graph of the user's was made of a call."""
        with self.strategy.scope():
            self._told = tf.Variable(tf.zeros([5], WEIGHT), trainable=False, name="told")

    def num_micro_batches(self) -> int:
        """How many there are in the window so far; in eager code."""
        return 0 if self._sums is None else self._sums.num_whole()

    def add(self, found: Sequence[Gradient], weight: Any = None, loss: Any = None) -> None:
        """On a replica: one more micro-batch, and the step if it was the window's last."""
        if self.accumulation_steps is None:
            raise OptionError("add() does not know how long a window is: pass accumulation_steps=…")
        if weight is None and self.reduction == "mean":
            raise OptionError("add() needs weight=…: over how many samples or tokens the loss is a mean")
        checks.check_trainable(self.update.model, is_called=False)
        variables = self.update.variables_now()
        checks.check_gradients(found, variables)
        self._check_eager("add()")
        self.update.outcome.check_going()
        self.update.outcome.check_graph()
        context = tf.distribute.get_replica_context()
        if context is None or context.num_replicas_in_sync != self.strategy.num_replicas_in_sync:
            raise OrderError(
                f"the model is on {self.strategy.num_replicas_in_sync} replicas: call add() in what strategy.run runs"
            )
        if self.reduction == "mean":
            check_loss()
        steps = self._steps_now()
        counted = self.update.outcome.unless_too_many(checks.weight_at_hand(1 if weight is None else weight))
        factor = tf.ones([], WEIGHT) if self.reduction == "sum" else counted
        value = checks.loss_at_hand(float("nan") if loss is None else loss)
        value = value if loss is None else tf.math.multiply_no_nan(value, factor)
        rows = checks.rows_at_hand(found, variables)
        is_good = context.merge_call(self._begin, args=(counted, steps, value, *rows))
        with tf.control_dependencies([is_good]):
            self.sums.add(gradients.weighted([gradients.widened(g) for g in found], factor), counted, value[None])
            context.merge_call(lambda _: self._count(steps))

    def _begin(self, _: Any, *checked: Any) -> tf.Tensor:
        """Across replicas: what comes before adding, and waits for the checks of all of them, in a graph too.

        If one replica is refused, none adds anything.
        """
        if not self.update.is_ready or self._sums is None or not self._sums.fits(self.update.variables_now(), 1):
            with tf.init_scope():
                self.sums_for(1)
                self.update.prepare()
        if tf.executing_eagerly():
            self.check_whole()
            self._check_unchanged()
            self.sums.began()
        local = self.strategy.experimental_local_results
        with tf.control_dependencies([result for each in checked for result in local(each)]):
            return tf.zeros([])

    def _check_eager(self, call: str) -> None:
        optimizer = self.update.optimizer
        if not optimizer.runs_in_graph and not tf.executing_eagerly():
            raise OptionError(
                f"{type(optimizer.optimizer).__name__} steps in eager code only: call {call} outside of tf.function"
            )
        self.is_traced |= not tf.executing_eagerly()

    def flush(self) -> Step | None:
        """Across replicas: the step of the window that is open, however short; in eager code None if none is."""
        self._check_eager("flush()")
        self.update.outcome.check_graph()
        if not tf.executing_eagerly():
            if self.sums.present():
                tf.cond(self.sums.count > 0, self._close_told, lambda: None)
            else:
                tf.debugging.Assert(self.sums.count == 0, [OTHER_VARIABLES])
            return None
        self.check_whole()
        if not self.num_micro_batches():
            return None
        self._check_unchanged()
        self._close_told()
        return self.last_step

    @property
    def last_step(self) -> Step | None:
        """The step that `add` or `flush` made last; None before the first."""
        told = self._told.numpy()
        if not int(told[4]):
            return None
        return self.update.told((told[0:1], told[1:2], *told[2:]))

    @property
    def sums(self) -> Sums:
        """Those of the window that is open."""
        return self.sums_for(1) if self._sums is None else self._sums

    def sums_for(self, num_terms: int) -> Sums:
        """Sums for the variables that are trained now."""
        variables = self.update.variables_now()
        checks.check_trainable(self.update.model, is_called=False)
        if self._sums is None or not self._sums.fits(variables, num_terms):
            with tf.init_scope():
                if self._sums is not None and self.num_micro_batches():
                    raise OrderError(
                        f"the trainable variables changed in the middle of a window ({len(self._sums.gradients)} then, "
                        f"{len(variables)} now): call flush() before that"
                    )
                if self.update.is_ready:
                    self.update.optimizer.check_knows(self.update.model.trainable_variables)
                self._sums = Sums(variables, self.strategy, num_terms)
        return self._sums

    def _count(self, steps: tf.Tensor) -> None:
        """Across replicas: what each of them added is one micro-batch."""
        self.sums.counted(self.update.optimizer.num_steps())
        tf.cond(self.sums.count >= steps, self._close_told, lambda: None)

    def check_whole(self) -> None:
        """Across replicas, in eager code: drops what is left of a micro-batch that was added in part.

        As by a KeyboardInterrupt. If it was the first of its window, nothing else is lost.
        """
        if self._sums is None or self._sums.is_whole():
            return
        count = self.num_micro_batches()
        self.clear()
        if count:
            raise OrderError(
                f"add() was interrupted when its window had {count} micro-batches, and nobody knows how much of the "
                "next was added, so the window was dropped: feed its micro-batches again"
            )

    def _check_unchanged(self) -> None:
        """Across replicas, in eager code: drops a window whose variables somebody else has changed since it began."""
        now = users.num_changes(self.update.variables_now())
        count = self.num_micro_batches()
        if not count or self._changes is None:
            self._changes = now
        opened_at = int(self.sums.opened_at.numpy())
        if count and (self._changes != now or opened_at not in (-1, int(self.update.optimizer.num_steps()))):
            self.clear()
            raise OrderError(
                f"the variables were changed by another step in the middle of a window of {count} micro-batches, whose "
                "gradient would be that of two models, so the window was dropped: flush() before anything else steps"
            )

    def _steps_now(self) -> tf.Tensor:
        """How many micro-batches the window has."""
        steps: Any = self.accumulation_steps
        if callable(steps) and tf.executing_eagerly():
            steps = steps_at(steps, int(self.update.num_steps.numpy()))
        elif callable(steps):
            steps = converted(steps, self.update.num_steps)
        if is_number(steps):
            return tf.constant(positive("accumulation_steps(step)", steps))
        with tf.control_dependencies([tf.debugging.Assert(steps >= 1, [checks.BAD_STEPS])]):
            return tf.cast(steps, tf.int32)

    def _close_told(self) -> None:
        found = self.close(None)
        losses, total, norm, is_applied, num, _ = found
        told = [tf.reduce_sum(losses), tf.reduce_sum(total), norm, is_applied, num]
        self._told.assign(tf.stack([tf.cast(value, WEIGHT) for value in told]))
        if tf.executing_eagerly():
            self.update.check(found)

    def close(self, total: tf.Tensor | None) -> Any:
        """Across replicas: the step on what was added up. A total is given if that is divided by it already."""
        present = self.sums.present()
        if total is None and not present:
            self.clear()
            raise GradientError("no variable got a gradient in this window: compute the loss with the model")

        def on_replica() -> Any:
            found, weight, losses = self.sums.read(present)
            by = total
            if by is None:
                by = weight[None]
                if self.reduction == "mean":
                    inverse = tf.math.divide_no_nan(tf.ones([], WEIGHT), weight)
                    found, losses = gradients.scaled(found, inverse), losses * inverse
            return (*self.update.finished(found, by), losses, by, tf.identity(self.sums.count))

        try:
            return self.update.applied(*self.strategy.run(on_replica), is_loss_known=total is not None)
        finally:
            self.clear()

    def clear(self) -> None:
        """Across replicas: leaves nothing of the window."""
        self.strategy.run(self.sums.clear)
        self.sums.cleared()
        if tf.executing_eagerly():
            self._changes = None
