"""A copy of the user's model, a batch, and the ways to compute its gradient."""

import warnings
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import tensorflow as tf
from ml_dtypes import finfo

from ...core.batch import batch_norm_causes
from ...core.errors import BigBatchWarning, OptionError
from ...core.verify import trial
from ...core.verify.trial import Array, Gradient, Loop, Rows, scales_of
from ...core.weight import Reduction, Terms, as_terms, shares
from ...core.window import Window, cuts
from ..accumulator import Accumulator
from ..backward import Loss, Weight
from ..batch import Layout, batch_size, slice_rows
from ..distributed.one_replica import LossContext, one_replica
from ..distributed.replicas import as_tf_variable
from ..gradients import dense
from ..internals import outside_of_scopes
from ..layers import batch_norms, dropout_off, dropouts, with_value


class Trial(trial.Trial):
    """What core/verify/compare.py needs. Dropout is switched off for the comparison, and a note says so.

    All variables of the model are restored at the end.
    """

    def __init__(
        self,
        model: Any,
        batch: Any,
        loss: Loss,
        micro_batch_size: int,
        weight: Weight | None,
        reduction: Reduction,
        strategy: tf.distribute.Strategy,
    ) -> None:
        self.model, self.strategy, self.loss, self.weight = model, strategy, loss, weight
        self.reduction: Reduction = reduction
        self.layout = layout = Layout(batch)
        self.batch = layout.pack(layout.tensors)
        self.parts = parts = [range(rows.start, rows.stop) for rows in cuts(batch_size(layout), micro_batch_size)]
        self.epsilon = max((_epsilon_of(v.dtype) for v in model.trainable_variables), default=_epsilon_of("float64"))
        self.micro_batches = [
            layout.pack([slice_rows(t, rows.start, rows.stop) for t in layout.tensors]) for rows in parts
        ]
        self._held = [(v, tf.identity(as_tf_variable(v))) for v in model.variables]
        self._dropouts = [layer.name for layer in dropouts(model)]

    def full(self) -> Gradient:
        return self._gradient_of(self.batch)[0]

    def accumulated(self) -> Gradient:
        self._restore()
        eagerly = tf.config.functions_run_eagerly()
        tf.config.run_functions_eagerly(True)  # the optimizer reads the values
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", BigBatchWarning)  # reported as a cause
                options: dict[str, Any] = {"weight": self.weight, "reduction": self.reduction}
                with self.strategy.scope():
                    optimizer = _recorder()
                    accumulator = Accumulator(self.model, optimizer, self._loss, **options)
                step = accumulator.step(Window(self.micro_batches))
        finally:
            tf.config.run_functions_eagerly(eagerly)
        if not step.is_applied:  # not finite, so it was kept from the optimizer
            return {name: np.full(v.shape, np.nan) for name, v in self._named()}
        names = {id(v): name for name, v in self._named()}
        return {names[id(v)]: g.numpy() for g, v in optimizer.seen}

    def gradient_of(self, rows: Rows, term: int | None = None) -> tuple[Gradient, float]:
        index = tf.constant(list(rows))
        picked = [t if t.shape.rank == 0 else tf.gather(t, index) for t in self.layout.tensors]
        return self._gradient_of(self.layout.pack(picked), term)

    def by_loop(self, loop: Loop, order: Rows | None = None) -> tuple[Gradient, Gradient]:
        raise OptionError(
            "verify(step=…) is for PyTorch, where gradients stay on the model: compare two trainings here"
        )

    def right_scales(self) -> Array:
        return scales_of([*map(self._weight_of, self.micro_batches)], self.reduction)

    def _weight_of(self, batch: Any) -> Terms:
        if self.weight is None:
            return (batch_size(Layout(batch)),)
        weights = as_terms(self.weight(batch))
        return tuple(float(tf.reduce_sum(tf.cast(w, tf.float64))) for w in weights)

    def _context_of(self, batch: Any) -> LossContext:
        """With this part's share of the whole batch, for a loss that divides by the size of the whole batch."""
        by_term = shares(self._weight_of(batch), self._weight_of(self.batch), self.reduction)
        return LossContext(by_term[0] if len(by_term) == 1 else None)

    def notes(self) -> list[str]:
        if not self._dropouts:
            return []
        return [
            f"dropout ({', '.join(self._dropouts)}) was switched off for the comparison; in training each micro-batch "
            "draws its own masks, which are as random as the full batch's but not the same"
        ]

    def layer_causes(self) -> list[str]:
        names = [layer.name for layer in batch_norms(self.model)]
        return batch_norm_causes(names, 'pass batch_norm="frozen"', layer="BatchNormalization")

    def quiet(self) -> AbstractContextManager[None]:
        return with_value(batch_norms(self.model), "trainable", False)  # then it uses its moving statistics

    def _loss(self, model: Any, batch: Any) -> Any:
        with dropout_off(model):
            return self.loss(model, batch)

    def _gradient_of(self, batch: Any, term: int | None = None) -> tuple[Gradient, float]:
        """The gradient of a part of the batch, with the loss computed as the accumulator does."""
        self._restore()
        named = self._named()
        context = self._context_of(batch)
        with outside_of_scopes():  # on one device
            with tf.GradientTape() as tape, one_replica(context):
                terms = as_terms(self._loss(self.model, batch))
                total = tf.add_n([tf.reshape(t, []) for t in terms]) if term is None else tf.reshape(terms[term], [])
            self.epsilon = max(self.epsilon, _epsilon_of(total.dtype))
            grads = tape.gradient(total, [as_tf_variable(v) for _, v in named])
        gradient = {name: dense(g).numpy() for (name, _), g in zip(named, grads, strict=True) if g is not None}
        return gradient, float(total)

    def _named(self) -> list[tuple[str, Any]]:
        return [(getattr(v, "path", v.name), v) for v in self.model.trainable_variables]

    def _restore(self) -> None:
        """Restores moving statistics and random seeds, which change with every pass."""
        for variable, value in self._held:
            variable.assign(value)

    give_back = _restore


def _epsilon_of(dtype: Any) -> float:
    return float(finfo(tf.as_dtype(dtype).as_numpy_dtype).eps)


def _recorder() -> Any:
    """An optimizer that changes nothing and keeps the gradients that it is given."""
    import keras

    class Recorder(keras.optimizers.SGD):
        def apply_gradients(self, grads_and_vars: Any, **_: Any) -> None:
            self.seen = list(grads_and_vars)

    return Recorder(0.0)


def wide_copy(model: Any, dtype: str) -> Any:
    """A copy in another dtype if the model can be rebuilt from its configuration; else the model itself."""
    import keras

    def rebuilt(layer: Any) -> Any:
        return type(layer).from_config({**layer.get_config(), "dtype": dtype})

    try:
        twin = keras.models.clone_model(model, clone_function=rebuilt)
        twin.set_weights(model.get_weights())
    except (TypeError, ValueError, NotImplementedError):
        return model
    return twin
