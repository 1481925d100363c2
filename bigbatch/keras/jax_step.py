"""fit on the jax backend: the micro-batches are one `lax.scan` in the step that fit compiles."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax.experimental.sparse import JAXSparse
from keras import tree
from keras.src.backend import set_keras_mask

from ..core.errors import BatchError
from . import checks, loss
from .loss import Batch, Form
from .step import FitStep

State = tuple[Any, Any, Any, Any]
"""The values of the trainable, the non-trainable, the optimizer's and the metrics' variables."""
Body = Callable[[Any, Batch, Any], tuple[Any, list[Any]]]


class JAXStep(FitStep):
    """Stands for

        gradient_of = jax.value_and_grad(model.compute_loss_and_updates, has_aux=True)
        (loss, updates), gradients = gradient_of(trainable, non_trainable, metrics, x, y, sample_weight)
        trainable, optimizer = model.optimizer.stateless_apply(optimizer, gradients, trainable)

    with a `lax.scan` over micro-batches in the place of the second line. Non-trainable variables (seeds, say) go
    from one micro-batch to the next.
    """

    def train_step(self, state: State, data: Any) -> Any:
        model = self.model
        trainable, non_trainable, optimizer, metrics = state
        batch: Batch = keras.utils.unpack_x_y_sample_weight(data)
        x, y, sample_weight = batch
        self.check()
        size = num_samples(x)
        checks.check_not_empty(size)
        checks.check_rows(batch)
        form = self.form(tree.map_structure(spec, batch), lambda: self.look(state, batch))
        sums, non_trainable, value, added, leaves = self.accumulate(form, state, batch, size)

        y_pred = None
        if form.needs_outputs:
            y_pred = form.rebuild(leaves)
            with loss.losses_of(model, None if added is None else [added]):
                value, (_, non_trainable, metrics) = model.stateless_compute_loss(
                    trainable, non_trainable, metrics,
                    x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True,
                )  # fmt: skip
            # Keras's own step loses the masks of outputs between loss and metrics (3.15, on JAX alone): so do we
            y_pred = tree.map_structure(unmasked, y_pred)
        trainable, optimizer = model.optimizer.stateless_apply(optimizer, sums, trainable)
        logs, metrics = model._update_metrics_variables(metrics, value, x, y, y_pred, sample_weight)
        return logs, (trainable, non_trainable, optimizer, metrics)

    def accumulate(self, form: Form, state: State, batch: Batch, size: int) -> tuple[Any, ...]:
        """The gradient of the batch, the updated variables, the loss, what model.losses add, and the outputs."""
        model = self.model
        trainable, non_trainable, optimizer, metrics = state
        dtype = self.dtype
        weights = self.count(form, state, batch, size) if form.is_counted else None
        has_added = False

        def gradient_of(trainable: Any, non_trainable: Any, micro_batch: Batch, share: Any, shares: Any) -> Any:
            nonlocal has_added
            y_pred, non_trainable, losses = self.forward(trainable, non_trainable, micro_batch[0])
            mapping = [
                *zip(model.trainable_variables, trainable, strict=True),
                *zip(model.non_trainable_variables, non_trainable, strict=True),
                *zip(model.optimizer.variables, optimizer, strict=True),
                *zip(model.metrics_variables, metrics, strict=True),
            ]
            with keras.StatelessScope(state_mapping=mapping):
                micro, added = loss.micro_loss(model, form, micro_batch, y_pred, losses, share, shares)
                has_added |= added is not None
                leaves = form.leaves(y_pred)
                return model.optimizer.scale_loss(micro), (non_trainable, micro, added, leaves)

        def body(carry: Any, micro_batch: Batch, weight: Any) -> tuple[Any, list[Any]]:
            sums, non_trainable, value, sum_added = carry
            share = jnp.asarray(num_samples(micro_batch[0]) / size, dtype)
            gradients, (non_trainable, micro, added, leaves) = jax.grad(gradient_of, has_aux=True)(
                trainable, non_trainable, micro_batch, share, weight
            )
            sums = [s + g.astype(s.dtype) for s, g in zip(sums, gradients, strict=True)]
            return (sums, non_trainable, value + micro, sum_added if added is None else sum_added + added), leaves

        zero = jnp.zeros((), dtype)
        sums = [jnp.zeros(v.shape, loss.wide(v.dtype)) for v in trainable]
        carry, leaves = self.loop(body, (sums, non_trainable, zero, zero), batch, size, weights)
        sums, non_trainable, value, added = carry
        sums = [s.astype(v.dtype) for s, v in zip(sums, trainable, strict=True)]
        return sums, non_trainable, value, added if has_added else None, leaves

    def count(self, form: Form, state: State, batch: Batch, size: int) -> Any:
        """The shares of the losses in each micro-batch, where masks or sample weights decide.

        Masks come out of the model, so it runs once more, without gradients; the compiler leaves of that only what
        the masks need.
        """

        def body(total: Any, micro_batch: Batch, _: Any) -> tuple[Any, list[Any]]:
            y_pred, _, _ = self.forward(state[0], state[1], micro_batch[0], training=False)
            found = loss.parts(self.model, micro_batch, y_pred)
            num = num_samples(micro_batch[0])
            weights = [loss.weigh(*pair, num).astype(self.dtype) for pair in zip(found, form.kinds, strict=True)]
            return total + jnp.stack(weights), [jnp.stack(weights)[None]]

        total, (weights,) = self.loop(body, jnp.zeros(len(form.kinds), self.dtype), batch, size)
        return jnp.where(total == 0, 0, weights / jnp.where(total == 0, 1, total))

    def loop(self, body: Body, carry: Any, batch: Batch, size: int, rows: Any = None) -> tuple[Any, list[Any]]:
        """Runs `body(carry, micro_batch, row) -> carry, tensors` for each micro-batch, and joins the tensors."""
        micro = self.micro_batch_size
        num_full, rest = divmod(size, micro)
        found: list[list[Any]] = []

        def step(carry: Any, k: Any) -> tuple[Any, list[Any]]:
            return body(carry, cut(batch, k * micro, micro), None if rows is None else rows[k])

        if num_full:
            carry, stacked = jax.lax.scan(step, carry, jnp.arange(num_full))
            found.append([tensor.reshape(-1, *tensor.shape[2:]) for tensor in stacked])
        if rest:  # shapes are fixed in JAX, so the short last micro-batch is not part of the scan
            row = None if rows is None else rows[num_full]
            carry, tensors = body(carry, cut(batch, num_full * micro, rest), row)
            found.append(tensors)
        return carry, [jnp.concatenate(tensors) for tensors in zip(*found, strict=True)]

    def forward(self, trainable: Any, non_trainable: Any, x: Any, *, training: bool = True) -> Any:
        """The model's output, the updated non-trainable variables, and model.losses."""
        options = {"training": training} if self.model._call_has_training_arg else {}
        return self.model.stateless_call(trainable, non_trainable, x, return_losses=True, **options)

    def look(self, state: State, batch: Batch) -> Form:
        """The form of a batch, from one micro-batch that is traced and never runs."""
        found = []

        def trace(state: State, batch: Batch) -> None:
            micro_batch = cut(batch, 0, min(self.micro_batch_size, num_samples(batch[0])))
            y_pred, _, _ = self.forward(state[0], state[1], micro_batch[0])
            found.append(loss.look(self.model, micro_batch, y_pred))

        jax.eval_shape(trace, state, batch)
        return found[0]


def num_samples(x: Any) -> int:
    leaf = next((leaf for leaf in tree.flatten(x) if leaf is not None), None)
    if leaf is None or jnp.ndim(leaf) == 0:
        raise BatchError("x has no batch axis to cut along: give fit arrays of samples")
    return int(leaf.shape[0])


def cut(batch: Batch, start: Any, num: int) -> Any:
    """The micro-batch of `num` samples from `start` on; what has no axes goes to every micro-batch."""

    def leaf(value: Any) -> Any:
        if value is None or jnp.ndim(value) == 0:
            return value
        if isinstance(value, JAXSparse):
            raise BatchError("a sparse JAX array cannot be cut: give fit a dense one")
        return jax.lax.dynamic_slice_in_dim(value, start, num)

    return tree.map_structure(leaf, batch)


def unmasked(tensor: Any) -> Any:
    set_keras_mask(tensor, None)
    return tensor


def spec(leaf: Any) -> Any:
    return None if leaf is None else (jnp.shape(leaf)[1:], leaf.dtype)
