"""Steps that are skipped because something is not finite: recorded in the graph, reported on the host."""

from typing import Any, NamedTuple

import tensorflow as tf

from ..core.errors import NonFiniteError
from ..core.nonfinite import NonFinite, place_of
from .checks import name_of

_TOO_MANY = "bigbatch: too many steps in a row were skipped, since their gradients are not finite"
_APPLIED, _SKIPPED, _WITHOUT_WEIGHT = 0, 1, 2


class _Record(NamedTuple):
    """The steps that were skipped since the last one that was applied. A variable of -1 stands for the loss."""

    num_in_a_row: int
    first_step: int
    first_variable: int
    last: int
    """What happened to the last step: _APPLIED, _SKIPPED or _WITHOUT_WEIGHT."""
    step: int
    variable: int


class SkippedSteps(tf.Module):
    """A record that the graph writes and the host reads after each step; the policy then says what to do.

    The numbers are int32, which TensorFlow keeps in the host's memory. The graph has already waited for the device to
    say whether the gradient is finite, so reading the record waits for nothing more.
    """

    def __init__(self, policy: NonFinite, strategy: tf.distribute.Strategy) -> None:
        super().__init__(name="skipped_steps")
        self.policy = policy
        with strategy.scope():
            self.record = tf.Variable(tf.zeros([len(_Record._fields)], tf.int32), trainable=False, name="skipped")

    # --- in the graph, across replicas -------------------------------------------------------------------

    def applied(self) -> None:
        self.record.assign(tf.zeros_like(self.record))

    def without_weight(self) -> None:
        """Notes that the step had no weight. The number of steps skipped in a row stays as it is."""
        self.record.assign(tf.concat([self.record[:3], [_WITHOUT_WEIGHT, 0, 0]], 0))

    def skipped(self, step: tf.Tensor, variable: tf.Tensor) -> None:
        num, first_step, first_variable, *_ = tf.unstack(tf.identity(self.record))
        step, is_first = tf.cast(step, tf.int32), num == 0
        first = tf.where(is_first, step, first_step), tf.where(is_first, variable, first_variable)
        self.record.assign(tf.stack([num + 1, *first, _SKIPPED, step, variable]))

    def checked(self, value: tf.Tensor) -> tf.Tensor:
        """The value; in the user's own graph, an error once too many steps have been skipped."""
        if self.policy.max_skipped is None or tf.executing_eagerly():
            return value
        record = tf.identity(self.record)
        message = [_TOO_MANY, "number:", record[0], "first in step:", record[1]]
        with tf.control_dependencies([tf.debugging.Assert(record[0] < self.policy.max_skipped, message)]):
            return tf.identity(value)

    # --- on the host -------------------------------------------------------------------------------------

    def report(self, written: tf.Tensor, model: Any, *, is_scaling: bool) -> bool:
        """Raises or stops as the policy says; returns whether the last step was applied.

        Args:
            written: The record after that step.
            model: The model, for the names of its variables.
            is_scaling: Whether the optimizer adapts its loss scale, which overflows now and then.
        """
        record = _Record(*map(int, written.numpy()))
        if record.last != _SKIPPED:
            return record.last == _APPLIED
        variables = model.trainable_variables
        place, first_place = (
            "the loss" if k < 0 else place_of(name_of(variables[k])) for k in (record.variable, record.first_variable)
        )
        before = {"num_steps": record.num_in_a_row - 1, "first_step": record.first_step, "first_place": first_place}
        self.policy.load_state_dict(before)
        try:
            self.policy.skipped(record.step, place, is_overflow=is_scaling)
            self.policy.check(record.step)
        except NonFiniteError:
            self.applied()  # the row ends
            raise
        return False
