"""The loss of a compiled model: its parts, and over how much each is a mean.

Keras adds up one loss for each output, times its loss weight, and whatever layers and regularizers add:

    loss = sum_t factor_t * loss_t(y_true, y_pred, sample_weight) + sum of model.losses

For the micro-batch k this becomes

    loss_k = sum_t factor_t * (w_tk / W_t) * loss_tk + (n_k / N) * sum of model.losses

with n_k of the N samples, and with the weight w_tk that Keras divides loss_tk by: the number of samples, the number of
unmasked values, or the sum of the sample weights (reduction "mean_with_sample_weight"). A loss with reduction "sum"
is added as it is. The n_k / N add up to one, so what does not depend on the batch (a regularizer) counts once.

A loss that does its own reduction (a function, a `compute_loss`, `add_loss`) does not say how it counts;
verify/trial.py measures that.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
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
    """One of the losses that compile() was given, with its arguments."""

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
    """What the weight is, if it is only known once the model has run: "mask" or "weights"."""
    is_shared: bool = False
    """Whether it is divided by the number of replicas."""


@dataclass(frozen=True)
class Found:
    """What a trial has found out about the parts of a loss that do not say how they count."""

    kinds: Mapping[int, Kind] = field(default_factory=dict)
    """By the number of the part."""
    own_power: int = 1
    """As `Kind.power`, of the model's own compute_loss."""
    layer_powers: tuple[int, ...] = ()
    """As `Kind.power`, of each of model.losses; all 1 if empty."""
    is_bound: bool = False
    """Whether compute_loss uses what call() left on the model, so that it makes no sense for the whole batch."""


@dataclass(frozen=True)
class _Output:
    """The type of an output of the model, and of its mask."""

    dtype: Any
    shape: Any
    mask: "_Output | None" = None


@dataclass(frozen=True)
class Form:
    """What is the same for all batches of one structure."""

    kinds: tuple[Kind, ...]
    has_own_loss: bool
    """Whether the model has a compute_loss of its own."""
    needs_outputs: bool
    """Whether something needs the outputs of the whole batch: metrics, mostly."""
    is_vector: bool
    """Whether Keras's loss has a value for each sample (reduction "none")."""
    outputs: Any
    """A nest of `_Output`, or None, like the model's output."""
    found: Found = Found()

    def with_found(self, found: Found) -> "Form":
        """The form, with what a trial has found out."""
        return replace(self, kinds=tuple(found.kinds.get(i, kind) for i, kind in enumerate(self.kinds)), found=found)

    @property
    def is_counted(self) -> bool:
        """Whether the weight of a part is only known once the model has run."""
        return any(kind.counted for kind in self.kinds)

    def leaves(self, y_pred: Any) -> list[Any]:
        """The tensors to keep of each micro-batch: its outputs, then their masks."""
        return _with_masks(y_pred, get_keras_mask) if self.needs_outputs else []

    def specs(self) -> list[_Output]:
        """The types of the `leaves`."""
        return _with_masks(self.outputs, lambda output: output.mask) if self.needs_outputs else []

    def rebuild(self, leaves: list[Any]) -> Any:
        """The opposite of `leaves`: the model's output for the whole batch, with its masks."""
        outputs = tensors_of(self.outputs)
        masks = iter(leaves[len(outputs) :])
        for tensor, output in zip(leaves, outputs, strict=False):
            if output.mask is not None:
                set_keras_mask(tensor, next(masks))
        tensors = iter(leaves)
        return map_tensors(lambda output: next(tensors), self.outputs)


def _with_masks(outputs: Any, mask_of: Callable[[Any], Any]) -> list[Any]:
    there = tensors_of(outputs)
    return there + [mask for mask in map(mask_of, there) if mask is not None]


def tensors_of(outputs: Any) -> list[Any]:
    """The leaves that are not None: a model may leave an output out."""
    return [leaf for leaf in tree.flatten(outputs) if leaf is not None]


def map_tensors(function: Callable[[Any], Any], outputs: Any) -> Any:
    """In the order of `tensors_of`: on torch, Keras 3.15 flattens a dict by its sorted keys, and maps it unsorted."""
    leaves = [None if leaf is None else function(leaf) for leaf in tree.flatten(outputs)]
    return tree.pack_sequence_as(outputs, leaves)


def look(model: Any, batch: Batch, y_pred: Any) -> Form:
    """The form of a batch, from the model's output for a part of it; uses shapes only, never values."""

    def output(tensor: Any) -> _Output:
        if not len(tensor.shape):
            raise BatchError("an output of the model is one number for the whole batch: give it one for each sample")
        mask = get_keras_mask(tensor)
        return _Output(tensor.dtype, tensor.shape, None if mask is None else _Output(mask.dtype, mask.shape))

    has_own = has_own_loss(model)
    found = [] if has_own else parts(model, batch, y_pred)
    is_vector = any(getattr(part.loss, "reduction", "sum") in ("none", None) for part in found)
    needs_outputs = (
        has_own
        or is_vector
        or len(found) > 1  # each has its own mean in the history
        or model._compile_metrics is not None
        or type(model).compute_metrics is not keras.Model.compute_metrics
    )
    return Form(tuple(map(kind_of, found)), has_own, needs_outputs, is_vector, map_tensors(output, y_pred))


# --- the parts of a loss ---------------------------------------------------------------------------------------


def has_own_loss(model: Any) -> bool:
    """Whether the class, or this model alone, has a compute_loss of its own."""
    return getattr(model.compute_loss, "__func__", None) is not keras.Model.compute_loss


def parts(model: Any, batch: Batch, y_pred: Any) -> list[Part]:
    """The losses that compile() was given, with their arguments: Keras calls a copy of its loss that records them."""
    compiled = model._compile_loss
    if compiled is None:
        return []
    found: list[Part] = []

    def recorded(entry: Any) -> Any:
        def loss(y_true: Any, y_pred: Any, sample_weight: Any = None) -> float:
            found.append(Part(entry.loss, entry[2], y_true, y_pred, sample_weight))
            return 0.0

        return entry._replace(loss=loss)

    twin = object.__new__(type(compiled))  # copy.copy would save and load it
    vars(twin).update(vars(compiled))
    twin._flat_losses = [recorded(entry) for entry in compiled._flat_losses]
    twin._metrics = [None] * len(twin._flat_losses)
    _, y, sample_weight = batch
    twin(y, y_pred, sample_weight)
    is_single = not tree.is_nested(y) and not tree.is_nested(y_pred)
    return found[:1] if is_single else found  # of several losses on one output Keras 3.15 counts the first


def kind_of(part: Part) -> Kind:
    """How a loss counts, as far as it says so itself; the trial measures the rest."""
    loss = part.loss
    if is_opaque(loss):
        return Kind()
    values, mask = _evaluated(part)
    if is_one := not len(values.shape):
        _check_one(part)
    if isinstance(loss, keras.losses.Circle):
        raise LossError(f"the loss {loss.name} compares the samples of a batch with each other, so it cannot be cut")
    if loss.reduction in ("sum", "none", None):
        return Kind(power=0)
    is_by_weight = loss.reduction == "mean_with_sample_weight" and part.sample_weight is not None
    return Kind(1, "weights" if is_by_weight else "mask" if mask is not None else None, is_shared=not is_one)


def is_opaque(loss: Any) -> bool:
    """Whether a loss does its own reduction, so that nothing says what it divides by."""
    return not isinstance(loss, keras.Loss) or type(loss).__call__ is not keras.Loss.__call__


def is_one_number(part: Part) -> bool:
    """Whether a loss returns one number for all samples, although the output has more than one axis."""
    return not is_opaque(part.loss) and not _has_one_axis(part) and not len(_evaluated(part)[0].shape)


def _check_one(part: Part) -> None:
    """Raises LossError if a loss that returns one number for all samples cannot be a mean over them."""
    problem = f"the loss {part.loss.name} returns one number for all samples"
    remedy = "return one number for each sample"
    if isinstance(part.loss, keras.losses.Dice | keras.losses.Tversky):
        raise LossError(f"{problem}, which is no mean, so it cannot be cut: pass an axis that leaves out the batch")
    if _has_one_axis(part):
        problem = f"the model's output has one axis only, over which the loss {part.loss.name} takes the mean"
        remedy = "give the model an output of shape (samples, 1)"
    if part.sample_weight is not None:
        raise LossError(f"{problem}, so sample_weight cannot weight them: {remedy}")


def _has_one_axis(part: Part) -> bool:
    return all(len(tensor.shape) == 1 for tensor in tensors_of(part.y_pred))


def _evaluated(part: Part) -> tuple[Any, Any]:
    """The loss of each sample, and the mask: the output's and the one that the loss adds."""

    def convert(value: Any) -> Any:
        return ops.convert_to_tensor(value, dtype=part.loss.dtype)

    values = part.loss.call(tree.map_structure(convert, part.y_true), tree.map_structure(convert, part.y_pred))
    masks = [mask for mask in (get_keras_mask(part.y_pred), get_keras_mask(values)) if mask is not None]
    return values, masks[0] & masks[1] if len(masks) == 2 else next(iter(masks), None)


# --- how much they count ---------------------------------------------------------------------------------------


def share(weight: Any, total: Any) -> Any:
    """`core.weight.share` for the tensors of every backend."""
    return heart.share(weight, total, ops.where)


def share_of(share: Any, power: int) -> Any:
    """The factor of a micro-batch's loss, given its `share` n_k / N of the samples.

    n_k / N for a mean, 1 for a sum, (n_k / N)² for a mean that is divided by the samples once more.
    """
    return share**power


def weigh(part: Part, kind: Kind, num: Any) -> Any:
    """The weight of a micro-batch of `num` samples: what this loss is divided by."""
    if not kind.counted:
        return ops.cast(num, "float32")
    dtype = wide(part.loss.dtype)
    mask = None if is_opaque(part.loss) else _evaluated(part)[1]
    mask = None if mask is None else ops.cast(mask, dtype)
    if kind.counted == "mask":
        return ops.sum(mask)
    weight = ops.convert_to_tensor(part.sample_weight, dtype=dtype)
    return ops.sum(apply_mask(weight, mask, dtype=dtype, reduction="mean_with_sample_weight"))


def weights(model: Any, form: Form, batch: Batch, y_pred: Any, num: Any, dtype: str) -> Any:
    """The weights of all parts, in one tensor."""
    pairs = zip(parts(model, batch, y_pred), form.kinds, strict=True)
    return ops.stack([ops.cast(weigh(part, kind, num), dtype) for part, kind in pairs])


def value_of(part: Part, kind: Kind) -> Any:
    """The loss of a micro-batch on one replica; the sum, if it is a value for each sample."""
    weight = part.sample_weight
    if kind.counted and is_opaque(part.loss):  # it divides by the sum of the weights, even if that is 0
        weight = ops.convert_to_tensor(weight)
        weight = ops.where(ops.sum(weight) == 0, ops.ones_like(weight), weight)
    value = ops.sum(part.loss(part.y_true, part.y_pred, weight))
    return unscale_loss_for_distribution(value) if kind.is_shared else value


def micro_loss(model: Any, form: Form, batch: Batch, y_pred: Any, losses: Any, share: Any, shares: Any) -> Any:
    """The loss of a micro-batch times its share, so that those of a window add up to the loss of the batch.

    Args:
        model: The compiled model.
        form: The form of the batch.
        batch: The micro-batch.
        y_pred: The model's output for it.
        losses: model.losses after that call.
        share: n_k / N.
        shares: w_tk / W_t of each part; used for parts whose weight is not the number of samples.

    Returns:
        The loss, and what model.losses add to it (None if there are none).
    """
    powers = form.found.layer_powers if len(form.found.layer_powers) == len(losses) else [1] * len(losses)
    scaled = [
        share_of(share, power) * ops.cast(ops.sum(loss), share.dtype)
        for loss, power in zip(losses, powers, strict=True)
    ]
    added = sum(scaled) if scaled else None
    if form.has_own_loss:
        own = share_of(share, form.found.own_power)
        # metrics that it updates are to see the whole batch, so here they update nothing
        with losses_of(model, [loss / own for loss in scaled]), stateless():
            x, y, sample_weight = batch
            loss = model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)
        return own * ops.cast(loss, share.dtype), added
    total = 0.0 if added is None else added
    for i, (part, kind) in enumerate(zip(parts(model, batch, y_pred), form.kinds, strict=True)):
        factor = shares[i] if kind.counted else share_of(share, kind.power)
        loss = heart.counted(ops.cast(value_of(part, kind), share.dtype), factor, ops.where)
        total = total + (loss if part.factor is None else loss * part.factor)
    return total, added


def stateless() -> Any:
    """Inside, nothing that is assigned to a variable of Keras is kept."""
    return nullcontext() if in_stateless_scope() else keras.StatelessScope()


@contextmanager
def losses_of(model: Any, losses: Any) -> Iterator[None]:
    """Inside, model.losses are these; Keras's own step on JAX does the same."""
    if losses:
        model._losses_override = list(losses)
    try:
        yield
    finally:
        model._losses_override = []


def wide(dtype: Any) -> str:
    """The dtype to add up in: float64 for float64, else float32."""
    return "float64" if keras.backend.standardize_dtype(dtype) == "float64" else "float32"
