"""The loss of a compiled model: its terms, and over how much each is a mean.

Keras adds up one loss for each output, times its loss weight, and whatever layers and regularizers add:

    loss = sum_t factor_t * loss_t(y_true, y_pred, sample_weight) + sum of model.losses

For the micro-batch k this becomes

    loss_k = sum_t factor_t * (w_tk / W_t) * loss_tk + (n_k / N) * sum of model.losses

with n_k of the N samples, and with the weight w_tk that Keras divides loss_tk by: the number of samples, the number of
unmasked values, or the sum of the sample weights (reduction "mean_with_sample_weight"). A loss with reduction "sum"
is added as it is. The n_k / N add up to one, so what does not depend on the batch (a regularizer) counts once.

A loss that does its own reduction (a function, a `compute_loss`, `add_loss`) does not say what it divides by;
measure.py finds out.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import keras
from keras import ops, tree
from keras.src.backend import get_keras_mask, in_stateless_scope, set_keras_mask
from keras.src.losses.loss import apply_mask

from ..core import weight as heart
from ..core.errors import BatchError, LossError

Batch = tuple[Any, Any, Any]
"""x, y and sample_weight."""


class Term(NamedTuple):
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


@dataclass(frozen=True)
class Measured:
    """How the losses count that do not say so themselves: the result of `measure`."""

    kinds: Mapping[int, Kind] = field(default_factory=dict)
    """By the number of the term."""
    own_power: int = 1
    """`Kind.power` of the model's own compute_loss."""
    layer_powers: tuple[int, ...] = ()
    """`Kind.power` of each of model.losses; all 1 if empty."""
    is_bound: bool = False
    """Whether compute_loss uses what call() left on the model, so that it cannot be called for the whole batch."""


@dataclass(frozen=True)
class LossSpec:
    """What the losses and the outputs are, for all batches of one structure."""

    kinds: tuple[Kind, ...]
    """Of each term."""
    has_own_loss: bool
    """Whether the model has its own compute_loss."""
    needs_outputs: bool
    """Whether something needs the outputs of the whole batch: metrics, mostly."""
    is_vector: bool
    """Whether Keras's loss has a value for each sample (reduction "none")."""
    has_layer_losses: bool
    """Whether layers or regularizers add to the loss."""
    outputs: Any
    """The model's output, with a KerasTensor in place of each tensor and of its mask."""
    measured: Measured = Measured()

    def with_measured(self, measured: Measured) -> "LossSpec":
        kinds = tuple(measured.kinds.get(number, kind) for number, kind in enumerate(self.kinds))
        return replace(self, kinds=kinds, measured=measured)

    @property
    def is_counted(self) -> bool:
        """Whether the weight of a term is only known once the model has run."""
        return any(kind.counted for kind in self.kinds)

    def leaves(self, outputs: Any) -> list[Any]:
        """The tensors to keep of each micro-batch: the model's outputs, then their masks."""
        if not self.needs_outputs:
            return []
        tensors = tensors_of(outputs)
        return tensors + [mask for mask in map(get_keras_mask, tensors) if mask is not None]

    def rebuild(self, leaves: list[Any]) -> Any:
        """The opposite of `leaves`: the model's outputs for the whole batch, with their masks."""
        specs = tensors_of(self.outputs)
        masks = iter(leaves[len(specs) :])
        for tensor, spec in zip(leaves, specs, strict=False):
            if get_keras_mask(spec) is not None:
                set_keras_mask(tensor, next(masks))
        tensors = iter(leaves)
        return map_tensors(lambda _: next(tensors), self.outputs)


def tensors_of(outputs: Any) -> list[Any]:
    """The leaves that are not None: a model may leave an output out."""
    return [leaf for leaf in tree.flatten(outputs) if leaf is not None]


def map_tensors(function: Callable[[Any], Any], outputs: Any) -> Any:
    """In the order of `tensors_of`: on torch, Keras 3.15 flattens a dict by its sorted keys, and maps it unsorted."""
    leaves = [None if leaf is None else function(leaf) for leaf in tree.flatten(outputs)]
    return tree.pack_sequence_as(outputs, leaves)


def inspect(model: Any, batch: Batch, y_pred: Any, losses: list[Any]) -> LossSpec:
    """The spec of a batch, from the model's output for a part of it, and model.losses. Uses shapes, no values."""

    def spec(tensor: Any) -> Any:
        if not len(tensor.shape):
            raise BatchError("an output of the model is one number for the whole batch: return one for each sample")
        found = keras.KerasTensor(tensor.shape, tensor.dtype, name="output")
        if (mask := get_keras_mask(tensor)) is not None:
            set_keras_mask(found, keras.KerasTensor(mask.shape, mask.dtype, name="mask"))
        return found

    has_own = has_own_loss(model)
    found = [] if has_own else terms(model, batch, y_pred)
    is_vector = any(getattr(term.loss, "reduction", "sum") in ("none", None) for term in found)
    needs_outputs = (
        has_own
        or is_vector
        or len(found) > 1  # each has its own mean in the history
        or model._compile_metrics is not None
        or type(model).compute_metrics is not keras.Model.compute_metrics
    )
    kinds, outputs = tuple(map(kind_of, found)), map_tensors(spec, y_pred)
    return LossSpec(kinds, has_own, needs_outputs, is_vector, bool(losses), outputs)


# --- the terms of a loss ---------------------------------------------------------------------------------------


def has_own_loss(model: Any) -> bool:
    """Whether the class, or this model alone, has its own compute_loss."""
    return getattr(model.compute_loss, "__func__", None) is not keras.Model.compute_loss


def terms(model: Any, batch: Batch, y_pred: Any) -> list[Term]:
    """The losses that compile() was given, with their arguments: Keras calls a copy of its loss that records them."""
    compiled = model._compile_loss
    if compiled is None:
        return []
    found: list[Term] = []

    def recorded(entry: Any) -> Any:
        def loss(y_true: Any, y_pred: Any, sample_weight: Any = None) -> float:
            found.append(Term(entry.loss, entry[2], y_true, y_pred, sample_weight))
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


def kind_of(term: Term) -> Kind:
    """How a loss counts, as far as it says so itself."""
    loss = term.loss
    if is_opaque(loss):
        return Kind()
    values, mask = _evaluated(term)
    if not len(values.shape):
        _check_one_number(term)
    if isinstance(loss, keras.losses.Circle):
        raise LossError(f"the loss {loss.name} compares the samples of a batch with each other, so it cannot be cut")
    if loss.reduction in ("sum", "none", None):
        return Kind(power=0)
    if loss.reduction == "mean_with_sample_weight" and term.sample_weight is not None:
        return Kind(counted="weights")
    return Kind() if mask is None else Kind(counted="mask")


def is_opaque(loss: Any) -> bool:
    """Whether a loss does its own reduction, so that nothing says what it divides by."""
    return not isinstance(loss, keras.Loss) or type(loss).__call__ is not keras.Loss.__call__


def is_one_number(term: Term) -> bool:
    """Whether a loss returns one number for all samples, although the output has more than one axis."""
    return not is_opaque(term.loss) and not _has_one_axis(term) and not len(_evaluated(term)[0].shape)


def _check_one_number(term: Term) -> None:
    """Raises LossError if a loss that returns one number for all samples cannot be a mean over them."""
    problem = f"the loss {term.loss.name} returns one number for all samples"
    remedy = "return one number for each sample"
    if isinstance(term.loss, keras.losses.Dice | keras.losses.Tversky):
        raise LossError(f"{problem}, which is not a mean, so it cannot be cut: pass an axis that leaves out the batch")
    if _has_one_axis(term):
        problem = f"the model's output has only one axis, over which the loss {term.loss.name} takes the mean"
        remedy = "give the model an output of shape (samples, 1)"
    if term.sample_weight is not None:
        raise LossError(f"{problem}, so sample_weight cannot weight them: {remedy}")


def _has_one_axis(term: Term) -> bool:
    return all(len(tensor.shape) == 1 for tensor in tensors_of(term.y_pred))


def _evaluated(term: Term) -> tuple[Any, Any]:
    """The loss of each sample, and the mask: that of the output and the one that the loss adds."""

    def convert(value: Any) -> Any:
        return ops.convert_to_tensor(value, dtype=term.loss.dtype)

    values = term.loss.call(tree.map_structure(convert, term.y_true), tree.map_structure(convert, term.y_pred))
    masks = [mask for mask in (get_keras_mask(term.y_pred), get_keras_mask(values)) if mask is not None]
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


def weigh(term: Term, kind: Kind, num: Any) -> Any:
    """The weight of a micro-batch of `num` samples: what this loss is divided by."""
    if not kind.counted:
        return ops.cast(num, "float32")
    dtype = wide(term.loss.dtype)
    mask = None if is_opaque(term.loss) else _evaluated(term)[1]
    mask = None if mask is None else ops.cast(mask, dtype)
    if kind.counted == "mask":
        return ops.sum(mask)
    weight = ops.convert_to_tensor(term.sample_weight, dtype=dtype)
    return ops.sum(apply_mask(weight, mask, dtype=dtype, reduction="mean_with_sample_weight"))


def weights(model: Any, spec: LossSpec, batch: Batch, y_pred: Any, num: Any, dtype: str) -> Any:
    """The weights of all terms, in one tensor."""
    pairs = zip(terms(model, batch, y_pred), spec.kinds, strict=True)
    return ops.stack([ops.cast(weigh(term, kind, num), dtype) for term, kind in pairs])


def value_of(term: Term, kind: Kind) -> Any:
    """The loss of a micro-batch; the sum, if there is a value for each sample."""
    weight = term.sample_weight
    if kind.counted and is_opaque(term.loss):  # it divides by the sum of the weights, even if that is 0
        weight = ops.convert_to_tensor(weight)
        weight = ops.where(ops.sum(weight) == 0, ops.ones_like(weight), weight)
    return ops.sum(term.loss(term.y_true, term.y_pred, weight))


def micro_loss(model: Any, spec: LossSpec, batch: Batch, y_pred: Any, losses: Any, share: Any, shares: Any) -> Any:
    """The loss of a micro-batch times its share, so that those of a window add up to the loss of the batch.

    Args:
        model: The compiled model.
        spec: The spec of the batch.
        batch: The micro-batch.
        y_pred: The model's output for it.
        losses: model.losses after that call.
        share: n_k / N.
        shares: w_tk / W_t of each term; used for terms whose weight is not the number of samples.

    Returns:
        The loss, and what model.losses add to it.
    """
    powers = spec.measured.layer_powers
    powers = powers if len(powers) == len(losses) else (1,) * len(losses)
    scaled = [
        heart.counted(ops.cast(ops.sum(loss), share.dtype), share_of(share, power), ops.where)
        for loss, power in zip(losses, powers, strict=True)
    ]
    added = sum(scaled, 0.0)
    if spec.has_own_loss:
        own = share_of(share, spec.measured.own_power)
        # metrics that it updates must see the whole batch, so here they keep nothing
        with losses_of(model, [loss / own for loss in scaled]), stateless():
            x, y, sample_weight = batch
            loss = model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)
        return own * ops.cast(loss, share.dtype), added
    total = added
    for i, (term, kind) in enumerate(zip(terms(model, batch, y_pred), spec.kinds, strict=True)):
        factor = shares[i] if kind.counted else share_of(share, kind.power)
        loss = heart.counted(ops.cast(value_of(term, kind), share.dtype), factor, ops.where)
        total = total + (loss if term.factor is None else loss * term.factor)
    return total, added


def stateless() -> Any:
    """Inside, Keras keeps nothing that is assigned to its variables."""
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
