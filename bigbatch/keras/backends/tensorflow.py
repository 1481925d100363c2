"""fit on the tensorflow backend: the whole step is one graph, with a loop over the micro-batches in it.

Under tf.distribute each replica cuts its own part of the batch and adds up its own gradients. Replicas communicate
twice: before the first micro-batch, to add up the number of samples, and the weights of losses that masks or sample
weights decide; and after the last, to add up the gradients.
"""

import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from ...core.moments import Moments, over_ranks
from ...tensorflow.batch import (
    Layout,
    any_size,
    is_tensor,
    num_samples,
    slice_rows,
    slice_rows_for_xla,
    take_micro_batch,
)
from ...tensorflow.distributed import replicas
from ...tensorflow.distributed.one_replica import LossContext, one_replica
from ...tensorflow.internals import outside_of_scopes, without_reduction
from .. import checks, loss
from ..loss import Batch, LossSpec, Reductions
from .step import Apply, Backend, FitStep

_Body = Callable[[Any, Any], tuple[Any, list[Any]]]

_OTHER_ROWS = (
    "an array of x, y or sample_weight has another number of samples than the first of x: all arrays of a batch share "
    "their leading axis"
)


class BackendStep(Backend):
    """Stands for

        with tf.GradientTape() as tape:
            loss = model.compute_loss(x, y, model(x, training=True), sample_weight)
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))

    with a `tf.while_loop` over micro-batches in place of the first two lines.
    """

    def __init__(self, step: FitStep) -> None:
        self.step = step
        self.model = step.model
        self.replaces: dict[str, Any] = {"train_step": self.train_step}
        self.strategy = self.model._distribute_strategy
        self.has_workers = isinstance(self.strategy, tf.distribute.MultiWorkerMirroredStrategy)
        if self.strategy is not None:
            self.replaces["_maybe_symbolic_build"] = self._maybe_symbolic_build
        if self.has_workers:
            self.replaces["test_step"] = self.test_step

    def train_step(self, data: Any) -> Any:
        step, model = self.step, self.model
        batch: Batch = keras.utils.unpack_x_y_sample_weight(tree.map_structure(as_tensor, data))
        checks.batch_size(batch, may_be_empty=True)  # raises if they differ
        batch = _with_equal_rows(batch)
        spec = step.spec(batch, lambda: self.inspect(batch))
        step.check()
        checks.check_replicas(tf.distribute.get_strategy().num_replicas_in_sync, spec.has_own_loss)
        size = tf.cast(_num_samples(batch), step.dtype)
        (total,) = _sum_over_replicas([size])
        sums, summed_loss, layer_losses, pooled, leaves = self._accumulate(spec, batch, total)
        step.update_norms(_over_replicas(pooled))

        y_pred = spec.rebuild(leaves) if spec.needs_outputs else None
        batch_loss = step.loss_of_batch(spec, batch, y_pred, layer_losses, summed_loss)
        if replicas.is_shared() and not spec.is_vector:
            batch_loss = summed_loss
        # on several replicas this is only one part of the loss, and the tracker multiplies each part by size / total
        batch_loss *= tf.cast(loss.share(total, size), batch_loss.dtype)
        model._loss_tracker.update_state(batch_loss, sample_weight=size)
        if weights := model.trainable_weights:
            sums = _sum_over_replicas(sums)
            gradients = [None if s is None else tf.cast(s, v.dtype) for s, v in zip(sums, weights, strict=True)]

            def apply(gradients: list[Any]) -> None:
                with without_reduction(getattr(model.optimizer, "inner_optimizer", model.optimizer)):
                    model.optimizer.apply_gradients(zip(gradients, weights, strict=True))

            step.update(gradients, batch_loss, apply)
        else:
            warnings.warn("The model does not have any trainable weights.", stacklevel=2)
        x, y, sample_weight = batch
        logs = step.logs(x, y, y_pred, sample_weight)
        return _as_vectors(logs) if self.has_workers else logs

    def _accumulate(self, spec: LossSpec, batch: Batch, total: Any) -> tuple[Any, ...]:
        """This replica's wide gradient sums, its loss, the part from model.losses, the moments, the model's outputs."""
        model, weights = self.model, self.model.trainable_weights
        term_shares = self._term_shares(spec, batch) if spec.needs_model_for_weights else None
        has_gradient = [False] * len(weights)

        def body(micro: Any, carry: Any) -> tuple[Any, list[Any]]:
            sums, value, layer_losses, pooled = carry
            micro_batch, shares = micro
            sample_share = loss.share(tf.cast(_num_samples(micro_batch), total.dtype), total)
            # all rows are equal; the one behind them is for a micro-batch without rows, which XLA compiles too
            shares = None if shares is None else tf.unstack(tf.pad(shares, [[0, 1], [0, 0]])[0])
            # or Keras's losses would divide by the number of replicas
            with tf.GradientTape() as tape, one_replica(LossContext(1.0)):
                y_pred = self.step.call(micro_batch[0])
                micro_loss, micro_layer_losses, _ = loss.micro_loss(
                    model, spec, micro_batch, y_pred, model.losses, sample_share, shares
                )
                scaled = self.step.scale(micro_loss)
            gradients = tape.gradient(scaled, weights)
            for i, gradient in enumerate(gradients):
                has_gradient[i] |= gradient is not None
            # tf.py_function forgets the shape
            sums = [
                s if g is None else tf.ensure_shape(s + tf.cast(g, s.dtype), s.shape)
                for s, g in zip(sums, gradients, strict=True)
            ]
            pooled = self.step.norms.pool(pooled, self.step.norms.moments)
            return (sums, value + micro_loss, layer_losses + micro_layer_losses, pooled), spec.leaves(y_pred)

        zero = tf.zeros((), total.dtype)
        carry = ([tf.zeros(v.shape, loss.wide(v.dtype)) for v in weights], zero, zero, self.step.norms.start())
        carry, leaves = self._loop(body, carry, (batch, term_shares), spec.leaves(spec.outputs))
        sums, value, layer_losses, pooled = carry
        sums = [s if has else None for s, has in zip(sums, has_gradient, strict=True)]
        return sums, value, layer_losses, pooled, leaves

    def _term_shares(self, spec: LossSpec, batch: Batch) -> Any:
        """For each sample, the shares of its micro-batch's terms: w_tk / W_t.

        Masks come out of the model, so it runs once more, without gradients. A graph keeps only what masks need.
        """

        def body(micro_batch: Batch, total: Any) -> tuple[Any, list[Any]]:
            num = _num_samples(micro_batch)
            y_pred = self.step.call(micro_batch[0], training=False)
            weights = loss.weights(self.model, spec, micro_batch, y_pred, num, self.step.dtype)
            return total + weights, [tf.repeat(weights[None], num, axis=0)]

        zeros = tf.zeros(len(spec.kinds), self.step.dtype)
        total, (weights,) = self._loop(body, zeros, batch, [tf.TensorSpec((None, len(spec.kinds)), self.step.dtype)])
        (total,) = _sum_over_replicas([total])
        return loss.share(weights, total)

    def _loop(self, body: _Body, carry: Any, batch: Any, outputs: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Runs `body(micro_batch, carry) -> carry, tensors` for each micro-batch, and joins the tensors.

        XLA must know all sizes beforehand, so there the shorter last micro-batch comes after the loop.
        """
        layout, micro = Layout(batch), self.step.micro_batch_size
        size = num_samples(layout.tensors)
        is_for_xla = self.model.jit_compile and not self.model.run_eagerly
        # TensorFlow joins an empty list only if all other axes are known; else this runs an empty micro-batch
        rest, num = 0, tf.maximum(-(-size // micro), int(any(None in o.shape[1:] for o in outputs)))
        if is_for_xla:
            micro = tf.minimum(micro, size)
            divisor = tf.maximum(micro, 1)
            rest = size % divisor
            num = tf.maximum(size // divisor, 1)  # without samples one empty micro-batch: XLA has no empty TensorArray
        arrays = [
            tf.TensorArray(o.dtype, size=num, infer_shape=False, element_shape=(None, *o.shape[1:])) for o in outputs
        ]

        def add(k: Any, state: Any) -> Any:
            tensors = layout.tensors
            cut = [
                slice_rows_for_xla(t, k * micro, micro) if is_for_xla else take_micro_batch(t, k, micro)
                for t in tensors
            ]
            carry, found = body(layout.pack(cut), state[0])
            return k + 1, (carry, [array.write(k, tensor) for array, tensor in zip(state[1], found, strict=True)])

        state = tf.constant(0), (carry, arrays)
        _, (carry, arrays) = tf.while_loop(lambda k, _: k < num, add, state, parallel_iterations=1)
        if not is_for_xla:
            return carry, [array.concat() for array in arrays]
        joined = [_flat(array.stack()) for array in arrays]

        def last() -> Any:
            return body(layout.pack([slice_rows_for_xla(t, size - rest, rest) for t in layout.tensors]), carry)

        def nothing() -> Any:
            return carry, [tf.zeros(tf.concat([[rest], tf.shape(j)[1:]], 0), j.dtype) for j in joined]

        carry, tensors = tf.cond(rest > 0, last, nothing)
        return carry, [tf.concat(pair, 0) for pair in zip(joined, tensors, strict=True)]

    def inspect(self, batch: Batch) -> LossSpec:
        """The spec, from a micro-batch in a graph that never runs. Builds what is not built."""
        found = []
        types = tree.map_structure(lambda leaf: None if leaf is None else any_size(leaf), batch)

        def trace(batch: Batch) -> None:
            x, y, sample_weight = batch
            if self.step.own is not None:
                self.step.own.loss(self.model, *batch)
                found.append(self.step.own.spec)
                return
            y_pred = self.step.call(x)
            losses = self.model.losses
            self.model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)
            found.append(loss.inspect(self.model, batch, y_pred, losses))

        tf.function(trace, autograph=False).get_concrete_function(types)
        if self.step.norms.find():  # layers that were made while the model was built
            tf.function(trace, autograph=False).get_concrete_function(types)
        return found[-1]

    def if_finite(self, checked: list[Any], gradients: list[Any], apply: Apply, skip: Callable[[], Any]) -> Any:
        """Around all replicas, because an optimizer cannot synchronize them inside of a condition."""

        def across_replicas(strategy: Any, is_finite: Any, gradients: list[Any]) -> None:
            of_one = strategy.experimental_local_results(is_finite)[0]  # the same on all
            tf.cond(of_one, lambda: strategy.extended.call_for_each_replica(apply, args=(gradients,)), skip)

        is_finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(tensor)) for tensor in checked])
        tf.distribute.get_replica_context().merge_call(across_replicas, args=(is_finite, gradients))

    def first_batch(self, iterator: Any) -> tuple[Any, tuple[Any]]:
        """Takes the first elements of Keras's iterator, and gives them back as another iterator of the same type."""
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

    def infer_reductions(self, batch: Batch, *args: Any) -> Reductions:
        """Eagerly, on the first replica's part of the batch."""
        batch = tree.map_structure(without_optional, batch)
        batch = tree.map_structure(as_tensor, _of_first_replica(self.model.distribute_strategy, batch))
        self.step.spec(batch, lambda: self.inspect(batch))  # builds what is not built
        with outside_of_scopes(), _full_precision():
            return self.step.infer_eagerly(batch, slice_rows)

    # --- instead of methods of Keras 3.15 that fail under a strategy ------------------------------------------

    def _maybe_symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        """Builds the model from its first batch.

        Keras takes the mean over the replicas' parts of it, which fails if their sizes differ.
        """
        for _, _, batches in iterator or ():
            data_batch = _of_first_replica(self.strategy, next(batches))
            break
        with self.strategy.scope():
            self.model._symbolic_build(data_batch=data_batch)

    def test_step(self, data: Any) -> Any:
        return _as_vectors(type(self.model).test_step(self.model, data))


def as_tensor(leaf: Any) -> Any:
    """Arrays become tensors; None stays None."""
    return leaf if leaf is None or is_tensor(leaf) else tf.convert_to_tensor(leaf)


def without_optional(leaf: Any) -> Any:
    """Keras's datasets have an empty Optional in place of None."""
    return None if isinstance(leaf, tf.experimental.Optional) else leaf


def _of_first_replica(strategy: Any, batch: Any) -> Any:
    """The part of a distributed batch that the first replica of this process gets."""
    return tree.map_structure(lambda value: strategy.experimental_local_results(value)[0], batch)


def _num_samples(batch: Any) -> Any:
    return num_samples(Layout(batch).tensors)


def _with_equal_rows(batch: Batch) -> Batch:
    """The batch, with a check of sizes that are known only when the graph runs. XLA drops the check."""
    size = _num_samples(batch)

    def checked(leaf: Any) -> Any:
        if not isinstance(leaf, tf.Tensor) or not leaf.shape.rank:
            return leaf
        with tf.control_dependencies([tf.debugging.Assert(tf.equal(tf.shape(leaf)[0], size), [_OTHER_ROWS])]):
            return tf.identity(leaf)

    equal: Batch = tree.map_structure(checked, batch)
    return equal


def _sum_over_replicas(tensors: list[Any]) -> list[Any]:
    """The sums over all replicas, in one reduction for each dtype; None stays None."""
    if not replicas.is_shared() or all(tensor is None for tensor in tensors):
        return tensors
    sums, _ = replicas.reduce(tensors, [])
    return sums


def _over_replicas(pooled: list[Moments]) -> list[Moments]:
    """Pools the statistics of all replicas."""
    if not pooled or not replicas.is_shared():
        return pooled
    return over_ranks(pooled, _sum_over_replicas, keras.ops.where)


def _as_vectors(logs: Any) -> Any:
    """Numbers as vectors of one: with several workers, Keras 3.15 takes the mean over the first axis of each log."""
    return tree.map_structure(lambda value: tf.reshape(value, (1,)), logs)


def _flat(stacked: Any) -> Any:
    """Merges the first two axes."""
    return tf.reshape(stacked, tf.concat([[-1], tf.shape(stacked)[2:]], 0))


@contextmanager
def _full_precision() -> Iterator[None]:
    """Without TensorFloat-32, which rounds differently for another batch size."""
    config = tf.config.experimental
    was = config.tensor_float_32_execution_enabled()
    config.enable_tensor_float_32_execution(False)
    try:
        yield
    finally:
        config.enable_tensor_float_32_execution(was)
