"""Forward and backward of one micro-batch in a graph: its losses, and its share of the gradient."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from ..core import loss_result
from ..core.errors import WeightError
from ..core.moments import Moments
from ..core.weight import Reduction, Terms, as_terms, check_weight, share
from . import gradients
from .auxiliary import Auxiliary, shape_of
from .batch import Layout, any_size, num_samples
from .batch_norm import BatchNorms
from .checks import check_loss
from .distributed import replicas
from .distributed.one_replica import LossContext, one_replica
from .gradients import Gradient
from .internals import converted
from .layers import batch_norms
from .optimizers import AnyOptimizer
from .weight import WEIGHT, as_tensor, checked, summed_weight, where


class Beside(NamedTuple):
    """What a micro-batch has besides its losses and its gradient; empty lists as a rule."""

    aux: list[tf.Tensor]
    """The leaves of aux, with `has_aux`."""
    moments: list[Moments]
    """The statistics of BatchNormalization layers."""


Loss = Callable[[Any, Any], Any]
Weight = Callable[[Any], Any]


class Backward:
    """Runs one micro-batch through the model, forward and backward, on one replica.

        losses, gradients, beside = backward(tensors, share)

    stands for

        with tf.GradientTape() as tape:
            value = loss(model, micro_batch) * weight / total
        gradients = tape.gradient(value, model.trainable_variables)

    `model` has the variables; `given` is what the user passed as the model.
    """

    def __init__(
        self,
        layout: Layout,
        model: Any,
        given: Any,
        optimizer: AnyOptimizer,
        loss: Loss,
        weight: Weight | None,
        reduction: Reduction,
        jit_compile: bool,
        auxiliary: Auxiliary | None,
        batch_norms: BatchNorms,
    ) -> None:
        self._layout, self._model, self._given, self._optimizer = layout, model, given, optimizer
        self._loss = loss
        self.weight, self.reduction, self.jit_compile = weight, reduction, jit_compile
        self.auxiliary, self.batch_norms = auxiliary, batch_norms
        self.is_share_used = False
        """Whether the loss reads its share of the whole batch. Valid only after `traced()`."""
        self._all_terms = tf.function(self._run, jit_compile=jit_compile or None, autograph=False)
        self._by_term = tf.function(self._run_by_term, jit_compile=jit_compile or None, autograph=False)

    @property
    def may_have_moments(self) -> bool:
        """Whether moments of BatchNormalization layers may be recorded."""
        return self.batch_norms.mode == "batch" and bool(batch_norms(self._model))

    def variables(self) -> list[Any]:
        return replicas.trainable(self._model)

    def traced(self, tensors: Sequence[Any], num_terms: int) -> Any:
        """The traced pass, for a batch of any size."""
        return self._all_terms.get_concrete_function(list(map(any_size, tensors)), tf.TensorSpec([num_terms], WEIGHT))

    # --- weights -----------------------------------------------------------------------------------------

    def weigh(self, tensors: Sequence[Any]) -> tf.Tensor:
        """The weight of one micro-batch, term by term."""
        if self.weight is None:
            return tf.cast(num_samples(tensors), WEIGHT)[None]
        weights = as_terms(converted(self.weight, self._layout.pack(tensors)))
        if not weights:
            raise WeightError("the weight has 0 terms: return a number, or one for each term of the loss")
        check_weight(tuple(w for w in weights if not tf.is_tensor(w)), of="a micro-batch")
        pairs = [summed_weight(as_tensor(w)) for w in weights]
        return checked(tf.stack([summed for summed, _ in pairs]), tf.reduce_all([is_good for _, is_good in pairs]))

    def num_terms(self, tensors: Sequence[Any]) -> int:
        """How many terms the weight has. The loop must know before it is traced."""
        weigh = tf.function(lambda tensors: self.weigh(tensors), autograph=False)
        return int(weigh.get_concrete_function(list(map(any_size, tensors))).structured_outputs.shape[0])

    def shares(self, weights: tf.Tensor, totals: tf.Tensor) -> tf.Tensor:
        """The factors of the losses: w / W, or 1 with reduction "sum"."""
        return tf.ones_like(weights) if self.reduction == "sum" else share(weights, totals, where)

    # --- the pass ----------------------------------------------------------------------------------------

    def __call__(self, tensors: Sequence[Any], share: tf.Tensor) -> Any:
        """The losses of one micro-batch times their shares, the gradient of their sum, and what is beside them."""
        return self._all_terms(tensors, share)

    def run_or_skip(
        self, share: tf.Tensor, num: Any, run: Callable[[Any, tf.Tensor], Any], skip: Callable[[], Any]
    ) -> Any:
        """Calls `run(backward, share)`, or `skip()` if the share is 0, since the mean over nothing may be 0/0.

        `run` calls `backward(tensors, share)`. If only some terms of the loss have the share 0, that pass leaves them
        out. Aux has rows of samples that do not count, too, so with aux only a micro-batch of `num` = 0 samples is
        skipped.
        """

        def some() -> Any:
            if share.shape[0] == 1 and self.auxiliary is None:
                return run(self, share)
            is_whole = tf.reduce_all(share > 0)
            return tf.cond(is_whole, lambda: run(self, share), lambda: run(self._by_term, share))

        return tf.cond(tf.reduce_any(share > 0) if self.auxiliary is None else num > 0, some, skip)

    def _run(self, tensors: Sequence[Any], share: tf.Tensor) -> tuple[tf.Tensor, list[Gradient], Beside]:
        """The share enters as the gradient that the tape starts from, which saves a multiplication and its gradient."""
        with self.batch_norms.recording() as moments:
            with tf.GradientTape() as tape:
                terms, aux = self._forward(tensors, share)
            beside = Beside(aux, list(moments))
            # float16 and bfloat16 would round the share, so for them the wide gradient is scaled instead of the loss
            is_late = len(terms) == 1 and terms[0].dtype != gradients.wide_dtype(terms[0].dtype)
            seeds = tf.unstack(self._optimizer.scaled(tf.ones_like(share) if is_late else share))
            grads = self._gradients(tape, terms, seeds)
        return _times_share(terms, share), gradients.scaled(grads, share[0]) if is_late else grads, beside

    def _run_by_term(self, tensors: Sequence[Any], share: tf.Tensor) -> tuple[tf.Tensor, list[Gradient], Beside]:
        """The same with a gradient for each term, since a term whose share is 0 may be 0/0."""
        with self.batch_norms.recording() as moments:
            with tf.GradientTape(persistent=True) as tape:
                terms, aux = self._forward(tensors, share)
            beside = Beside(aux, list(moments))
            sums: list[Gradient] = [None] * len(self.variables())
            seeds = tf.unstack(self._optimizer.scaled(tf.ones_like(share)))
            for term, seed, each in zip(terms, seeds, tf.unstack(share), strict=True):
                grads = gradients.weighted(self._gradients(tape, (term,), [seed]), each)
                sums = [gradients.added(*pair) for pair in zip(sums, grads, strict=True)]
        return _times_share(terms, share), sums, beside

    def _forward(self, tensors: Sequence[Any], share: tf.Tensor) -> tuple[Terms, list[tf.Tensor]]:
        """The losses of one micro-batch, as means over it, and the leaves of aux."""
        context = LossContext(share[0] if share.shape[0] == 1 else None)
        with one_replica(context):
            returned = converted(self._loss, self._given, self._layout.pack(tensors))
        self.is_share_used |= context.is_share_used
        has_aux = self.auxiliary is not None
        terms, aux = loss_result.split(returned, share.shape[0], has_aux=has_aux, shape_of=shape_of)
        leaves = [] if self.auxiliary is None else self.auxiliary.leaves(aux, num_samples(tensors))
        return check_loss(terms, share.shape[0]), leaves

    def _gradients(self, tape: tf.GradientTape, terms: Terms, seeds: Sequence[tf.Tensor]) -> list[Gradient]:
        variables = self.variables()
        seeds = [tf.cast(seed, term.dtype) for seed, term in zip(seeds, terms, strict=True)]
        grads = tape.gradient(terms, variables, output_gradients=seeds)
        return [gradients.widened(g, v.shape) for g, v in zip(grads, variables, strict=True)]


def _times_share(terms: Sequence[tf.Tensor], share: tf.Tensor) -> tf.Tensor:
    """Losses times their shares; 0 where the share is 0, even if the loss is NaN."""
    return tf.math.multiply_no_nan(tf.stack([tf.cast(term, WEIGHT) for term in terms]), share)
