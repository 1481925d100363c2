"""What ends a window: the gradient of the whole batch is checked, clipped and applied, once."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from ..core.errors import LossError
from ..core.options import Option, check_clip
from ..core.step import Step
from ..core.weight import Reduction, from_terms
from . import checks, gradients
from . import exclusive as users
from .checks import WEIGHT
from .distributed import replicas
from .gradients import Gradient
from .internals import is_for_xla
from .nonfinite import Outcome
from .optimizer import Optimizer

SKIPPED = "bigbatch: a step was skipped, since its gradient is not finite; no variable was changed"


class Update(tf.Module):
    """One step of the optimizer; the same on all replicas."""

    clip_norm, clip_value = Option(check_clip), Option(check_clip)

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        strategy: tf.distribute.Strategy,
        reduction: Reduction,
        clip_norm: float | None,
        clip_value: float | None,
        outcome: Outcome,
    ) -> None:
        super().__init__(name="update")
        self.model = model
        self.strategy = strategy
        self.reduction: Reduction = reduction
        self.clip_norm = clip_norm
        self.clip_value = clip_value
        self.outcome = outcome
        self.optimizer = Optimizer(optimizer, strategy)
        self.is_ready = False
        self._held = users.Held()
        with strategy.scope():
            self.num_steps = tf.Variable(0, trainable=False, dtype=tf.int64, name="num_steps")
            """How many windows are done, applied or not."""

    def prepare(self) -> None:
        """Makes what no graph can make: the optimizer's variables."""
        if self.is_ready:
            return
        self.optimizer.check_knows(self.model.trainable_variables)
        self.is_ready = True
        is_keras = self.optimizer.kind == "keras"
        with self.strategy.scope():
            self.optimizer.build(self.model.trainable_variables if is_keras else self.variables_now())
        checks.tell_batch_norm(self.model)

    def variables_now(self) -> list[Any]:
        """What is trained now, as TensorFlow's variables."""
        return [replicas.as_tf_variable(v) for v in self.model.trainable_variables]

    @contextmanager
    def alone(self, replica: int | None = None) -> Iterator[None]:
        """Keeps others away from the model and the optimizer, on one replica or on all of them."""
        every = range(self.strategy.num_replicas_in_sync)
        variables = self.variables_now()
        with users.alone([self.model, self.optimizer.optimizer, *variables], every if replica is None else [replica]):
            self._held.variables = variables
            yield

    def finished(self, found: list[Gradient], total: tf.Tensor) -> tuple[Any, ...]:
        """On a replica: the gradient of the whole batch, checked and clipped; the same on all of them."""
        if all(g is None for g in found):
            raise LossError("the loss reached none of the model's trainable variables: compute it with the model")
        unit = tf.cast(self.optimizer.scale(), WEIGHT)
        norm = gradients.norm(found) / unit
        has_weight = tf.reduce_any(total > 0) | (self.reduction == "sum")
        found = gradients.clipped(found, norm, self.clip_norm, self.clip_value, unit)
        return found, norm, tf.math.is_finite(norm), has_weight

    def applied(
        self,
        found: Any,
        norm: Any,
        is_finite: Any,
        has_weight: Any,
        losses: Any,
        total: Any,
        num: Any,
        *,
        is_loss_known: bool = True,
    ) -> tuple[Any, ...]:
        """Across replicas: the step, if the gradient is finite and counts anything.

        Where the user wants to hear of it, so must be the loss.
        """
        norm, is_finite, has_weight, losses, total, num = (
            self.strategy.experimental_local_results(value)[0]
            for value in (norm, is_finite, has_weight, losses, total, num)
        )

        is_scaling, outcome = self.optimizer.is_scaling, self.outcome
        if outcome.on_nonfinite != "skip" and is_loss_known and not is_scaling:
            is_finite &= tf.reduce_all(tf.math.is_finite(losses))

        def on_replica(found: Any) -> None:
            variables = self.model.trainable_variables if self.optimizer.kind == "keras" else self.variables_now()
            self.optimizer.apply(found, variables)

        def apply() -> None:
            with self.optimizer.reduced_already():
                self.strategy.run(on_replica, args=(found,))
            if is_scaling:
                tf.cond(is_finite, outcome.went_well, note)
            else:
                outcome.went_well()

        def note() -> None:
            first = self.strategy.run(gradients.first_not_finite, args=(found,))
            outcome.went_wrong(self.num_steps + 1, self.strategy.experimental_local_results(first)[0])

        def leave_out() -> None:
            note()
            if outcome.on_nonfinite != "raise" and not is_for_xla():
                tf.print(SKIPPED, output_stream=sys.stderr)

        # an optimizer that scales the loss must see what is not finite, to lower its scale
        tf.cond(
            has_weight & (is_finite | is_scaling),
            apply,
            lambda: tf.cond(has_weight, leave_out, outcome.had_no_weight),
        )
        self.num_steps.assign_add(1)
        return losses, total, norm, has_weight & is_finite, num, tf.identity(outcome.record)

    def check(self, found: Any) -> None:
        """In eager code: looks at what `applied` returned, and raises or stops if the user wants it."""
        if self.outcome.tell(found[-1], lambda: self.model.trainable_variables, self.optimizer.is_scaling):
            users.changed(self._held.variables)

    def told(self, found: Any, micro_batch_size: int | None = None) -> Step:
        """What `applied` returned, for the user."""
        losses, total, norm, is_applied, num, *_ = found
        return Step(
            terms=lambda: tuple(map(float, losses)),
            weight=lambda: from_terms(tuple(map(float, total))),
            grad_norm=lambda: float(norm),
            num_micro_batches=lambda: int(num),
            micro_batch_size=micro_batch_size,
            is_applied=lambda: bool(is_applied),
            reduction=self.reduction,
        )
