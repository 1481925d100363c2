"""Infers what a loss divides by, from its values on a few samples of the first batch: whole and cut.

bigbatch cannot see what a loss function, a `compute_loss` or an `add_loss` divides by. So before the first step the
model runs forward on a few samples, and each term of its loss is compared with the weighted sum of its values on cuts:

    loss(whole) == sum over cuts of (n_k / N) ** exponent * loss(cut k)        for an exponent of 1, 0 or 2

A mean over the samples has the exponent 1, a sum 0, and a mean that is divided by their number again 2. A loss may also
be a mean by sample weights. The first exponent that fits is used. If none fits, a warning gives both numbers.

The model runs with training=False, so dropout and BatchNormalization do not interfere, and in a stateless scope, so
what it assigns is dropped. What it adds to the loss is measured with training=True if that makes a difference.
"""

import itertools
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops, tree
from keras.src.backend import get_keras_mask, set_keras_mask
from keras.src.backend.common.stateless_scope import get_stateless_scope

from ..core.errors import BatchError, BigBatchError
from ..core.weight import counted, share
from . import checks, loss
from .loss import Batch, Kind, Own, Reductions, Term

Rows = Callable[[Any, int, int], Any]

_EXPONENTS = (1, 0, 2)
_MAX_SAMPLES = 32
_SAME = 1e-6
"""Two values of a loss that is not random differ by less than this."""


def infer_reduction(
    model: Any,
    batch: Batch,
    micro_batch_size: int,
    run: Callable[..., Any],
    rows: Rows,
    own: Own | None = None,
    *,
    is_cut: bool = True,
) -> tuple[Reductions, list[str]]:
    """What each term divides by, and warnings about terms that cannot be cut. If the model raises, that is one too.

    Args:
        model: The compiled model.
        batch: The batch to take samples from: at most 32, and no more than a micro-batch has.
        micro_batch_size: The number of samples in a micro-batch.
        run: `run(x, training=…)` returns the outputs of the model.
        rows: `rows(tensor, start, stop)` returns rows of a tensor.
        own: A loss function in place of the model's train_step, which is then measured alone.
        is_cut: Whether metrics see whole batches, which call() never does.
    """
    if own is not None and own.weight is not None:
        return Reductions(), []
    size = checks.batch_size(batch, may_be_empty=True)
    num = min(size, max(2, min(micro_batch_size, _MAX_SAMPLES)))
    if num < 2:
        return Reductions(), []
    inference = _Inference(model, _spread(batch, size, num), num, run, rows, is_cut)
    reductions = Reductions()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the step itself warns
            reductions = inference.result() if own is None else inference.of_function(own)
    except BigBatchError:
        raise
    except Exception as error:
        inference.messages.append(
            f"the loss could not be measured on {num} samples ({type(error).__name__}: {error}), so bigbatch "
            "assumes what its reduction says, or a mean over samples: check with verify()"
        )
    return reductions, inference.messages


class _Guess(NamedTuple):
    """A kind that a loss may have, and the values that should then add up."""

    kind: Any
    """A Kind, or only its exponent."""
    whole: float
    """The loss of the whole."""
    cuts: list[float]
    """The loss of each cut times its share."""


class _Forward(NamedTuple):
    """The model's outputs for a few samples."""

    batch: Batch
    y_pred: Any
    losses: list[Any]
    num: int


class _Inference:
    """See `infer_reduction`. Uses the first `num` samples of `batch`."""

    def __init__(self, model: Any, batch: Batch, num: int, run: Callable[..., Any], rows: Rows, is_cut: bool) -> None:
        self.model = model
        self.batch = batch
        self.run = run
        self.rows = rows
        self.is_cut = is_cut
        ends = sorted({0, max(1, num // 4), 2 * max(1, num // 4), num})  # of several sizes, if there are three
        self.cuts = [(0, num), *itertools.pairwise(ends)]
        self.rounding = _rounding(*(layer.compute_dtype for layer in model._flatten_layers()))
        self.messages: list[str] = []

    def result(self) -> Reductions:
        self.whole, *cuts = self.forwards()
        if not self.are_outputs_independent(cuts):
            return Reductions()
        layer_exponents = self.layer_exponents(cuts)
        cuts = [*_with_outputs_of(self.whole, cuts)]
        if loss.has_own_loss(self.model):
            return self.own_loss(cuts, layer_exponents)
        return Reductions(self.kinds(cuts), layer_exponents=layer_exponents)

    def of_function(self, own: Own) -> Reductions:
        """The exponent of a loss function that calls the model itself. With BatchNormalization a mean is assumed."""
        if checks.batch_norms(self.model):
            return Reductions()
        batches = [self.rows_of(*cut) for cut in self.cuts]
        self.whole, *cuts = [
            _Forward(batch, None, [], stop - start) for batch, (start, stop) in zip(batches, self.cuts, strict=True)
        ]

        def value(forward: _Forward) -> float:
            return _number(own.loss(self.model, *forward.batch))

        exponent = self.exponent(
            "the loss function", value(self.whole), [*map(value, cuts)], cuts, lambda: value(self.whole)
        )
        return Reductions(own_exponent=exponent)

    def forwards(self, *, training: bool = False) -> list[_Forward]:
        return [self.forward(*cut, training=training) for cut in self.cuts]

    def rows_of(self, start: int, stop: int) -> Batch:
        def cut(leaf: Any) -> Any:
            return self.rows(leaf, start, stop) if _has_rows(leaf) else leaf

        batch: Batch = tree.map_structure(cut, self.batch)
        return batch

    def forward(self, start: int, stop: int, *, training: bool = False) -> _Forward:
        batch = self.rows_of(start, stop)
        y_pred = self.run(batch[0], training=training)
        return _Forward(batch, y_pred, list(self.model.losses), stop - start)

    def again(self, *, training: bool = False) -> _Forward:
        return self.forward(*self.cuts[0], training=training)

    def are_outputs_independent(self, cuts: list[_Forward]) -> bool:
        again = None
        pieces_of = zip(*(loss.tensors_of(cut.y_pred) for cut in cuts), strict=True)
        for i, (tensor, pieces) in enumerate(zip(loss.tensors_of(self.whole.y_pred), pieces_of, strict=True)):
            if _is_ragged(tensor):
                continue
            shapes = [tuple(piece.shape) for piece in pieces]
            joined = (sum(shape[0] for shape in shapes), *shapes[-1][1:])
            if joined != tuple(tensor.shape) or len({shape[1:] for shape in shapes}) > 1:
                raise BatchError(
                    f"an output of the model has the shape {tuple(tensor.shape)} for {self.whole.num} samples and "
                    f"{shapes[0]} for {cuts[0].num} of them, so those of micro-batches cannot be joined: give it a "
                    "row for each sample, and pad sequences to a fixed length (output_sequence_length=… in "
                    "TextVectorization)"
                )
            whole = _numbers(tensor)
            error = _relative_distance(np.concatenate([*map(_numbers, pieces)]), whole)
            if error > 10 * self.rounding:
                again = again or self.again()
                if _relative_distance(_numbers(loss.tensors_of(again.y_pred)[i]), whole) < error / 10:  # not random
                    self.messages.append(
                        f"what the model returns for a sample depends on the other samples in its micro-batch: the "
                        f"outputs of {self.whole.num} samples change by {error:.1e} when they are cut: "
                        "pad sequences to a fixed length, and leave out layers that compare samples"
                    )
                    return False
        return True

    # --- the terms of a loss ----------------------------------------------------------------------------------

    def kinds(self, cuts: list[_Forward]) -> dict[int, Kind]:
        """The kinds of the losses that compile() was given, where they can be told."""
        of_each = [loss.terms(self.model, each.batch, each.y_pred) for each in (self.whole, *cuts)]
        found = {i: self.kind(whole, parts, cuts) for i, (whole, *parts) in enumerate(zip(*of_each, strict=True))}
        return {i: kind for i, kind in found.items() if kind is not None}

    def kind(self, whole: Term, parts: list[Term], cuts: list[_Forward]) -> Kind | None:
        name, seems, is_opaque = f"the loss {whole.loss.name}", loss.kind_of(whole), loss.is_opaque(whole.loss)

        def value(term: Term = whole, kind: Kind = seems) -> float:
            return _number(loss.value_of(term, kind))

        def guess(kind: Kind) -> _Guess:
            weights = [_number(loss.weigh(part, kind, cut.num)) for part, cut in zip(parts, cuts, strict=True)]
            shares = [loss.share_of(share(weight, sum(weights)), kind.exponent) for weight in weights]
            return _Guess(kind, value(whole, kind), [*map(counted, (value(part, kind) for part in parts), shares)])

        if _changes_variables(value):
            self.messages.append(
                f"{name} changes a variable of its own each time it is called, which is once for each micro-batch "
                "here: change it once per step, in a callback (on_train_batch_end)"
            )
            return None
        choices = [seems, *map(Kind, _EXPONENTS)]
        if whole.sample_weight is not None and is_opaque:
            choices.append(Kind(weight_from="sample_weight"))
        dtypes = [tensor.dtype for tensor in loss.tensors_of(whole.y_pred)] if is_opaque else [whole.loss.dtype]
        kind: Kind | None = self.first_that_fits(name, map(guess, choices), value, _rounding(*dtypes))
        return kind

    def layer_exponents(self, cuts: list[_Forward]) -> tuple[int, ...]:
        """The exponent of each of model.losses."""
        whole = self.whole
        if training := self.is_training_different(whole.losses):
            whole, *cuts = self.forwards(training=True)
        if any(len(cut.losses) != len(whole.losses) for cut in cuts):
            return ()
        own = [layer.name for layer in (self.model, *self.model._flatten_layers(include_self=False))
               for _ in layer._get_own_losses()]  # fmt: skip
        owners = itertools.chain(own, itertools.repeat("a regularizer"))  # in the order of model.losses
        return tuple(
            self.exponent(
                f"what {owner} adds to the loss",
                _number(value),
                [_number(cut.losses[i]) for cut in cuts],
                cuts,
                lambda: _number(self.again(training=training).losses[i]),  # noqa: B023
            )
            for i, (owner, value) in enumerate(zip(owners, whole.losses, strict=False))
        )

    def is_training_different(self, losses: list[Any]) -> bool:
        """Whether training=True changes model.losses, and not by chance.

        False with BatchNormalization, which would couple the samples here too. The step warns of it.
        """
        if checks.batch_norms(self.model):
            return False
        trained = self.again(training=True).losses
        return not _is_same(losses, trained) and _is_same(trained, self.again(training=True).losses)

    def own_loss(self, cuts: list[_Forward], layer_exponents: tuple[int, ...]) -> Reductions:
        """The exponent of the model's own compute_loss, without the losses that layers add."""

        def value(forward: _Forward, called: _Forward | None = None) -> float:
            self.run((called or forward).batch[0], training=False)  # it may use what call() leaves on the model
            x, y, sample_weight = forward.batch
            with loss.losses_of(self.model, [ops.zeros(())]), loss.stateless():
                return _number(
                    self.model._compute_loss(
                        x=x, y=y, y_pred=forward.y_pred, sample_weight=sample_weight, training=False
                    )
                )

        def is_bound() -> bool:
            if abs(value(self.whole) - whole) > _SAME * abs(whole):
                return False  # it is random, so this cannot be told
            try:
                return abs(value(self.whole, cuts[0]) - whole) > self.rounding * abs(whole)
            except Exception:  # shapes that do not fit, say
                return True

        whole = value(self.whole)
        exponent = self.exponent("compute_loss", whole, [*map(value, cuts)], cuts, lambda: value(self.whole))
        reductions = Reductions({}, exponent, layer_exponents, is_bound())
        if self.is_cut and reductions.is_bound and (metrics := [metric.name for metric in self.model._metrics]):
            stay = "stays as it is" if len(metrics) == 1 else "stay as they are"
            self.messages.append(
                "compute_loss uses what call() left on the model, which belongs to one micro-batch, so the metric "
                f"{', '.join(metrics)} {stay}: return it from call() as an output"
            )
        return reductions

    # --- what fits --------------------------------------------------------------------------------------------

    def exponent(
        self, name: str, whole: float, values: list[float], cuts: list[_Forward], again: Callable[[], float]
    ) -> int:
        """The exponent of a loss that is a mean or a sum over samples; 1 if it is neither."""
        shares = [share(cut.num, self.whole.num) for cut in cuts]
        guesses = (
            _Guess(p, whole, [counted(v, loss.share_of(s, p)) for v, s in zip(values, shares, strict=True)])
            for p in _EXPONENTS
        )
        found = self.first_that_fits(name, guesses, again, self.rounding)
        return 1 if found is None else int(found)

    def first_that_fits(self, name: str, guesses: Iterable[_Guess], again: Callable[[], float], rounding: float) -> Any:
        """The kind of the first guess whose cuts add up to the whole; None, and a message, if none does.

        If the loss is random (`again()` returns another value) or not finite, no guess can be judged, and the kind of
        the first is returned.
        """
        tried: list[_Guess] = []
        for guess in guesses:
            tried.append(guess)
            if _distance(guess.whole, guess.cuts) <= rounding:
                return guess.kind
        kind, whole, cuts = tried[0]
        if not math.isfinite(whole) or abs(again() - whole) > _SAME * abs(whole):
            return kind
        off = f" (off by {_distance(whole, cuts):.1e})" if math.isfinite(sum(cuts)) else ""
        self.messages.append(
            f"{name} is neither a mean nor a sum over samples: on {self.whole.num} samples it is {whole:.6g}, "
            f"and {sum(cuts):.6g} when they are cut{off}, so steps in micro-batches are "
            "not those of the full batch: write it as a mean over samples, or train without accumulate()"
        )
        return None


def _with_outputs_of(whole: _Forward, cuts: list[_Forward]) -> Iterable[_Forward]:
    """The cuts with the outputs that they have in the whole, so that what is random in the model does not matter."""
    tensors = loss.tensors_of(whole.y_pred)
    starts = [0] * len(tensors)
    for cut in cuts:
        stops = [start + like.shape[0] for start, like in zip(starts, loss.tensors_of(cut.y_pred), strict=True)]
        pieces = map(_masked_rows, tensors, starts, stops)
        yield cut._replace(y_pred=loss.map_tensors(lambda _: next(pieces), whole.y_pred))  # noqa: B023
        starts = stops


def _masked_rows(tensor: Any, start: int, stop: int) -> Any:
    piece = tensor[start:stop]
    if (mask := get_keras_mask(tensor)) is not None:
        set_keras_mask(piece, mask[start:stop])
    return piece


def _spread(batch: Batch, size: int, num: int) -> Batch:
    """`num` samples from all over the batch, since the first may be alike; all of them if it is ragged or sparse."""
    if any(_is_ragged(leaf) or hasattr(leaf, "dense_shape") for leaf in filter(_has_rows, tree.flatten(batch))):
        return batch
    places = [k * size // num for k in range(num)]
    return tree.map_structure(lambda leaf: ops.take(leaf, places, axis=0) if _has_rows(leaf) else leaf, batch)


def _changes_variables(evaluate: Callable[[], Any]) -> bool:
    """Whether it assigns to Keras variables other than seeds of random generators, which are integers."""
    held = get_stateless_scope().state_mapping
    before = dict(held)
    evaluate()
    return any(
        value is not before.get(key) and "int" not in keras.backend.standardize_dtype(value.dtype)
        for key, value in held.items()
    )


def _is_same(left: list[Any], right: list[Any]) -> bool:
    pairs = zip(map(_number, left), map(_number, right), strict=False)
    return len(left) == len(right) and all(math.isclose(*pair, rel_tol=_SAME) for pair in pairs)


def _has_rows(leaf: Any) -> bool:
    return leaf is not None and len(leaf.shape) > 0


def _is_ragged(tensor: Any) -> bool:
    return any(num is None for num in tensor.shape)


def _distance(whole: float, cuts: list[float]) -> float:
    """How far the sum of the cuts is from the whole, relative to the size of what is added up."""
    scale = max(abs(whole), sum(map(abs, cuts)))
    return abs(sum(cuts) - whole) / scale if scale else 0.0


def _relative_distance(a: Any, b: Any) -> float:
    scale = float(np.abs(b).max(initial=0))
    return float(np.abs(a - b).max(initial=0)) / scale if scale else 0.0


def _number(value: Any) -> float:
    return float(np.sum(_numbers(value)))


def _numbers(tensor: Any) -> Any:
    return np.asarray(ops.convert_to_numpy(tensor), "float64")


def _rounding(*dtypes: Any) -> float:
    """How much rounding may change a loss in the coarsest of these dtypes. Keras 3.15 rounds some float64 losses."""
    names = {keras.backend.standardize_dtype(dtype) for dtype in dtypes}
    return 5e-2 if names & {"float16", "bfloat16"} else 1e-6 if names == {"float64"} else 1e-5
