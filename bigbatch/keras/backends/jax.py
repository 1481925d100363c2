"""fit on the jax backend: the micro-batches are one `lax.scan` in the step that fit compiles."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax.sharding import PartitionSpec
from keras import tree
from keras.src.backend import set_keras_mask

from .. import checks, loss
from ..loss import Batch, Form
from ..verify.trial import Found
from .jax_batch import Cut, num_samples, taken
from .step import FitStep

State = tuple[Any, Any, Any, Any]
"""The values of the trainable, the non-trainable, the optimizer's and the metrics' variables."""


class JAXStep:
    """Stands for

        gradient_of = jax.value_and_grad(model.compute_loss_and_updates, has_aux=True)
        (loss, updates), gradients = gradient_of(trainable, non_trainable, metrics, x, y, sample_weight)
        trainable, optimizer = model.optimizer.stateless_apply(optimizer, gradients, trainable)

    with a `lax.scan` over micro-batches in the place of the second line. Non-trainable variables (seeds, say) go
    from one micro-batch to the next.
    """

    def __init__(self, step: FitStep) -> None:
        self.step = step
        self.model = step.model
        self.micro_batch_size = step.micro_batch_size
        self.replaces: dict[str, Any] = {}

    def train_step(self, state: State, data: Any) -> Any:
        model = self.model
        trainable, non_trainable, optimizer, metrics = state
        batch: Batch = keras.utils.unpack_x_y_sample_weight(data)
        x, y, sample_weight = batch
        self.step.check()
        size = num_samples(x)
        checks.check_not_empty(size)
        checks.check_rows(batch)
        form = self.step.form(tree.map_structure(spec, batch), lambda: self.look(state, batch))
        sums, non_trainable, value, added, leaves = self.on_devices(form, state, batch, size)

        y_pred = None
        if form.needs_outputs:
            y_pred = form.rebuild(leaves)
        if form.needs_outputs and not form.is_bound:
            with loss.losses_of(model, None if added is None else [added]):
                value, (_, non_trainable, metrics) = model.stateless_compute_loss(
                    trainable, non_trainable, metrics,
                    x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True,
                )  # fmt: skip
        if form.needs_outputs:
            # Keras's own step loses the masks of outputs between loss and metrics (3.15, on JAX alone): so do we
            y_pred = loss.map_tensors(unmasked, y_pred)
        trainable, optimizer = model.optimizer.stateless_apply(optimizer, sums, trainable)
        logs, metrics = model._update_metrics_variables(metrics, value, x, y, y_pred, sample_weight)
        return logs, (trainable, non_trainable, optimizer, metrics)

    def on_devices(self, form: Form, state: State, batch: Batch, size: int) -> tuple[Any, ...]:
        """What `accumulate` returns. Devices that share a batch each cut their own part of it.

        With DataParallel every device runs its own loop, and the sums are reduced once, after it. A model that updates
        variables in its calls (BatchNormalization) has to see whole micro-batches, so there, and with ModelParallel,
        the compiler shares out each micro-batch and reduces after each.
        """
        distribution = keras.distribution.distribution()
        num_devices = 1
        if distribution is not None:
            mesh, axis = distribution.device_mesh.backend_mesh, distribution.batch_dim_name
            num_devices = mesh.shape.get(axis, 1)
        cut = Cut.shared(self.micro_batch_size, num_devices)
        is_data_parallel = isinstance(distribution, keras.distribution.DataParallel)
        if num_devices == 1 or not is_data_parallel or self.updates_variables(state, batch[0]):
            return self.accumulate(form, state, batch, cut, size)
        are_seeds = self.are_seeds()

        def on_one(state: State, batch: Batch) -> tuple[Any, ...]:
            trainable, non_trainable, optimizer, metrics = state
            own = [own_seed(v, axis) if is_seed else v for v, is_seed in zip(non_trainable, are_seeds, strict=True)]
            state = trainable, own, optimizer, metrics
            sums, after, *rest = self.accumulate(form, state, batch, Cut(cut.size), size, axis)
            of_each = zip(non_trainable, own, after, are_seeds, strict=True)
            after = [v + (b - a) if is_seed else b for v, a, b, is_seed in of_each]  # all count on by the same number
            return sums, after, *rest

        rows, whole = PartitionSpec(axis), PartitionSpec()
        shared = tree.map_structure(lambda leaf: whole if leaf is None or not jnp.ndim(leaf) else rows, batch)
        mapped = jax.shard_map(
            on_one,
            mesh=mesh,
            in_specs=(whole, shared),
            out_specs=(whole, whole, whole, whole, rows),
            axis_names={axis},
            check_vma=False,  # or a loop in the model that begins with zeros, as in every RNN, would be refused
        )
        found: tuple[Any, ...] = mapped(state, batch)
        return found

    def updates_variables(self, state: State, x: Any) -> bool:
        """Whether a call of the model changes variables other than seeds."""
        found: list[bool] = []

        def trace(state: State, x: Any) -> None:
            _, after, _ = self.forward(state[0], state[1], x)
            found.extend(a is not b for a, b in zip(state[1], after, strict=True))

        jax.eval_shape(trace, state, x)
        return any(changed and not is_seed for changed, is_seed in zip(found, self.are_seeds(), strict=True))

    def are_seeds(self) -> list[bool]:
        """Which of the non-trainable variables are states of random number generators."""
        # Keras 3.15 has no public way to them
        seeds = {id(seed.state) for layer in self.model._flatten_layers() for seed in layer._seed_generators}
        return [id(variable) in seeds for variable in self.model.non_trainable_variables]

    def accumulate(
        self, form: Form, state: State, batch: Batch, cut: Cut, size: int, axis: str | None = None
    ) -> tuple[Any, ...]:
        """The gradient of the batch, the updated variables, the loss, what model.losses add, and the outputs.

        `size` is that of the whole batch, of which a device has a part where `axis` is given.
        """
        model = self.model
        trainable, non_trainable, optimizer, metrics = state
        dtype = self.step.dtype
        weights = self.count(form, state, batch, cut, axis) if form.is_counted else None
        has_added = False

        def gradient_of(trainable: Any, non_trainable: Any, micro_batch: Batch, share: Any, shares: Any) -> Any:
            nonlocal has_added
            y_pred, non_trainable, losses = self.forward(trainable, non_trainable, micro_batch[0])
            with keras.StatelessScope(self.mapping((trainable, non_trainable, optimizer, metrics))):
                micro, added = loss.micro_loss(model, form, micro_batch, y_pred, losses, share, shares)
                has_added |= added is not None
                leaves = form.leaves(y_pred)
                return model.optimizer.scale_loss(micro), (non_trainable, micro, added, leaves)

        def body(carry: Any, micro_batch: Batch, weight: Any) -> tuple[Any, list[Any]]:
            sums, non_trainable, value, sum_added = carry
            share = loss.share(jnp.asarray(num_samples(micro_batch[0]), dtype), size)
            gradients, (non_trainable, micro, added, leaves) = jax.grad(gradient_of, has_aux=True)(
                trainable, non_trainable, micro_batch, share, weight
            )
            sums = [s + g.astype(s.dtype) for s, g in zip(sums, gradients, strict=True)]
            return (sums, non_trainable, value + micro, sum_added if added is None else sum_added + added), leaves

        zero = jnp.zeros((), dtype)
        sums = [jnp.zeros(v.shape, loss.wide(v.dtype)) for v in trainable]
        carry, found = cut.loop(body, (sums, non_trainable, zero, zero), batch, weights)
        sums, non_trainable, value, added = carry
        if axis is not None:
            sums, value, added = jax.lax.psum((sums, value, added), axis)
        sums = [s.astype(v.dtype) for s, v in zip(sums, trainable, strict=True)]
        return sums, non_trainable, value, added if has_added else None, cut.joined(found)

    def count(self, form: Form, state: State, batch: Batch, cut: Cut, axis: str | None) -> Any:
        """The shares of the losses in each micro-batch, where masks or sample weights decide.

        Masks come out of the model, so it runs once more, without gradients; the compiler leaves of that only what
        the masks need.
        """

        def body(total: Any, micro_batch: Batch, _: Any) -> tuple[Any, list[Any]]:
            y_pred, _, _ = self.forward(state[0], state[1], micro_batch[0], training=False)
            found = loss.parts(self.model, micro_batch, y_pred)
            num = num_samples(micro_batch[0])
            weights = [loss.weigh(*pair, num).astype(self.step.dtype) for pair in zip(found, form.kinds, strict=True)]
            return total + jnp.stack(weights), [jnp.stack(weights)]

        total, found = cut.loop(body, jnp.zeros(len(form.kinds), self.step.dtype), batch)
        total = total if axis is None else jax.lax.psum(total, axis)
        weights = jnp.concatenate([stacked for (stacked,) in found])
        return loss.share(weights, total)

    def mapping(self, state: State) -> list[tuple[Any, Any]]:
        """Pairs of all variables and their values."""
        model = self.model
        kinds = (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )
        return [pair for pairs in zip(kinds, state, strict=True) for pair in zip(*pairs, strict=True)]

    def peek(self, state: State, iterator: Any) -> tuple[Any, tuple[State, Any]]:
        first = next(iterator)
        return first, (state, itertools.chain([first], iterator))

    def try_out(self, batch: Batch, *args: Any) -> Found:
        state, _ = args
        batch = tree.map_structure(lambda leaf: leaf if leaf is None else jnp.asarray(leaf), batch)
        with jax.default_matmul_precision("highest"):  # by default a GPU rounds otherwise for another batch size
            return self.step.trial(batch, taken, self.mapping(state))

    def forward(self, trainable: Any, non_trainable: Any, x: Any, *, training: bool = True) -> Any:
        """The model's output, the updated non-trainable variables, and model.losses."""
        options = {"training": training} if self.model._call_has_training_arg else {}
        return self.model.stateless_call(trainable, non_trainable, x, return_losses=True, **options)

    def look(self, state: State, batch: Batch) -> Form:
        """The form of a batch, from one micro-batch that is traced and never runs."""
        found = []

        def trace(state: State, batch: Batch) -> None:
            micro_batch = taken(batch, 0, min(self.micro_batch_size, num_samples(batch[0])))
            y_pred, _, _ = self.forward(state[0], state[1], micro_batch[0])
            found.append(loss.look(self.model, micro_batch, y_pred))

        jax.eval_shape(trace, state, batch)
        return found[0]


def own_seed(seed: Any, axis: str) -> Any:
    """Another one on every device, so that no mask of dropout comes twice."""
    return jax.random.fold_in(seed, jax.lax.axis_index(axis))


def unmasked(tensor: Any) -> Any:
    set_keras_mask(tensor, None)
    return tensor


def spec(leaf: Any) -> Any:
    return None if leaf is None else (jnp.shape(leaf)[1:], leaf.dtype)
