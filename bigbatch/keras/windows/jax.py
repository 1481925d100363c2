"""Windows on the jax backend: a jitted function for each part of a step, called once for each micro-batch."""

from typing import Any

import jax
import jax.numpy as jnp
import keras
from keras import ops, tree

from .. import checks, loss
from ..backends.jax import BackendStep, State, unmasked
from ..backends.step import FitStep
from ..loss import Batch, LossSpec
from .step import track_loss, update_metrics


class BackendPasses:
    """See `Passes`. The sums of a window also hold the variables that a micro-batch hands to the next."""

    def __init__(self, step: FitStep, cut: BackendStep) -> None:
        self.step = step
        self.model = step.model
        self.cut = cut

    def make(self) -> None:
        self._weigh_jit = self._compiled(self._weigh)
        self._backward_jit = self._compiled(self._backward, donate_argnums=0)
        options: dict[str, Any] = {"donate_argnums": (1, 2)}  # the sums have no output to be reused for
        if keras.distribution.distribution() is not None:
            options["out_shardings"] = (None, self.model._get_state_sharding_spec())
        self._finish_jit = self._compiled(self._finish, **options)

    def _compiled(self, function: Any, **options: Any) -> Any:
        is_eager = self.model.run_eagerly or not self.model.jit_compile
        return function if is_eager else jax.jit(function, **options)

    def batch(self, data: Any) -> Batch:
        batch: Batch = keras.utils.unpack_x_y_sample_weight(data)
        return tree.map_structure(lambda leaf: leaf if leaf is None else jnp.asarray(leaf), batch)

    def inspect(self, state: State, batch: Batch) -> LossSpec:
        return self.cut.inspect(state, batch)

    def weigh(self, state: State, batch: Batch) -> Any:
        return self._weigh_jit(state[0], state[1], batch)

    def _weigh(self, trainable: Any, non_trainable: Any, batch: Batch) -> Any:
        y_pred, _, _ = self.cut.forward(trainable, non_trainable, batch[0], training=False)
        spec = self._spec((trainable, non_trainable, [], []), batch)
        return loss.weights(self.model, spec, batch, y_pred, checks.batch_size(batch), self.step.dtype)

    def _spec(self, state: State, batch: Batch) -> LossSpec:
        return self.step.spec(batch, lambda: self.cut.inspect(state, batch))

    def begin(self, state: State, spec: LossSpec) -> Any:
        trainable, non_trainable, _, metrics = state
        zeros = [jnp.zeros(v.shape, loss.wide(v.dtype)) for v in trainable]
        scalars = [jnp.zeros((), self.step.dtype) for _ in range(1 + len(spec.kinds))]  # donated, so one for each
        return zeros, scalars, non_trainable, metrics, self.step.norms.start()

    def backward(self, sums: Any, state: State, batch: Batch, sample_share: Any, term_shares: Any) -> Any:
        return self._backward_jit(sums, state[0], state[2], batch, sample_share, term_shares)

    def _backward(
        self, sums: Any, trainable: Any, optimizer: Any, batch: Batch, sample_share: Any, term_shares: Any
    ) -> Any:
        model = self.model
        gradients_so_far, scalars, non_trainable, metrics, pooled = sums
        x, y, sample_weight = batch

        def gradient_of(trainable: Any) -> Any:
            y_pred, after, losses = self.cut.forward(trainable, non_trainable, x)
            spec = self._spec((trainable, non_trainable, optimizer, metrics), batch)
            state = (trainable, after, optimizer, metrics)
            with keras.StatelessScope(self.cut.values(state), collect_losses=self.step.own is not None) as scope:
                micro = loss.micro_loss(
                    model, spec, batch, y_pred, losses, sample_share, term_shares, keeps_updates=True
                )
                scaled = model.optimizer.scale_loss(micro.value)
            values = [[scope.get_current_value(v) for v in held] for held in self._held()]
            return scaled, ([micro.value, *micro.terms], y_pred, self.step.norms.moments, *values)

        gradients, (values, y_pred, moments, non_trainable, metrics) = jax.grad(gradient_of, has_aux=True)(trainable)
        y_pred = loss.map_tensors(unmasked, y_pred)  # as in Keras's own step (3.15, only on JAX)
        with keras.StatelessScope(list(zip(model.metrics_variables, metrics, strict=True))) as scope:
            logs = update_metrics(self.step, x, y, y_pred, sample_weight)
        metrics = [scope.get_current_value(v) for v in model.metrics_variables]
        gradients = [s + g.astype(s.dtype) for s, g in zip(gradients_so_far, gradients, strict=True)]
        scalars = [a + ops.cast(b, a.dtype) for a, b in zip(scalars, values, strict=False)]
        pooled = self.step.norms.pool(pooled, moments)
        return (gradients, scalars, non_trainable, metrics, pooled), logs

    def _held(self) -> tuple[Any, Any]:
        return self.model.non_trainable_variables, self.model.metrics_variables

    def finish(self, sums: Any, state: State, size: Any, logs: Any) -> Any:
        found, state = self._finish_jit(sums, state[0], state[2], size)
        return {**logs, **found}, state

    def _finish(self, sums: Any, trainable: Any, optimizer: Any, size: Any) -> Any:
        model = self.model
        gradients, (value, *terms), non_trainable, metrics, pooled = sums
        gradients = [g.astype(v.dtype) for g, v in zip(gradients, trainable, strict=True)]
        trainable, optimizer = self.step.update(
            gradients,
            value,
            lambda gradients: model.optimizer.stateless_apply(optimizer, gradients, trainable),
            lambda: (trainable, optimizer),
        )
        with keras.StatelessScope(self.cut.values((trainable, non_trainable, optimizer, metrics))) as scope:
            self.step.update_norms(pooled)
            track_loss(model, value, terms, size)
            logs = model.get_metrics_result()
        non_trainable, metrics = ([scope.get_current_value(v) for v in held] for held in self._held())
        return logs, (trainable, non_trainable, optimizer, metrics)
