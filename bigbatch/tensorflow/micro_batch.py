"""One micro-batch of the user's own loop, under a tape of ours."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ..core.errors import OrderError
from .gradients import Gradient
from .optimizers import AnyOptimizer


class MicroBatch:
    """One micro-batch of the user's own loop; see `Accumulator.micro_batch`.

    Attributes:
        step: The step that this micro-batch completed, once the block has ended; None if its window goes on. In a
            `tf.function` and on several replicas it is always None: read `accumulator.last_step`.
    """

    def __init__(self, tape: tf.GradientTape, variables: Sequence[Any], optimizer: AnyOptimizer) -> None:
        self._tape, self._variables, self._optimizer = tape, variables, optimizer
        self.loss: Any = None
        self.gradients: list[Gradient] | None = None
        self.is_skipped = False
        self.is_over = False
        self.step: Any = None

    @tf.autograph.experimental.do_not_convert
    def backward(self, loss: Any) -> None:
        """Computes the gradient of this micro-batch's loss; the end of the block adds it to the window.

        Args:
            loss: The mean over what `weight` counts. An optimizer's loss scale is applied here.
        """
        self._check_open("backward")
        if self.gradients is not None:
            raise OrderError("micro.backward was called twice in one micro-batch: add the losses up before")
        if self.is_skipped:
            raise OrderError("micro.backward was called after micro.skip(): call one of them")
        scaled = self._optimizer.scaled(loss)
        self.loss, self.gradients = loss, self._tape.gradient(scaled, self._variables)

    @tf.autograph.experimental.do_not_convert
    def skip(self) -> None:
        """Leaves this micro-batch out, instead of `backward`: the window continues as if it had not been."""
        self._check_open("skip")
        if self.gradients is not None:
            raise OrderError("micro.skip was called after micro.backward: call one of them")
        self.is_skipped = True

    def _check_open(self, name: str) -> None:
        if self.is_over:
            raise OrderError(f"micro.{name} was called after its block: call it in the block")

    def check_fed(self) -> None:
        """At the end of the block: raises OrderError unless `backward` or `skip` was called."""
        if self.gradients is None and not self.is_skipped:
            raise OrderError(
                "micro.backward(loss) was not called in this micro-batch: call it once in the block, or micro.skip()"
            )
