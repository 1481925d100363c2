"""fit on the tensorflow backend: the whole step is one graph, the micro-batches are a loop in it."""

import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from .. import checks, loss
from ..loss import Batch, Form
from ..verify.trial import Found
from . import tensorflow_replicas as replicas
from .step import FitStep
from .tensorflow_batch import as_tensor, cut, num_samples, placeholder, spec, with_rows, without_optional

Body = Callable[[Any, Any, Any], tuple[Any, list[Any]]]


class TensorFlowStep:
    """Stands for

        with tf.GradientTape() as tape:
            loss = model.compute_loss(x, y, model(x, training=True), sample_weight)
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))

    with a `tf.while_loop` over micro-batches in the place of the first two lines.
    """

    def __init__(self, step: FitStep) -> None:
        self.step = step
        self.model = step.model
        self.micro_batch_size = step.micro_batch_size
        self.replaces: dict[str, Any] = {}
        self.strategy = self.model._distribute_strategy
        if self.strategy is not None:
            self.replaces["_maybe_symbolic_build"] = self._maybe_symbolic_build
            if replicas.is_multi_worker(self.strategy):
                self.replaces["test_step"] = self.test_step

    def train_step(self, data: Any) -> Any:
        model = self.model
        batch: Batch = keras.utils.unpack_x_y_sample_weight(tree.map_structure(as_tensor, data))
        checks.check_rows(batch)
        batch = with_rows(batch, num_samples(batch[0]))
        x, y, sample_weight = batch
        specs = tree.map_structure(spec, batch)
        form = self.step.form(specs, lambda: self.look(specs))
        self.step.check()
        checks.check_replicas(replicas.num_replicas(), form.has_own_loss)
        size = num_samples(x)
        total = replicas.add_up(tf.cast(size, self.step.dtype))
        gradients, value, added, leaves = self.accumulate(form, batch, size, total)

        y_pred = None
        if form.needs_outputs:
            y_pred = form.rebuild(leaves)
        if form.needs_outputs and not form.is_bound:
            with loss.losses_of(model, [] if added is None else [added]):
                whole = model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)
            value = whole if form.has_own_loss or form.is_vector else value
        # with several replicas, value is this one's part of the loss of all: the tracker adds up value * samples
        part = loss.share(total, tf.cast(size, total.dtype)) if replicas.num_replicas() > 1 else 1
        model._loss_tracker.update_state(value * tf.cast(part, value.dtype), sample_weight=size)
        if weights := model.trainable_weights:
            gradients = replicas.add_up(gradients)
            with replicas.added_up_already(model.optimizer):
                model.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        else:
            warnings.warn("The model does not have any trainable weights.", stacklevel=2)
        logs = model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
        return replicas.as_vectors(logs) if replicas.is_multi_worker(self.strategy) else logs

    def accumulate(self, form: Form, batch: Batch, size: Any, total: Any) -> tuple[Any, ...]:
        """The gradient of the batch, its loss, what model.losses add to it, and the model's outputs."""
        model, weights = self.model, self.model.trainable_weights
        shares_at = self.count(form, batch, size) if form.is_counted else None
        has_gradient, has_added = [False] * len(weights), False

        def body(start: Any, num: Any, carry: Any) -> tuple[Any, list[Any]]:
            nonlocal has_added
            sums, value, added = carry
            micro_batch = cut(batch, start, num)
            share = loss.share(tf.cast(num, total.dtype), total)
            shares = None if shares_at is None else shares_at(start)
            with tf.GradientTape() as tape:
                y_pred = self.step.call(micro_batch[0])
                micro, extra = loss.micro_loss(model, form, micro_batch, y_pred, model.losses, share, shares)
                scaled = self.step.scale(micro)
            gradients = tape.gradient(scaled, weights)
            for i, gradient in enumerate(gradients):
                has_gradient[i] |= gradient is not None
            has_added |= extra is not None
            # tf.py_function forgets the shape
            sums = [
                s if g is None else tf.ensure_shape(s + tf.cast(g, s.dtype), s.shape)
                for s, g in zip(sums, gradients, strict=True)
            ]
            return (sums, value + micro, added if extra is None else added + extra), form.leaves(y_pred)

        zero = tf.zeros((), total.dtype)
        carry = ([tf.zeros(v.shape, loss.wide(v.dtype)) for v in weights], zero, zero)
        (sums, value, added), leaves = self.loop(body, carry, size, form.specs())
        gradients = [
            tf.cast(s, v.dtype) if has else None for s, v, has in zip(sums, weights, has_gradient, strict=True)
        ]
        return gradients, value, added if has_added else None, leaves

    def count(self, form: Form, batch: Batch, size: Any) -> Callable[[Any], Any]:
        """The shares of each loss that has a mask or divides by sample weights.

        Masks come out of the model, so it runs once more, without gradients; in a graph only what the masks need
        is left of that.
        """

        def body(start: Any, num: Any, total: Any) -> tuple[Any, list[Any]]:
            micro_batch = cut(batch, start, num)
            found = loss.parts(self.model, micro_batch, self.step.call(micro_batch[0], training=False))
            weights = [tf.cast(loss.weigh(*pair, num), self.step.dtype) for pair in zip(found, form.kinds, strict=True)]
            return total + tf.stack(weights), [tf.repeat(tf.stack(weights)[None], num, axis=0)]

        num_parts = len(form.kinds)
        specs = [tf.TensorSpec((None, num_parts), self.step.dtype)]
        total, (weights,) = self.loop(body, tf.zeros(num_parts, self.step.dtype), size, specs)
        shares = loss.share(weights, replicas.add_up(total))
        return lambda start: tf.unstack(shares[tf.minimum(start, size - 1)], num_parts)  # XLA looks beyond the end

    def loop(self, body: Body, carry: Any, size: Any, specs: list[Any]) -> tuple[Any, list[Any]]:
        """Runs `body(start, num, carry) -> carry, tensors` for each micro-batch, and joins the tensors."""
        micro = self.micro_batch_size
        is_fixed = self.model.jit_compile and not self.model.run_eagerly  # XLA wants to know all sizes beforehand
        if is_fixed:
            micro = min(micro, size) if isinstance(size, int) else tf.minimum(micro, size)
        num_loops = size // micro if is_fixed else -(-size // micro)
        arrays = [
            tf.TensorArray(s.dtype, size=num_loops, infer_shape=False, element_shape=(None, *s.shape[1:]))
            for s in specs
        ]

        def step(k: Any, carry: Any, arrays: Any) -> tuple[Any, Any, Any]:
            num = micro if is_fixed else tf.minimum(micro, size - k * micro)
            carry, tensors = body(k * micro, num, carry)
            return k + 1, carry, [array.write(k, tensor) for array, tensor in zip(arrays, tensors, strict=True)]

        _, carry, arrays = tf.while_loop(
            lambda k, *_: k < num_loops, step, (tf.constant(0), carry, arrays), parallel_iterations=1
        )
        if not is_fixed:
            return carry, [array.concat() for array in arrays]
        joined = [flat(array.stack()) for array in arrays]
        rest = size % micro
        carry, tensors = tf.cond(
            tf.convert_to_tensor(rest > 0),
            lambda: body(num_loops * micro, rest, carry),
            lambda: (carry, [tf.zeros(tf.concat([[rest], tf.shape(j)[1:]], 0), j.dtype) for j in joined]),
        )
        return carry, [tf.concat(pair, 0) for pair in zip(joined, tensors, strict=True)]

    def look(self, specs: Any) -> Form:
        """Traces one micro-batch in a graph that never runs: builds what is not built, and sees what there is."""
        with tf.__internal__.FuncGraph("bigbatch_form").as_default():
            batch: Batch = tree.map_structure(placeholder, specs)
            x, y, sample_weight = batch
            y_pred = self.step.call(x)
            self.model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)
            return loss.look(self.model, batch, y_pred)

    def peek(self, iterator: Any) -> tuple[Any, tuple[Any]]:
        """Of Keras's iterator the first elements are taken, and given back as another iterator of the same type."""
        num = self.model.steps_per_execution
        first = list(itertools.islice(iterator, num))
        if not first:
            raise StopIteration
        again = iter(first)
        if isinstance(iterator, tf.data.Iterator):  # or Keras would trace its step a second time
            datasets = [tf.data.Dataset.from_tensors(data) for data in first]
            elements = tf.nest.flatten(iter(functools.reduce(tf.data.Dataset.concatenate, datasets)), True)
            again = tf.nest.pack_sequence_as(iterator, elements, expand_composites=True)
        return first[0], (again,)

    def try_out(self, batch: Batch, *args: Any) -> Found:
        """Eagerly, on what the first replica has of the batch."""
        strategy = self.strategy or tf.distribute.get_strategy()
        batch = tree.map_structure(without_optional, batch)
        batch = tree.map_structure(as_tensor, replicas.first_replica(strategy, batch))
        specs = tree.map_structure(spec, batch)
        if not checks.is_even(batch):
            return Found()
        self.step.form(specs, lambda: self.look(specs))  # builds what is not built
        found: list[Found] = []
        with full_precision():
            strategy.run(lambda: found.append(self.step.trial(batch, cut, alone=replicas.alone)))
        return found[0]

    # --- instead of methods of Keras 3.15 that fail under a strategy ------------------------------------------

    def _maybe_symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        """Builds the model from its first batch.

        Keras takes the mean of what the replicas have of it, which fails where they have more and less.
        """
        for _, _, batches in iterator or ():
            data_batch = replicas.first_replica(self.strategy, next(batches))
            break
        with self.strategy.scope():
            self.model._symbolic_build(data_batch=data_batch)

    def test_step(self, data: Any) -> Any:
        return replicas.as_vectors(type(self.model).test_step(self.model, data))


@contextmanager
def full_precision() -> Iterator[None]:
    """Without TensorFloat-32, which rounds otherwise for another batch size."""
    config = tf.config.experimental
    was = config.tensor_float_32_execution_enabled()
    config.enable_tensor_float_32_execution(False)
    try:
        yield
    finally:
        config.enable_tensor_float_32_execution(was)


def flat(stacked: Any) -> Any:
    """Merges the first two axes."""
    return tf.reshape(stacked, tf.concat([[-1], tf.shape(stacked)[2:]], 0))
