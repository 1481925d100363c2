"""The loss of a compiled model: its terms, and what each divides by.

Keras adds up one loss for each output, times its loss weight, and whatever layers and regularizers add:

    loss = sum_t factor_t * loss_t(y_true, y_pred, sample_weight) + sum of model.losses

For the micro-batch k this becomes

    loss_k = sum_t factor_t * (w_tk / W_t) * loss_tk + (n_k / N) * sum of model.losses

where n_k of the N samples are in it, and w_tk is what Keras divides loss_tk by: the number of samples, the number of
unmasked values, or the sum of the sample weights (reduction "mean_with_sample_weight"). A loss with reduction "sum" is
added undivided. The n_k / N add up to one, so what does not depend on the batch (a regularizer) counts once.

A loss that does its own reduction (a function, a `compute_loss`, `add_loss`) does not say what it divides by;
infer_reduction.py finds out.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import keras
from keras import ops, tree
from keras.src.backend import get_keras_mask, in_stateless_scope, set_keras_mask
from keras.src.losses.loss import apply_mask

from ..core import weight as core_weight
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
    """What a loss is over its samples: a mean, a sum, or a weighted mean."""

    exponent: int = 1
    """The loss of N samples is their sum divided by N ** exponent: 0 for a sum, 1 for a mean, 2 for a mean that is
    divided by N again. See `share_of`."""
    weight_from: Literal["mask", "sample_weight", "function"] | None = None
    """What the loss divides by instead of the number of samples."""


@dataclass(frozen=True)
class Reductions:
    """What infer_reduction.py found: whether losses that bigbatch cannot look into are means or sums."""

    kinds: Mapping[int, Kind] = field(default_factory=dict)
    """By the number of the term."""
    own_exponent: int = 1
    """`Kind.exponent` of the model's own compute_loss."""
    layer_exponents: tuple[int, ...] = ()
    """`Kind.exponent` of each of model.losses; all 1 if empty."""
    is_bound: bool = False
    """Whether compute_loss uses what call() left on the model, so that it cannot be called for the whole batch."""


class Own(NamedTuple):
    """A loss function in place of the model's train_step: it calls the model itself."""

    loss: Callable[..., Any]
    """`loss(model, x, y, sample_weight)` returns the loss of a micro-batch."""
    weight: Callable[..., Any] | None
    """`weight(x, y, sample_weight)` returns what it divides by, if not the number of samples."""

    @property
    def spec(self) -> "LossSpec":
        kinds = () if self.weight is None else (Kind(weight_from="function"),)
        return LossSpec(kinds, True, False, False, False, None, own=self)


@dataclass(frozen=True)
class LossSpec:
    """The losses and the outputs of a model, for all batches of one structure."""

    kinds: tuple[Kind, ...]
    """The kind of each term."""
    has_own_loss: bool
    """Whether the model has its own compute_loss."""
    needs_outputs: bool
    """Whether something (metrics, mostly) needs the outputs of the whole batch."""
    is_vector: bool
    """Whether Keras's loss has a value for each sample (reduction "none")."""
    has_layer_losses: bool
    """Whether layers or regularizers add to the loss."""
    outputs: Any
    """The model's output, with a KerasTensor in place of each tensor and of its mask."""
    reductions: Reductions = Reductions()
    own: Own | None = None
    """The loss function that takes the place of all of these, if any."""

    def with_reductions(self, reductions: Reductions) -> "LossSpec":
        kinds = tuple(reductions.kinds.get(number, kind) for number, kind in enumerate(self.kinds))
        return replace(self, kinds=kinds, reductions=reductions)

    @property
    def needs_model_for_weights(self) -> bool:
        """Whether the weight of each term is known only after the model has run, because masks come out of it."""
        return any(kind.weight_from for kind in self.kinds)

    def leaves(self, outputs: Any) -> list[Any]:
        """The tensors to keep of each micro-batch: the model's outputs, then their masks."""
        if not self.needs_outputs:
            return []
        tensors = tensors_of(outputs)
        return tensors + [mask for mask in map(get_keras_mask, tensors) if mask is not None]

    def rebuild(self, leaves: list[Any]) -> Any:
        """The inverse of `leaves`, for the whole batch."""
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
    """Maps them in the order of `tensors_of`. On torch, Keras 3.15 flattens a dict sorted, but maps it unsorted."""
    leaves = [None if leaf is None else function(leaf) for leaf in tree.flatten(outputs)]
    return tree.pack_sequence_as(outputs, leaves)


def inspect(model: Any, batch: Batch, y_pred: Any, losses: list[Any]) -> LossSpec:
    """The spec of a batch, from the model's output for a part of it and model.losses. Uses shapes, not values."""

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
    """The losses that compile() was given, with their arguments, which a copy of Keras's compiled loss records."""
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
    return found[:1] if is_single else found  # if one output has several losses, Keras 3.15 counts the first


def kind_of(term: Term) -> Kind:
    """The kind of a loss, as far as the loss says so itself."""
    loss = term.loss
    if is_opaque(loss):
        return Kind()
    values, mask = _evaluated(term)
    if not len(values.shape):
        _check_one_number(term)
    if isinstance(loss, keras.losses.Circle):
        raise LossError(
            f"the loss {loss.name} compares the samples of a batch with each other, so it cannot be computed in "
            "micro-batches"
        )
    if loss.reduction in ("sum", "none", None):
        return Kind(exponent=0)
    if loss.reduction == "mean_with_sample_weight" and term.sample_weight is not None:
        return Kind(weight_from="sample_weight")
    return Kind() if mask is None else Kind(weight_from="mask")


def is_opaque(loss: Any) -> bool:
    """Whether a loss does its own reduction, so that nothing says what it divides by."""
    return not isinstance(loss, keras.Loss) or type(loss).__call__ is not keras.Loss.__call__


def _check_one_number(term: Term) -> None:
    """Raises LossError if a loss that returns one number for all samples cannot be a mean over them."""
    problem = f"the loss {term.loss.name} returns one number for all samples"
    remedy = "return one number for each sample"
    if isinstance(term.loss, keras.losses.Dice | keras.losses.Tversky):
        raise LossError(
            f"{problem}, which is not a mean, so it cannot be computed in micro-batches: pass an axis that leaves out "
            "the batch"
        )
    if all(len(tensor.shape) == 1 for tensor in tensors_of(term.y_pred)):
        problem = f"the model's output has only one axis, over which the loss {term.loss.name} takes the mean"
        remedy = "give the model an output of shape (samples, 1)"
    if term.sample_weight is not None:
        raise LossError(f"{problem}, so sample_weight cannot weight them: {remedy}")


def _evaluated(term: Term) -> tuple[Any, Any]:
    """The loss of each sample, and the mask of the output combined with the one that the loss adds."""

    def convert(value: Any) -> Any:
        return ops.convert_to_tensor(value, dtype=term.loss.dtype)

    values = term.loss.call(tree.map_structure(convert, term.y_true), tree.map_structure(convert, term.y_pred))
    masks = [mask for mask in (get_keras_mask(term.y_pred), get_keras_mask(values)) if mask is not None]
    return values, masks[0] & masks[1] if len(masks) == 2 else next(iter(masks), None)


# --- how much they count ---------------------------------------------------------------------------------------


def share(weight: Any, total: Any) -> Any:
    """`core.weight.share` for the tensors of every backend."""
    return core_weight.share(weight, total, ops.where)


def share_of(sample_share: Any, exponent: int) -> Any:
    """The factor of a micro-batch's loss: 1 for a sum, n_k / N for a mean, (n_k / N)² for a mean divided by N again."""
    return sample_share**exponent


def weigh(term: Term, kind: Kind, num: Any) -> Any:
    """The weight of a micro-batch of `num` samples: what this loss divides by."""
    if kind.weight_from is None:
        return ops.cast(num, "float32")
    dtype = wide(term.loss.dtype)
    mask = None if is_opaque(term.loss) else _evaluated(term)[1]
    mask = None if mask is None else ops.cast(mask, dtype)
    if kind.weight_from == "mask":
        return ops.sum(mask)
    weight = ops.convert_to_tensor(term.sample_weight, dtype=dtype)
    return ops.sum(apply_mask(weight, mask, dtype=dtype, reduction="mean_with_sample_weight"))


def weights(model: Any, spec: LossSpec, batch: Batch, y_pred: Any, num: Any, dtype: str) -> Any:
    """The weights of all terms, in one tensor."""
    if spec.own is not None and spec.own.weight is not None:
        return ops.stack([ops.cast(ops.convert_to_tensor(spec.own.weight(*batch)), dtype)])
    pairs = zip(terms(model, batch, y_pred), spec.kinds, strict=True)
    return ops.stack([ops.cast(weigh(term, kind, num), dtype) for term, kind in pairs])


def value_of(term: Term, kind: Kind) -> Any:
    """The loss of a micro-batch; their sum if there is a value for each sample."""
    weight = term.sample_weight
    if kind.weight_from and is_opaque(term.loss):  # it divides by the sum of the weights even if that is 0
        weight = ops.convert_to_tensor(weight)
        weight = ops.where(ops.sum(weight) == 0, ops.ones_like(weight), weight)
    return ops.sum(term.loss(term.y_true, term.y_pred, weight))


class _MicroLoss(NamedTuple):
    """The loss of a micro-batch times its share."""

    value: Any
    layer_losses: Any
    """The part of it that comes from model.losses."""
    terms: list[Any]
    """The losses that compile() was given, each times its own share, without their factors."""


def micro_loss(
    model: Any,
    spec: LossSpec,
    batch: Batch,
    y_pred: Any,
    losses: Any,
    sample_share: Any,
    term_shares: Any,
    *,
    keeps_updates: bool = False,
) -> _MicroLoss:
    """The loss of a micro-batch times its share, and its parts.

    Args:
        model: The compiled model.
        spec: The spec of the batch.
        batch: The micro-batch.
        y_pred: The model's output for it.
        losses: model.losses after that call.
        sample_share: n_k / N.
        term_shares: w_tk / W_t for each term whose weight is not the number of samples.
        keeps_updates: Whether metrics that the model's own compute_loss updates see the micro-batch. If not, what it
            assigns is dropped, because it is called again for the whole batch.
    """
    if spec.own is not None:
        factor = share_of(sample_share, spec.reductions.own_exponent) if spec.own.weight is None else term_shares[0]
        value = ops.cast(ops.convert_to_tensor(spec.own.loss(model, *batch)), sample_share.dtype)
        if len(value.shape):
            raise LossError(
                f"the loss function returned a tensor of shape {tuple(value.shape)}: return one number, the mean over "
                "the micro-batch"
            )
        return _MicroLoss(core_weight.counted(value, factor, ops.where), 0.0, [])
    exponents = spec.reductions.layer_exponents
    exponents = exponents if len(exponents) == len(losses) else (1,) * len(losses)
    scaled = [
        core_weight.counted(ops.cast(ops.sum(loss), sample_share.dtype), share_of(sample_share, exponent), ops.where)
        for loss, exponent in zip(losses, exponents, strict=True)
    ]
    layer_losses = sum(scaled, 0.0)
    if spec.has_own_loss:
        own = share_of(sample_share, spec.reductions.own_exponent)
        with losses_of(model, [loss / own for loss in scaled]), nullcontext() if keeps_updates else stateless():
            x, y, sample_weight = batch
            loss = model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)
        return _MicroLoss(own * ops.cast(loss, sample_share.dtype), layer_losses, [])
    total, values = layer_losses, []
    for i, (term, kind) in enumerate(zip(terms(model, batch, y_pred), spec.kinds, strict=True)):
        factor = term_shares[i] if kind.weight_from else share_of(sample_share, kind.exponent)
        loss = core_weight.counted(ops.cast(value_of(term, kind), sample_share.dtype), factor, ops.where)
        values.append(loss)
        total = total + (loss if term.factor is None else loss * term.factor)
    return _MicroLoss(total, layer_losses, values)


def stateless() -> Any:
    """Inside, what is assigned to Keras's variables is dropped."""
    return nullcontext() if in_stateless_scope() else keras.StatelessScope()


@contextmanager
def losses_of(model: Any, losses: Any) -> Iterator[None]:
    """Inside, these are model.losses. Keras's own step on JAX does the same."""
    if losses:
        model._losses_override = list(losses)
    try:
        yield
    finally:
        model._losses_override = []


def wide(dtype: Any) -> str:
    """The dtype of sums: float64 for float64, else float32."""
    return "float64" if keras.backend.standardize_dtype(dtype) == "float64" else "float32"
