"""What becomes of a step that is not finite: it is skipped, raised as an error, or the end of the run."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import tensorflow as tf

from ..core.errors import NonFiniteError, OptionError, OrderError
from ..core.nonfinite import check_on_nonfinite
from ..core.options import Option, check_size
from . import checks

OnNonFinite = Literal["skip", "raise", "stop"]
IN_A_ROW = "bigbatch: too many steps in a row were skipped, since their gradients are not finite"
REMEDY = "look at the data of that step, lower the learning rate, or clip"
THE_LOSS = -1
APPLIED, SKIPPED, WITHOUT_WEIGHT = 0, 1, 2


class Record(NamedTuple):
    """What is known of the steps that were skipped since the last one that was not."""

    num_in_a_row: int
    first_step: int
    first_variable: int
    last: int
    """What became of the last step: APPLIED, SKIPPED or WITHOUT_WEIGHT."""
    step: int
    variable: int


class Outcome(tf.Module):
    """The graph writes down what it skipped, and the host looks at it after the step.

    The numbers are int32, which TensorFlow keeps in the host's memory. The graph has asked the device whether the
    gradient is finite, to know which way to go, so that looking waits for nothing more.
    """

    on_nonfinite = Option(check_on_nonfinite)
    max_skipped = Option(check_size)

    def __init__(self, on_nonfinite: OnNonFinite, max_skipped: int | None, strategy: tf.distribute.Strategy) -> None:
        super().__init__(name="outcome")
        self.on_nonfinite = on_nonfinite
        self.max_skipped = max_skipped
        self.is_stopped = False
        with strategy.scope():
            self.record = tf.Variable(tf.zeros([len(Record._fields)], tf.int32), trainable=False, name="skipped")

    # --- in the graph, across replicas -------------------------------------------------------------------

    def went_well(self) -> None:
        self.record.assign(tf.zeros_like(self.record))

    def had_no_weight(self) -> None:
        """A step that counts nothing neither adds to those that were skipped nor ends their row."""
        self.record.assign(self.record * [1, 1, 1, 0, 0, 0] + [0, 0, 0, WITHOUT_WEIGHT, 0, 0])

    def went_wrong(self, step: tf.Tensor, variable: tf.Tensor) -> None:
        num, first_step, first_variable, *_ = tf.unstack(tf.identity(self.record))
        step, is_first = tf.cast(step, tf.int32), num == 0
        first = tf.where(is_first, step, first_step), tf.where(is_first, variable, first_variable)
        self.record.assign(tf.stack([num + 1, *first, SKIPPED, step, variable]))

    def check_graph(self) -> None:
        """Refuses what cannot be done in a graph of the user's, where nothing can be raised."""
        if self.on_nonfinite != "skip" and not tf.executing_eagerly():
            raise OptionError(
                f'on_nonfinite="{self.on_nonfinite}" works in eager code only: pass "skip" for a tf.function of your '
                "own, and look at last_step"
            )

    def unless_too_many(self, value: tf.Tensor) -> tf.Tensor:
        """The value; in a graph of the user's an error once too many steps were skipped."""
        if self.max_skipped is None or tf.executing_eagerly():
            return value
        record = tf.identity(self.record)
        told = [IN_A_ROW, "number:", record[0], "first in step:", record[1]]
        with tf.control_dependencies([tf.debugging.Assert(record[0] < self.max_skipped, told)]):
            return tf.identity(value)

    # --- on the host -------------------------------------------------------------------------------------

    def check_going(self) -> None:
        if self.is_stopped:
            raise OrderError(
                "training was stopped by a gradient that is not finite: set accumulator.is_stopped = False to go on"
            )

    def tell(self, found: tf.Tensor, variables: Callable[[], Sequence[Any]], is_scaling: bool) -> bool:
        """Raises or stops as the user wants it, after a step that left this record; whether the step was applied.

        To an optimizer that scales the loss an overflow now and then is how it finds its scale.
        """
        record = Record(*map(int, found.numpy()))
        if record.last != SKIPPED:
            return record.last == APPLIED
        if self.on_nonfinite == "raise" and not is_scaling:
            self.went_well()
            what = told(record.variable, variables())
            raise NonFiniteError(f"{what} is not finite in step {record.step}, so no variable was changed: {REMEDY}")
        is_too_many = self.max_skipped is not None and record.num_in_a_row >= self.max_skipped
        if self.on_nonfinite == "stop" and (is_too_many or not is_scaling):
            self.is_stopped = True
        elif is_too_many:
            self.went_well()
            what = told(record.first_variable, variables())
            raise NonFiniteError(
                f"{record.num_in_a_row} steps in a row were skipped since their gradients are not finite, the first in "
                f"step {record.first_step}, where {what} was first not finite: {REMEDY}, or pass max_skipped=None"
            )
        return False


def told(number: int, variables: Sequence[Any]) -> str:
    if number == THE_LOSS:
        return "the loss"
    return f"the gradient of {checks.name_of(variables[number])}"
