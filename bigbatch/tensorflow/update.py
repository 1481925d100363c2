"""What ends a window: the gradient of the whole batch is checked, clipped and applied, once."""

import sys
from typing import Any

import tensorflow as tf

from ..core.errors import GradientError
from ..core.step import Step
from ..core.weight import Reduction, from_terms
from . import checks, gradients, replicas
from .checks import WEIGHT
from .gradients import Gradient
from .optimizer import Optimizer


class Update(tf.Module):
    """One step of the optimizer; the same on all replicas."""

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        strategy: tf.distribute.Strategy,
        reduction: Reduction,
        clip_norm: float | None,
        clip_value: float | None,
    ) -> None:
        super().__init__(name="update")
        self.model = model
        self.strategy = strategy
        self.reduction: Reduction = reduction
        self.clip_norm = clip_norm
        self.clip_value = clip_value
        self.optimizer = Optimizer(optimizer, strategy)
        self.is_ready = False
        with strategy.scope():
            self.num_steps = tf.Variable(0, trainable=False, dtype=tf.int64, name="num_steps")
            """How many windows are done, applied or not."""

    def prepare(self) -> None:
        """Makes what no graph can make: the optimizer's variables."""
        if self.is_ready:
            return
        self.is_ready = True
        with self.strategy.scope():
            self.optimizer.build(self.model.trainable_variables)
        checks.tell_batch_norm(self.model)

    def variables_now(self) -> list[Any]:
        """What is trained now, as TensorFlow's variables."""
        return [replicas.as_tf_variable(v) for v in self.model.trainable_variables]

    def finished(self, found: list[Gradient], total: tf.Tensor) -> tuple[Any, ...]:
        """On a replica: the gradient of the whole batch, checked and clipped; the same on all of them."""
        if all(g is None for g in found):
            raise GradientError("the loss reached none of the model's trainable variables: compute it with the model")
        unit = tf.cast(self.optimizer.scale(), WEIGHT)
        norm = gradients.norm(found) / unit
        has_weight = tf.reduce_any(total > 0) | (self.reduction == "sum")
        found = gradients.clipped(found, norm, self.clip_norm, self.clip_value, unit)
        return found, norm, tf.math.is_finite(norm), has_weight

    def applied(
        self, found: Any, norm: Any, is_finite: Any, has_weight: Any, losses: Any, total: Any, num: Any
    ) -> tuple[Any, ...]:
        """Across replicas: the step, if the gradient is finite and counts anything."""
        norm, is_finite, has_weight, losses, total, num = (
            self.strategy.experimental_local_results(value)[0]
            for value in (norm, is_finite, has_weight, losses, total, num)
        )

        def on_replica(found: Any) -> None:
            variables = self.model.trainable_variables if self.optimizer.kind == "keras" else self.variables_now()
            self.optimizer.apply(found, variables)

        def apply() -> None:
            with self.optimizer.reduced_already():
                self.strategy.run(on_replica, args=(found,))

        def skip() -> None:
            if not self.optimizer.is_scaling:
                told = "bigbatch: a step was skipped, since its gradient is not finite; no variable was changed"
                tf.cond(has_weight, lambda: tf.print(told, output_stream=sys.stderr), tf.no_op)

        # an optimizer that scales the loss must see what is not finite, to lower its scale
        tf.cond(has_weight & (is_finite | self.optimizer.is_scaling), apply, skip)
        self.num_steps.assign_add(1)
        return losses, total, norm, has_weight & is_finite, num

    def told(self, found: Any, micro_batch_size: int | None = None) -> Step:
        """What `applied` returned, for the user."""
        losses, total, norm, is_applied, num = found
        return Step(
            terms=lambda: tuple(map(float, losses)),
            weight=lambda: from_terms(tuple(map(float, total))),
            grad_norm=lambda: float(norm),
            num_micro_batches=lambda: int(num),
            micro_batch_size=micro_batch_size,
            is_applied=lambda: bool(is_applied),
            reduction=self.reduction,
        )
