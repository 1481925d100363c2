"""A whole window as one graph: cut, loop, add up, and reduce over replicas once."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from ..core.errors import WeightError
from ..core.weight import Reduction, Terms, as_terms, check_weight
from . import batch as nest
from . import gradients, loop, memory
from .checks import WEIGHT, added_up, checked, checked_loss
from .distributed import replicas
from .distributed.one_replica import Share, one_replica
from .gradients import Gradient
from .internals import converted
from .loop_sums import is_kept_sparse, sums_for
from .optimizer import Optimizer


class Total(NamedTuple):
    """What a window adds up to, over all its micro-batches and all replicas."""

    gradients: list[Gradient]
    losses: tf.Tensor
    weights: tf.Tensor
    num_micro_batches: tf.Tensor


class WindowGraph:
    """The graph of a window over one kind of batch, on one replica.

    for each micro-batch:                                  # tf.while_loop
        weights += weight(micro_batch)
    for each micro-batch:                                  # tf.while_loop
        sums += gradient of (w_k / W) * loss(micro_batch)
    sums = all_reduce(sums)                                # once, if there are several replicas
    """

    def __init__(
        self,
        layout: nest.Layout,
        loss: Callable[[Any], Any],
        weight: Callable[[Any], Any] | None,
        reduction: Reduction,
        variables: Callable[[], list[Any]],
        optimizer: Optimizer,
        jit_compile: bool,
    ) -> None:
        self.layout = layout
        self.loss = loss
        self.weight = weight
        self.reduction = reduction
        self.variables = variables
        self.optimizer = optimizer
        self.jit_compile = jit_compile
        self.is_share_used = False
        """Whether the loss asked for its share of the whole batch; known when it is traced."""
        self.micro = tf.function(self._micro, jit_compile=jit_compile or None, autograph=False)
        self.micro_apart = tf.function(self._micro_apart, jit_compile=jit_compile or None, autograph=False)

    def over(self, tensors: Sequence[Any], micro_batch_size: int) -> Total:
        """Cuts the batch and adds up."""
        batch_size = loop.num_samples(tensors)
        num = -(-batch_size // micro_batch_size)
        sizes = tf.minimum(micro_batch_size, batch_size - tf.range(num) * micro_batch_size)
        weights = self._weights(tensors, micro_batch_size, num, sizes)
        totals = tf.reduce_sum(weights, 0)
        num_terms = weights.shape[1]
        traced = self.micro.get_concrete_function(list(map(nest.any_size, tensors)), tf.TensorSpec([num_terms], WEIGHT))
        # Terms that have totals of their own are mixed in the sums, so the totals must be known before; a loss may ask
        # for its share of the batch, too. Otherwise the total can follow with the gradients: one reduction fewer.
        is_total_first = num_terms > 1 or self.is_share_used
        if is_total_first and replicas.is_shared():
            totals = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, totals)
        sums, losses = self._loop(tensors, micro_batch_size, num, self.scales(weights, totals), traced)
        if not replicas.is_shared():
            return Total(sums, losses, totals, num)
        if is_total_first or self.reduction == "sum":
            sums, (losses, number) = reduced(sums, [losses, tf.cast(num, WEIGHT)])
            return Total(sums, losses, totals, tf.cast(number, tf.int32))
        sums, (losses, number, total) = reduced(
            gradients.scaled(sums, totals[0]), [losses * totals, tf.cast(num, WEIGHT), totals]
        )
        inverse = tf.math.divide_no_nan(tf.ones([], WEIGHT), total[0])
        return Total(gradients.scaled(sums, inverse), losses * inverse, total, tf.cast(number, tf.int32))

    def scales(self, weights: tf.Tensor, totals: tf.Tensor) -> tf.Tensor:
        """As in core/weight.py: w_k / W, and zero where W is."""
        return tf.ones_like(weights) if self.reduction == "sum" else tf.math.divide_no_nan(weights, totals)

    def weight_of(self, tensors: Sequence[Any]) -> tf.Tensor:
        """The weight of one micro-batch, term by term."""
        if self.weight is None:
            return tf.cast(loop.num_samples(tensors), WEIGHT)[None]
        found = as_terms(converted(self.weight, self.layout.pack(tensors)))
        if not found:
            raise WeightError("the weight has 0 terms: return a number, or one for each term of the loss")
        check_weight(tuple(w for w in found if not tf.is_tensor(w)), of="a micro-batch")
        # tf.cast takes a plain number through float32
        pairs = [added_up(w if tf.is_tensor(w) else tf.constant(w, WEIGHT)) for w in found]
        return checked(tf.stack([added for added, _ in pairs]), tf.reduce_all([is_good for _, is_good in pairs]))

    def _weights(self, tensors: Sequence[Any], micro_batch_size: int, num: Any, sizes: tf.Tensor) -> tf.Tensor:
        """A row for each micro-batch, with a column for each term."""
        if self.weight is None:
            return tf.cast(sizes, WEIGHT)[:, None]
        num_terms = self._num_terms(tensors)

        def add(k: tf.Tensor, micro_batch: list[Any], rows: tf.TensorArray) -> tf.TensorArray:
            return rows.write(k, self.weight_of(micro_batch))

        rows = tf.TensorArray(WEIGHT, size=num, element_shape=[num_terms])
        rows = loop.plain(add, rows, tensors, micro_batch_size, at_once=1)
        return tf.reshape(rows.stack(), [-1, num_terms])

    def _num_terms(self, tensors: Sequence[Any]) -> int:
        weigh = tf.function(lambda tensors: self.weight_of(tensors), autograph=False)
        return int(weigh.get_concrete_function(list(map(nest.any_size, tensors))).structured_outputs.shape[0])

    def _loop(
        self, tensors: Sequence[Any], micro_batch_size: int, num: Any, scales: tf.Tensor, traced: Any
    ) -> tuple[list[Gradient], tf.Tensor]:
        variables = self.variables()
        like = traced.structured_outputs[1]
        is_dense = all(isinstance(t, tf.Tensor) for t in tensors) and not any(map(is_kept_sparse, like, variables))
        is_compiled = self.jit_compile and is_dense and loop.is_good_for_xla(traced.graph)
        sums = sums_for(like, variables, num)

        def add(k: tf.Tensor, micro_batch: list[Any], carry: Any) -> Any:
            losses, states = carry
            scale = tf.gather(scales, k)

            def count(micro: Any) -> tuple[Any, ...]:
                found, each = micro(micro_batch, scale)
                return losses + found, {p: one.add(states[p], k, each[p]) for p, one in sums.items()}

            if self.weight is None:
                return count(self.micro)
            return self.counted(scale, count, lambda: (losses, {p: one.skip(states[p], k) for p, one in sums.items()}))

        def start() -> tuple[Any, ...]:
            return tf.zeros(scales.shape[1:], WEIGHT), {p: one.start() for p, one in sums.items()}

        if is_compiled:
            losses, states = loop.for_xla(add, start, tensors, micro_batch_size)
        else:
            at_once = memory.num_side_by_side(traced.graph, micro_batch_size)
            losses, states = loop.plain(add, start(), tensors, micro_batch_size, at_once)
        return [sums[p].finished(states[p]) if p in sums else None for p in range(len(variables))], losses

    def counted(self, scale: tf.Tensor, count: Callable[[Any], Any], nothing: Callable[[], Any]) -> Any:
        """`count` with the pass that fits. What counts nothing is left out: its mean over nothing may be 0/0."""

        def some() -> Any:
            if scale.shape[0] == 1:
                return count(self.micro)
            return tf.cond(tf.reduce_all(scale > 0), lambda: count(self.micro), lambda: count(self.micro_apart))

        return tf.cond(tf.reduce_any(scale > 0), some, nothing)

    def _micro(self, tensors: Sequence[Any], scale: tf.Tensor) -> tuple[tf.Tensor, list[Gradient]]:
        """The scaled losses of one micro-batch, and the gradient of their sum.

        The scale enters as the gradient that the tape starts from, which saves the multiplication and its gradient.
        """
        with tf.GradientTape() as tape:
            terms = self._terms(tensors, scale)
        # a scale is rounded in float16 and bfloat16, so there the wide gradient is scaled in place of the loss
        is_late = len(terms) == 1 and terms[0].dtype != gradients.wide_dtype(terms[0].dtype)
        seeds = self.optimizer.scaled(tf.ones_like(scale) if is_late else scale)
        seeds = [tf.cast(seed, term.dtype) for seed, term in zip(tf.unstack(seeds), terms, strict=True)]
        variables = self.variables()
        found = tape.gradient(terms, variables, output_gradients=seeds)
        found = [gradients.widened(g, v.shape) for g, v in zip(found, variables, strict=True)]
        return scaled_losses(terms, scale), gradients.scaled(found, scale[0]) if is_late else found

    def _terms(self, tensors: Sequence[Any], scale: tf.Tensor) -> Terms:
        """The losses of one micro-batch, as means over it."""
        share = Share(scale[0] if scale.shape[0] == 1 else None)
        with one_replica(share):
            found = as_terms(converted(self.loss, self.layout.pack(tensors)))
        self.is_share_used |= share.is_used
        return checked_loss(found, scale.shape[0])

    def _micro_apart(self, tensors: Sequence[Any], scale: tf.Tensor) -> tuple[tf.Tensor, list[Gradient]]:
        """The same with a gradient for each term, where one of them counts nothing and may be 0/0."""
        with tf.GradientTape(persistent=True) as tape:
            terms = self._terms(tensors, scale)
        variables = self.variables()
        sums: list[Gradient] = [None] * len(variables)
        seeds = tf.unstack(self.optimizer.scaled(tf.ones_like(scale)))
        for term, seed, each in zip(terms, seeds, tf.unstack(scale), strict=True):
            found = tape.gradient(term, variables, output_gradients=tf.cast(seed, term.dtype))
            found = [gradients.widened(g, v.shape) for g, v in zip(found, variables, strict=True)]
            found = gradients.weighted(found, each)
            sums = [gradients.added(*pair) for pair in zip(sums, found, strict=True)]
        return scaled_losses(terms, scale), sums


def scaled_losses(terms: Sequence[tf.Tensor], scale: tf.Tensor) -> tf.Tensor:
    return tf.math.multiply_no_nan(tf.stack([tf.cast(term, WEIGHT) for term in terms]), scale)


def reduced(sums: Sequence[Gradient], others: list[tf.Tensor]) -> tuple[list[Gradient], list[tf.Tensor]]:
    """Gradients and other tensors added up over all replicas, in one go for each dtype of gradients.

    What is packed together must be of one dtype, so the others travel in the widest that gradients have.
    """
    present = [k for k, g in enumerate(sums) if g is not None]
    dtypes = sorted({sums[k].dtype for k in present}, key=lambda dtype: dtype.size)
    context = tf.distribute.get_replica_context()
    found: list[Gradient] = [None] * len(sums)
    for dtype in dtypes:
        places = [k for k in present if sums[k].dtype == dtype]
        along = [tf.cast(other, dtype) for other in others] if dtype is dtypes[-1] else []
        added = context.all_reduce(tf.distribute.ReduceOp.SUM, [*(gradients.dense(sums[k]) for k in places), *along])
        for k, g in zip(places, added, strict=False):
            found[k] = g
    return found, [tf.cast(value, WEIGHT) for value in added[len(places) :]]
