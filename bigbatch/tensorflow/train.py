"""The whole training loop in one call."""

from collections.abc import Iterable
from typing import Any

from ..core.epochs import OnStep, check_one_way, run_epochs
from ..core.history import History
from ..core.window import AccumulationSteps
from .accumulator import Accumulator
from .backward import Loss


def train_with_accumulation(
    model: Any,
    data: Iterable[Any],
    optimizer: Any,
    loss: Loss,
    accumulation_steps: AccumulationSteps | None = None,
    epochs: int = 1,
    *,
    micro_batch_size: int | None = None,
    on_step: OnStep | None = None,
    **options: Any,
) -> History:
    """Trains for some epochs and returns the history. With `accumulation_steps` it replaces the loop

        accumulator = Accumulator(model, optimizer, loss)
        for epoch in range(epochs):
            for window in windows(data, accumulation_steps):    # data yields micro-batches
                history.append(accumulator.step(window))

    and with `micro_batch_size` the loop

        accumulator = Accumulator(model, optimizer, loss, micro_batch_size)
        for epoch in range(epochs):
            for batch in data:                                  # data yields the batches that you want
                history.append(accumulator.step(batch))

    Args:
        model: A model of Keras, or a tf.Module with `trainable_variables`.
        data: Micro-batches or batches, the same ones each time it is iterated: a list or a tf.data.Dataset, not a
            generator.
        optimizer: An optimizer of Keras, tf_keras or tf.compat.v1.train.
        loss: `loss(model, micro_batch)` returns the mean over the micro-batch.
        accumulation_steps: The number of micro-batches in a window, or a function of the step number.
        epochs: How often to iterate over the data.
        micro_batch_size: The number of samples in a micro-batch, in place of `accumulation_steps`.
        on_step: `on_step(step)` is called after each step: `bigbatch.TensorBoard(folder)`, or a function that logs. An
            exception in it ends the training.
        **options: The other options of `Accumulator`: the weight, clipping and so on. If the accumulator stops at a
            step that is not finite, that step is the last of the history.
    """
    check_one_way(accumulation_steps, micro_batch_size)
    accumulator = Accumulator(model, optimizer, loss, micro_batch_size, **options)
    return run_epochs(
        accumulator.step, data, accumulation_steps, epochs, is_stopped=lambda: accumulator.is_stopped, on_step=on_step
    )
