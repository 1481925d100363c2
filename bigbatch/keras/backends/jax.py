"""fit on the jax backend: the micro-batches are one `lax.scan` in the step that fit compiles."""

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax.experimental.sparse import JAXSparse
from jax.sharding import PartitionSpec
from keras import tree
from keras.src.backend import set_keras_mask

from ...core.errors import BatchError
from ...jax.checks import is_finite
from ...jax.cut import Cut
from ...jax.distributed import add_up
from .. import checks, loss
from ..loss import Batch, LossSpec, Reductions
from .step import Apply, Backend, FitStep

State = tuple[Any, Any, Any, Any]
"""The values of the trainable, the non-trainable, the optimizer's and the metrics' variables."""


class BackendStep(Backend):
    """Stands for

        gradient_of = jax.value_and_grad(model.compute_loss_and_updates, has_aux=True)
        (loss, updates), gradients = gradient_of(trainable, non_trainable, metrics, x, y, sample_weight)
        trainable, optimizer = model.optimizer.stateless_apply(optimizer, gradients, trainable)

    with a `lax.scan` over micro-batches in place of the second line. Each micro-batch hands its non-trainable
    variables (seeds, say) to the next.
    """

    def __init__(self, step: FitStep) -> None:
        self.step = step
        self.model = step.model
        self.replaces: dict[str, Any] = {"train_step": self.train_step}

    def train_step(self, state: State, data: Any) -> Any:
        model = self.model
        trainable, non_trainable, optimizer, metrics = state
        batch: Batch = keras.utils.unpack_x_y_sample_weight(data)
        x, y, sample_weight = batch
        self.step.check()
        size = checks.batch_size(batch)
        spec = self.step.spec(batch, lambda: self.inspect(state, batch))
        sums, non_trainable, metrics, value, layer_losses, pooled, leaves = self._on_devices(spec, state, batch, size)

        y_pred = spec.rebuild(leaves) if spec.needs_outputs else None
        with keras.StatelessScope(self.values((trainable, non_trainable, optimizer, metrics))) as scope:
            value = self.step.loss_of_batch(spec, batch, y_pred, layer_losses, value)
            self.step.update_norms(pooled)
        non_trainable = [scope.get_current_value(v) for v in model.non_trainable_variables]
        metrics = [scope.get_current_value(v) for v in model.metrics_variables]
        if spec.needs_outputs:
            # Keras's own step loses the masks of outputs between loss and metrics (3.15, only on JAX), so we do too
            y_pred = loss.map_tensors(unmasked, y_pred)
        trainable, optimizer = self.step.update(
            sums,
            value,
            lambda sums: model.optimizer.stateless_apply(optimizer, sums, trainable),
            lambda: (trainable, optimizer),
        )
        if spec.own is not None:
            logs, metrics = self._tracked(metrics, value, size)
        else:
            logs, metrics = model._update_metrics_variables(metrics, value, x, y, y_pred, sample_weight)
        return logs, (trainable, non_trainable, optimizer, metrics)

    def _tracked(self, metrics: Any, value: Any, size: int) -> tuple[Any, Any]:
        """Adds the loss to the metrics; a loss function updates the others."""
        held = self.model.metrics_variables
        with keras.StatelessScope(list(zip(held, metrics, strict=True))) as scope:
            self.model._loss_tracker.update_state(value, sample_weight=size)
            logs = self.model.get_metrics_result()
        return logs, [scope.get_current_value(v) for v in held]

    def _on_devices(self, spec: LossSpec, state: State, batch: Batch, size: int) -> tuple[Any, ...]:
        """Calls `_accumulate`, on each device's part of the batch if possible.

        With DataParallel every device runs its own loop, and the sums are reduced once, after it. A model that updates
        variables in its calls (BatchNormalization) must see whole micro-batches, so for it, and with ModelParallel,
        the compiler splits each micro-batch over the devices and reduces after each.
        """
        distribution = keras.distribution.distribution()
        num_devices = 1
        if distribution is not None:
            mesh, axis = distribution.device_mesh.backend_mesh, distribution.batch_dim_name
            num_devices = mesh.shape.get(axis, 1)
        num = size // num_devices
        own = min(num, max(1, self.step.micro_batch_size // num_devices))  # each device's part of a micro-batch
        is_data_parallel = isinstance(distribution, keras.distribution.DataParallel)
        if num_devices == 1 or not is_data_parallel or self._updates_variables(state, batch[0]):
            return self._accumulate(spec, state, batch, Cut(num, own), size)
        are_seeds = self._are_seeds()

        def on_one(state: State, batch: Batch) -> tuple[Any, ...]:
            trainable, non_trainable, optimizer, metrics = state
            seeds = [  # different on every device, so that no dropout mask repeats
                jax.random.fold_in(v, jax.lax.axis_index(axis)) if is_seed else v
                for v, is_seed in zip(non_trainable, are_seeds, strict=True)
            ]
            state = trainable, seeds, optimizer, metrics
            sums, after, *rest = self._accumulate(spec, state, batch, Cut(num, own), size, (axis,))
            of_each = zip(non_trainable, seeds, after, are_seeds, strict=True)
            after = [v + (b - a) if is_seed else b for v, a, b, is_seed in of_each]  # all advance by the same amount
            return sums, after, *rest

        rows, whole = PartitionSpec(axis), PartitionSpec()
        shared = tree.map_structure(lambda leaf: rows if _has_rows(leaf) else whole, batch)
        mapped = jax.shard_map(
            on_one,
            mesh=mesh,
            in_specs=(whole, shared),
            out_specs=(whole, whole, whole, whole, whole, whole, rows),
            axis_names={axis},
            check_vma=False,  # True refuses loops that begin with zeros, as in every RNN
        )
        found: tuple[Any, ...] = mapped(state, batch)
        return found

    def _updates_variables(self, state: State, x: Any) -> bool:
        """Whether the model changes variables other than seeds, or may do so in a loss function."""
        if self.step.norms.called or self.step.own is not None:
            return True
        found: list[bool] = []

        def trace(state: State, x: Any) -> None:
            _, after, _ = self.forward(state[0], state[1], x)
            found.extend(a is not b for a, b in zip(state[1], after, strict=True))

        jax.eval_shape(trace, state, x)
        return any(changed and not is_seed for changed, is_seed in zip(found, self._are_seeds(), strict=True))

    def _are_seeds(self) -> list[bool]:
        """Which of the non-trainable variables are states of random number generators."""
        seeds = set(map(id, checks.seeds_of(self.model)))
        return [id(variable) in seeds for variable in self.model.non_trainable_variables]

    def _accumulate(
        self, spec: LossSpec, state: State, batch: Batch, cut: Cut, size: int, axes: tuple[str, ...] = ()
    ) -> tuple[Any, ...]:
        """The gradient of the batch, the updated variables, the loss, what model.losses add, the moments, the outputs.

        `cut` is that of each device's part of a batch of `size` samples. `batch` is such a part if `axes` are given.
        """
        model = self.model
        trainable, non_trainable, optimizer, metrics = state
        dtype, has_own = self.step.dtype, spec.own is not None
        shares_of_each = self._term_shares(spec, state, batch, cut, axes) if spec.needs_model_for_weights else None

        def gradient_of(
            trainable: Any, non_trainable: Any, metrics: Any, micro_batch: Batch, sample_share: Any, term_shares: Any
        ) -> Any:
            y_pred, non_trainable, losses = self.forward(trainable, non_trainable, micro_batch[0])
            state = trainable, non_trainable, optimizer, metrics
            with keras.StatelessScope(self.values(state), collect_losses=has_own) as scope:
                micro, layer_losses, _ = loss.micro_loss(
                    model, spec, micro_batch, y_pred, losses, sample_share, term_shares
                )
                if has_own:  # which calls the model, and updates the metrics, in this scope
                    non_trainable = [scope.get_current_value(v) for v in model.non_trainable_variables]
                    metrics = [scope.get_current_value(v) for v in model.metrics_variables]
                aux = non_trainable, metrics, micro, layer_losses, self.step.norms.moments, spec.leaves(y_pred)
                return model.optimizer.scale_loss(micro), aux

        def body(carry: Any, number: Any, num: int) -> tuple[Any, list[Any]]:
            sums, non_trainable, metrics, value, layer_losses, pooled = carry
            micro_batch = _take(cut, batch, number, num)
            sample_share = loss.share(jnp.asarray(checks.batch_size(micro_batch), dtype), size)
            term_shares = None if shares_of_each is None else shares_of_each[number]
            gradients, (non_trainable, metrics, micro, micro_layer_losses, moments, leaves) = jax.grad(
                gradient_of, has_aux=True
            )(trainable, non_trainable, metrics, micro_batch, sample_share, term_shares)
            sums = [s + g.astype(s.dtype) for s, g in zip(sums, gradients, strict=True)]
            pooled = self.step.norms.pool(pooled, moments)
            carry = sums, non_trainable, metrics, value + micro, layer_losses + micro_layer_losses, pooled
            return carry, [_by_device(leaf, num) for leaf in leaves]

        zero = jnp.zeros((), dtype)
        sums = [jnp.zeros(v.shape, loss.wide(v.dtype)) for v in trainable]
        carry = sums, non_trainable, metrics, zero, zero, self.step.norms.start()
        (sums, non_trainable, metrics, value, layer_losses, pooled), stacks = cut.loop(body, carry)
        sums, value, layer_losses = add_up((sums, value, layer_losses), axes)
        sums = [s.astype(v.dtype) for s, v in zip(sums, trainable, strict=True)]
        leaves = [_in_order(leaf) for leaf in cut.join(stacks)]
        return sums, non_trainable, metrics, value, layer_losses, pooled, leaves

    def _term_shares(self, spec: LossSpec, state: State, batch: Batch, cut: Cut, axes: tuple[str, ...]) -> Any:
        """For each micro-batch, the shares of its terms: w_tk / W_t.

        Masks come out of the model, so it runs once more, without gradients. The compiler keeps only what masks need.
        """

        def body(total: Any, number: Any, num: int) -> tuple[Any, list[Any]]:
            micro_batch = _take(cut, batch, number, num)
            y_pred, _, _ = self.forward(state[0], state[1], micro_batch[0], training=False)
            num_samples = checks.batch_size(micro_batch)
            weights = loss.weights(self.model, spec, micro_batch, y_pred, num_samples, self.step.dtype)
            return total + weights, [weights]

        total, stacks = cut.loop(body, jnp.zeros(len(spec.kinds), self.step.dtype))
        return loss.share(jnp.concatenate([weights for (weights,) in stacks]), add_up(total, axes))

    def values(self, state: State) -> list[tuple[Any, Any]]:
        """Pairs of all variables and their values."""
        model = self.model
        variables = (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )
        return [pair for pairs in zip(variables, state, strict=True) for pair in zip(*pairs, strict=True)]

    def if_finite(self, checked: list[Any], gradients: list[Any], apply: Apply, skip: Callable[[], Any]) -> Any:
        return jax.lax.cond(is_finite(checked), lambda: apply(gradients), skip)

    def first_batch(self, state: State, iterator: Any) -> tuple[Any, tuple[State, Any]]:
        first = next(iterator)
        return first, (state, itertools.chain([first], iterator))

    def infer_reductions(self, batch: Batch, *args: Any) -> Reductions:
        state, _ = args
        batch = tree.map_structure(lambda leaf: leaf if leaf is None else jnp.asarray(leaf), batch)
        with jax.default_matmul_precision("highest"):  # by default a GPU rounds differently for another batch size
            return self.step.infer_eagerly(batch, lambda rows, start, stop: rows[start:stop], self.values(state))

    def forward(self, trainable: Any, non_trainable: Any, x: Any, *, training: bool = True) -> Any:
        """The model's output, the updated non-trainable variables, and model.losses. See `FitStep.call`."""
        if self.step.own is not None:
            return None, non_trainable, []
        options = {"training": training} if self.model._call_has_training_arg else {}
        with self.step.norms.recording() if training else nullcontext():
            return self.model.stateless_call(trainable, non_trainable, x, return_losses=True, **options)

    def inspect(self, state: State, batch: Batch) -> LossSpec:
        """The spec of a batch, from one micro-batch that is traced and never runs."""
        found = []
        size = checks.batch_size(batch)

        def trace(state: State, batch: Batch) -> None:
            cut = Cut(size, min(size, self.step.micro_batch_size or size))
            micro_batch = _take(cut, batch, 0, cut.size)
            if self.step.own is not None:
                with keras.StatelessScope(self.values(state), collect_losses=True):
                    self.step.own.loss(self.model, *micro_batch)
                found.append(self.step.own.spec)
                return
            y_pred, _, losses = self.forward(state[0], state[1], micro_batch[0])
            with keras.StatelessScope():  # a loss may assign to a variable of its own, which would keep a tracer
                found.append(loss.inspect(self.model, micro_batch, y_pred, losses))

        jax.eval_shape(trace, state, batch)
        return found[0]


def _take(cut: Cut, batch: Batch, number: Any, num: int) -> Any:
    """A micro-batch: `num` samples from each device's part of the batch, so that no samples move between devices.

    Values without axes are passed whole.
    """

    def leaf(value: Any) -> Any:
        if isinstance(value, JAXSparse):
            raise BatchError("a sparse JAX array cannot be cut: give fit a dense one")
        return _in_order(cut.take(_by_device(value, cut.num_samples), number, num)) if _has_rows(value) else value

    return tree.map_structure(leaf, batch)


def _by_device(rows: Any, num: int) -> Any:
    """Rows of shape (devices * num, ...), each device's part after the other, as (num, devices, ...)."""
    return rows.reshape(-1, num, *rows.shape[1:]).swapaxes(0, 1)


def _in_order(rows: Any) -> Any:
    """The inverse of `_by_device`."""
    return rows.swapaxes(0, 1).reshape(-1, *rows.shape[2:])


def _has_rows(leaf: Any) -> bool:
    return leaf is not None and jnp.ndim(leaf) > 0


def unmasked(tensor: Any) -> Any:
    set_keras_mask(tensor, None)
    return tensor
