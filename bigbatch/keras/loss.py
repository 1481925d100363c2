"""The loss of a compiled model: its parts, and over how much each is a mean.

Keras adds up one loss for each output, times its loss weight, and whatever layers and regularizers add:

    loss = sum_t factor_t * loss_t(y_true, y_pred, sample_weight) + sum of model.losses

For the micro-batch k this becomes

    loss_k = sum_t factor_t * (w_tk / W_t) * loss_tk + (n_k / N) * sum of model.losses

with n_k of the N samples, and with the weight w_tk that Keras divides loss_tk by: the samples; what a mask leaves
of them; the sum of the sample weights (reduction "mean_with_sample_weight"). A loss with reduction "sum" counts
as it is. The n_k / N add up to one, so what does not depend on the batch (a regularizer) counts once.

What does its own reduction (a function, a `compute_loss`, `add_loss`) does not say how it counts; trial.py finds out.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
from keras import ops, tree
from keras.src.backend import get_keras_mask, in_stateless_scope, set_keras_mask
from keras.src.losses.loss import apply_mask, unscale_loss_for_distribution

from ..core import weight as heart
from ..core.errors import BatchError, LossError

Batch = tuple[Any, Any, Any]
"""x, y and sample_weight."""


class Part(NamedTuple):
    """One of the losses that compile() was given, with what it is to be called with."""

    loss: Any
    factor: Any
    y_true: Any
    y_pred: Any
    sample_weight: Any


class Kind(NamedTuple):
    """How a loss counts the samples."""

    power: int = 1
    """1: a mean over the samples, 0: a sum, 2: a mean divided by the samples once more. See `share_of`."""
    counted: str | None = None
    """What the weight is, where it is only known once the model has run: "mask", or "weights"."""
    is_shared: bool = False
    """Whether it is divided by the number of replicas."""


@dataclass(frozen=True)
class Output:
    """What an output of the model looks like, and its mask."""

    dtype: Any
    shape: Any
    mask: "Output | None" = None


@dataclass(frozen=True)
class Form:
    """What is the same for all batches of one structure."""

    kinds: tuple[Kind, ...]
    has_own_loss: bool
    """Whether the model has a compute_loss of its own."""
    needs_outputs: bool
    """Whether something wants to see the outputs of the whole batch: metrics, mostly."""
    outputs: Any
    """A nest of `Output`, or None."""
    own_power: int = 1
    """As `Kind.power`, of the model's own compute_loss."""
    layer_powers: tuple[int, ...] = ()
    """As `Kind.power`, of each of model.losses; all 1 if empty."""
    is_bound: bool = False
    """Whether compute_loss uses what call() left on the model, so that it makes no sense for the whole batch."""
    is_vector: bool = False
    """Whether Keras's loss has a value for each sample (reduction "none")."""

    @property
    def is_counted(self) -> bool:
        return any(kind.counted for kind in self.kinds)

    def leaves(self, y_pred: Any) -> list[Any]:
        """The tensors that are kept of a micro-batch: the outputs, then the masks that there are."""
        return flatten(y_pred, get_keras_mask) if self.needs_outputs else []

    def specs(self) -> list[Output]:
        """What each of the `leaves` looks like."""
        return flatten(self.outputs, lambda output: output.mask) if self.needs_outputs else []

    def rebuild(self, leaves: list[Any]) -> Any:
        """The opposite of `leaves`: an output of the model, with its masks."""
        outputs = tensors_of(self.outputs)
        masks = iter(leaves[len(outputs) :])
        for tensor, output in zip(leaves, outputs, strict=False):
            if output.mask is not None:
                set_keras_mask(tensor, next(masks))
        tensors = iter(leaves)
        return map_tensors(lambda output: next(tensors), self.outputs)


def flatten(outputs: Any, mask_of: Callable[[Any], Any]) -> list[Any]:
    flat = tensors_of(outputs)
    return flat + [mask for mask in map(mask_of, flat) if mask is not None]


def tensors_of(outputs: Any) -> list[Any]:
    """The leaves that are not None: a model may leave an output out."""
    return [leaf for leaf in tree.flatten(outputs) if leaf is not None]


def map_tensors(function: Callable[[Any], Any], outputs: Any) -> Any:
    """In the order of `tensors_of`: on torch, Keras 3.15 flattens a dict by its sorted keys, and maps it unsorted."""
    leaves = [None if leaf is None else function(leaf) for leaf in tree.flatten(outputs)]
    return tree.pack_sequence_as(outputs, leaves)


def look(model: Any, batch: Batch, y_pred: Any) -> Form:
    """The form of a batch, from one output of the model; only shapes are looked at, never a value."""

    def output(tensor: Any) -> Output:
        if not len(tensor.shape):
            raise BatchError("an output of the model is one number for the whole batch: give it one for each sample")
        mask = get_keras_mask(tensor)
        return Output(tensor.dtype, tensor.shape, None if mask is None else Output(mask.dtype, mask.shape))

    own = has_own_loss(model)
    found = [] if own else parts(model, batch, y_pred)
    kinds = tuple(map(kind, found))
    is_vector = any(getattr(part.loss, "reduction", "sum") in ("none", None) for part in found)
    needs_outputs = (
        own
        or is_vector
        or len(kinds) > 1  # each has its own mean in the history
        or model._compile_metrics is not None
        or type(model).compute_metrics is not keras.Model.compute_metrics
    )
    return Form(kinds, own, needs_outputs, map_tensors(output, y_pred), is_vector=is_vector)


def has_own_loss(model: Any) -> bool:
    """Whether the class, or this model alone, has a compute_loss of its own."""
    return getattr(model.compute_loss, "__func__", None) is not keras.Model.compute_loss


def parts(model: Any, batch: Batch, y_pred: Any) -> list[Part]:
    """Which loss is called with what; Keras itself finds out, in a twin of its compiled loss that only takes notes."""
    compiled = model._compile_loss
    if compiled is None:
        return []
    found: list[Part] = []

    def note(entry: Any) -> Any:
        def loss(y_true: Any, y_pred: Any, sample_weight: Any = None) -> float:
            found.append(Part(entry.loss, entry[2], y_true, y_pred, sample_weight))
            return 0.0

        return entry._replace(loss=loss)

    twin = object.__new__(type(compiled))  # copy.copy would save and load it
    vars(twin).update(vars(compiled))
    twin._flat_losses = [note(entry) for entry in compiled._flat_losses]
    twin._metrics = [None] * len(twin._flat_losses)
    _, y, sample_weight = batch
    twin(y, y_pred, sample_weight)
    is_single = not tree.is_nested(y) and not tree.is_nested(y_pred)
    return found[:1] if is_single else found  # of several losses on one output Keras 3.15 counts the first


def kind(part: Part) -> Kind:
    """How a loss counts, as far as it says so itself; what it does not say, `trial` measures."""
    loss = part.loss
    if is_opaque(loss):
        return Kind()
    values, mask = evaluate(part)
    is_sum = loss.reduction in ("sum", "none", None)
    if is_one := not len(values.shape):
        check_one(part)
    if isinstance(loss, keras.losses.Circle):
        raise LossError(f"the loss {loss.name} compares the samples of a batch with each other, so it cannot be cut")
    if is_sum:
        return Kind(power=0)
    by_weight = loss.reduction == "mean_with_sample_weight" and part.sample_weight is not None
    return Kind(1, "weights" if by_weight else "mask" if mask is not None else None, is_shared=not is_one)


def is_opaque(loss: Any) -> bool:
    """Whether a loss does its own reduction, so that what it divides by cannot be read off."""
    return not isinstance(loss, keras.Loss) or type(loss).__call__ is not keras.Loss.__call__


def check_one(part: Part) -> None:
    """Refuses a loss that returns one number for all samples, where that cannot be a mean that is to be cut."""
    says = f"the loss {part.loss.name} returns one number for all samples"
    remedy = "return one number for each sample"
    if isinstance(part.loss, keras.losses.Dice | keras.losses.Tversky):
        raise LossError(f"{says}, which is no mean, so it cannot be cut: pass an axis that leaves out the batch")
    if has_one_axis(part):
        says = f"the model's output has one axis only, over which the loss {part.loss.name} takes the mean"
        remedy = "give the model an output of shape (samples, 1)"
    if part.sample_weight is not None:
        raise LossError(f"{says}, so sample_weight cannot weight them: {remedy}")


def is_one_number(part: Part) -> bool:
    """Whether a loss returns one number for all samples, although the output has more than one axis."""
    return not is_opaque(part.loss) and not has_one_axis(part) and not len(evaluate(part)[0].shape)


def has_one_axis(part: Part) -> bool:
    return all(len(tensor.shape) == 1 for tensor in tensors_of(part.y_pred))


def evaluate(part: Part) -> tuple[Any, Any]:
    """What the loss says of each sample, and the mask: that of the output, and that which the loss adds."""

    def convert(value: Any) -> Any:
        return ops.convert_to_tensor(value, dtype=part.loss.dtype)

    values = part.loss.call(tree.map_structure(convert, part.y_true), tree.map_structure(convert, part.y_pred))
    masks = [mask for mask in (get_keras_mask(part.y_pred), get_keras_mask(values)) if mask is not None]
    return values, masks[0] & masks[1] if len(masks) == 2 else next(iter(masks), None)


def weigh(part: Part, kind: Kind, num: Any) -> Any:
    """The weight of a micro-batch of so many samples: what this loss is divided by."""
    if not kind.counted:
        return ops.cast(num, "float32")
    dtype = wide(part.loss.dtype)
    mask = None if is_opaque(part.loss) else evaluate(part)[1]
    if kind.counted == "mask":
        return ops.sum(ops.cast(mask, dtype))
    mask = None if mask is None else ops.cast(mask, dtype)
    weight = ops.convert_to_tensor(part.sample_weight, dtype=dtype)
    return ops.sum(apply_mask(weight, mask, dtype=dtype, reduction="mean_with_sample_weight"))


def share(weight: Any, total: Any) -> Any:
    """`core.weight.share` for the tensors of every backend."""
    return heart.share(weight, total, ops.where)


def share_of(share: Any, power: int) -> Any:
    """By what the loss of a micro-batch counts, if it has the `share` n_k / N of the samples.

    Of a mean by n_k / N, of a sum by 1, of a mean that is divided by the samples once more by (n_k / N)².
    """
    return share**power


def value_of(part: Part, kind: Kind) -> Any:
    """What the loss says of a micro-batch, on one replica; the sum, where it is a value for each sample."""
    weight = part.sample_weight
    if kind.counted and is_opaque(part.loss):  # which divides by the sum of the weights, where it should count nothing
        weight = ops.convert_to_tensor(weight)
        weight = ops.where(ops.sum(weight) == 0, ops.ones_like(weight), weight)
    value = ops.sum(part.loss(part.y_true, part.y_pred, weight))
    return unscale_loss_for_distribution(value) if kind.is_shared else value


def micro_loss(model: Any, form: Form, batch: Batch, y_pred: Any, losses: Any, share: Any, shares: Any) -> Any:
    """The loss of a micro-batch, so weighted that those of a window add up to the loss of the batch.

    `share` is n_k / N; `shares` are the w_tk / W_t, where they differ from it. The second result is what
    model.losses add to the first, None if there are none.
    """
    powers = form.layer_powers if len(form.layer_powers) == len(losses) else [1] * len(losses)
    scaled = [
        share_of(share, power) * ops.cast(ops.sum(loss), share.dtype)
        for loss, power in zip(losses, powers, strict=True)
    ]
    added = sum(scaled) if scaled else None
    if form.has_own_loss:
        own = share_of(share, form.own_power)
        # metrics that it updates are to see the whole batch, so here they update nothing
        with losses_of(model, [loss / own for loss in scaled]), stateless():
            x, y, sample_weight = batch
            loss = model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)
        return own * ops.cast(loss, share.dtype), added
    total = 0.0 if added is None else added
    for i, (part, kind) in enumerate(zip(parts(model, batch, y_pred), form.kinds, strict=True)):
        loss = ops.cast(value_of(part, kind), share.dtype)
        loss = loss * (shares[i] if kind.counted else share_of(share, kind.power))
        total = total + (loss if part.factor is None else loss * part.factor)
    return total, added


def stateless() -> Any:
    """Inside, nothing that is assigned to a variable of Keras is kept."""
    return nullcontext() if in_stateless_scope() else keras.StatelessScope()


@contextmanager
def losses_of(model: Any, losses: Any) -> Iterator[None]:
    """Lets model.losses be these, as Keras's own step on JAX does."""
    if losses:
        model._losses_override = list(losses)
    try:
        yield
    finally:
        model._losses_override = []


def wide(dtype: Any) -> str:
    """The dtype to add up in: float32, or float64 where that is asked for."""
    return "float64" if keras.backend.standardize_dtype(dtype) == "float64" else "float32"
