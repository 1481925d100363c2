"""The loss on a few samples of the first batch, whole and cut: does it behave as micro-batches take it to?

Nothing says what is inside a loss function, a `compute_loss` or an `add_loss`. So before the first step the model
runs forward on a few samples, and each part of its loss is compared with the weighted sum of what it is on cuts:

    loss(whole) == sum over cuts of (n_k / N) ** power * loss(cut k)        for a power of 1, 0 or 2

A mean over samples has the power 1, a sum 0, and a mean that is divided by the samples once more 2; a loss may also be
a mean by the sample weights. What fits is used. If nothing fits, a warning says by how much.

The model runs with training=False, so dropout and BatchNormalization do not interfere, in a stateless scope, so
nothing it assigns is kept. What it adds to the loss is measured with training=True where that makes a difference.
"""

import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops, tree
from keras.src.backend import get_keras_mask, set_keras_mask
from keras.src.backend.common.stateless_scope import get_stateless_scope

from ...core.errors import BatchError, BigBatchError
from .. import checks, loss
from ..loss import Batch, Form, Kind, Part

POWERS = (1, 0, 2)
MOST = 32
"""Samples that are tried, and no more than a micro-batch has."""


@dataclass(frozen=True)
class Found:
    """How the parts of a loss count that do not say so themselves."""

    kinds: dict[int, Kind] = field(default_factory=dict)
    own_power: int = 1
    layer_powers: tuple[int, ...] = ()
    is_bound: bool = False

    def applied_to(self, form: Form) -> Form:
        kinds = tuple(self.kinds.get(i, kind) for i, kind in enumerate(form.kinds))
        return replace(
            form, kinds=kinds, own_power=self.own_power, layer_powers=self.layer_powers, is_bound=self.is_bound
        )


class Sides(NamedTuple):
    """A loss of the whole, and of the cuts."""

    whole: float
    cuts: Sequence[float]
    rounding: float
    """The relative distance that rounding may amount to."""

    def distance(self, shares: Sequence[float]) -> float:
        """How far the weighted sum of the cuts is from the whole, relative to the size of what is added up."""
        parts = [share * value for share, value in zip(shares, self.cuts, strict=True)]
        scale = max(abs(self.whole), sum(map(abs, parts)))
        return abs(sum(parts) - self.whole) / scale if scale else 0.0


class Forward(NamedTuple):
    """What the model made of a few samples."""

    batch: Batch
    y_pred: Any
    losses: list[Any]

    @property
    def num(self) -> int:
        return rows_of(self.batch[0])


class Trial:
    """Tries the loss of a model on a batch.

    `run(x, training=…)` gives the outputs, `cut(batch, start, num)` takes rows. Inside `alone()` there is one
    replica.
    """

    def __init__(
        self,
        model: Any,
        batch: Batch,
        micro_batch_size: int,
        run: Callable[..., Any],
        cut: Callable[[Batch, int, int], Batch],
        alone: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.model = model
        self.run = run
        self.cut = cut
        self.alone = alone
        self.num = min(rows_of(batch[0]), max(2, min(micro_batch_size, MOST)))
        self.batch = spread(batch, self.num)
        self.rounding = rounding(*(layer.compute_dtype for layer in model._flatten_layers()))
        """Of what layers compute."""
        self.told: list[str] = []

    def found(self) -> Found:
        """How the loss counts. What is no mean, no sum and no mean by weights is added to `told`."""
        first = max(1, self.num // 4)
        ends = sorted({0, first, 2 * first, self.num})  # of several sizes, if there are three
        whole = self.forward(0, self.num)
        cuts = [self.forward(start, stop) for start, stop in itertools.pairwise(ends)]
        if not self.are_outputs_right(whole, cuts):
            return Found()
        layer_powers = self.layer_powers(whole, cuts, ends)
        if loss.has_own_loss(self.model):
            return self.own_loss(whole, cuts, layer_powers)
        return Found(self.kinds(whole, cuts_of(whole, cuts)), 1, layer_powers)

    def forward(self, start: int, stop: int, *, training: bool = False) -> Forward:
        batch = self.cut(self.batch, start, stop - start)
        return Forward(batch, self.run(batch[0], training=training), list(self.model.losses))

    # --- the parts of a loss ----------------------------------------------------------------------------------

    def are_outputs_right(self, whole: Forward, cuts: list[Forward]) -> bool:
        """Whether the outputs for the cuts are those for the whole."""
        again = None
        for i, tensor in enumerate(loss.tensors_of(whole.y_pred)):
            pieces = [loss.tensors_of(cut.y_pred)[i] for cut in cuts]
            shapes = [tuple(piece.shape) for piece in pieces]
            if is_ragged(tensor):
                continue
            joined = (sum(shape[0] for shape in shapes), *shapes[-1][1:])
            if joined != tuple(tensor.shape) or len({shape[1:] for shape in shapes}) > 1:
                raise BatchError(
                    f"an output of the model has the shape {tuple(tensor.shape)} for {whole.num} samples and "
                    f"{shapes[0]} for {cuts[0].num} of them, so those of micro-batches cannot be joined: give it a "
                    "row for each sample, and pad sequences to a fixed length (output_sequence_length=… in "
                    "TextVectorization)"
                )
            left, right = np.concatenate([numbers(piece) for piece in pieces]), numbers(tensor)
            error = relative_distance(left, right)
            if error > 10 * self.rounding:
                again = again or self.forward(0, self.num)
                if relative_distance(numbers(loss.tensors_of(again.y_pred)[i]), right) < error / 10:  # not random
                    self.told.append(
                        f"what the model returns for a sample depends on the other samples in its micro-batch: the "
                        f"outputs of {whole.num} samples change by {error:.1e} when they are cut: "
                        "pad sequences to a fixed length, and leave out layers that compare samples"
                    )
                    return False
        return True

    def kinds(self, whole: Forward, cuts: list[Forward]) -> dict[int, Kind]:
        """Of the losses that compile() was given, as far as they are other than they seem."""
        of_whole = loss.parts(self.model, whole.batch, whole.y_pred)
        of_cuts = [loss.parts(self.model, cut.batch, cut.y_pred) for cut in cuts]
        found = {}
        for i, part in enumerate(of_whole):
            parts = [each[i] for each in of_cuts]
            seems = loss.kind(part)
            seems = seems._replace(is_shared=self.is_shared(part, seems.is_shared))
            choices = [seems, *(Kind(power, None, seems.is_shared) for power in POWERS)]
            if part.sample_weight is not None and loss.is_opaque(part.loss):
                choices.append(Kind(1, "weights", seems.is_shared))

            dtypes = [t.dtype for t in loss.tensors_of(part.y_pred)] if loss.is_opaque(part.loss) else [part.loss.dtype]

            def sides_of(kind: Kind) -> Sides:
                whole, *rest = (number(loss.value_of(each, kind)) for each in (part, *parts))  # noqa: B023
                return Sides(whole, rest, rounding(*dtypes))  # noqa: B023

            fits = [(choice, sides_of(choice), shares_by(choice, part, parts, cuts)) for choice in choices]
            kind = self.first_that_fits(fits, lambda: number(loss.value_of(part, seems)))  # noqa: B023
            if changes_variables(lambda: loss.value_of(part, seems)):  # noqa: B023
                self.told.append(
                    f"the loss {part.loss.name} changes a variable of its own each time it is called, which is once "
                    "for each micro-batch here: change it once per step, in a callback (on_train_batch_end)"
                )
                continue
            if kind is None:
                self.tell(f"the loss {part.loss.name}", *fits[0][1:], whole.num)
                continue
            if kind != loss.kind(part):
                found[i] = kind
            if kind.power == 1 and loss.is_one_number(part):
                self.told.append(
                    f"the loss {part.loss.name} returns one number for all samples, which is taken to be their mean: "
                    "return one number for each sample, and Keras takes the mean"
                )
        return found

    def is_training_other(self, losses: list[Any]) -> bool:
        """Whether training=True makes model.losses others, and not by chance.

        Not asked with BatchNormalization, of which the step warns, and which would couple the samples here too.
        """
        if checks.has_batch_norm(self.model):
            return False
        trained = self.forward(0, self.num, training=True).losses
        return not same(losses, trained) and same(trained, self.forward(0, self.num, training=True).losses)

    def layer_powers(self, whole: Forward, cuts: list[Forward], ends: list[int]) -> tuple[int, ...]:
        """Of each of model.losses."""
        if training := self.is_training_other(whole.losses):
            whole = self.forward(0, self.num, training=True)
            cuts = [self.forward(*pair, training=True) for pair in itertools.pairwise(ends)]
        if any(len(cut.losses) != len(whole.losses) for cut in cuts):
            return ()
        powers = []
        for i, value in enumerate(whole.losses):
            sides = Sides(number(value), [number(cut.losses[i]) for cut in cuts], self.rounding)
            power = self.power(
                sides,
                cuts,
                lambda: number(self.forward(0, self.num, training=training).losses[i]),  # noqa: B023
            )
            if power is None:
                self.tell(
                    f"what {self.owners()[i]} adds to the loss", sides, [cut.num / whole.num for cut in cuts], whole.num
                )
            powers.append(1 if power is None else power)
        return tuple(powers)

    def owners(self) -> list[str]:
        """Who adds each of model.losses: the model, its layers, and then the regularizers of weights."""
        model = self.model
        adding = [model, *model._flatten_layers(include_self=False)]
        own = [layer.name for layer in adding for _ in layer._get_own_losses()]
        return own + ["a regularizer"] * (len(model.losses) - len(own))

    def own_loss(self, whole: Forward, cuts: list[Forward], layer_powers: tuple[int, ...]) -> Found:
        """The model's own compute_loss, without what layers add."""

        def value(forward: Forward, called: Forward | None = None) -> float:
            self.run((called or forward).batch[0], training=False)  # it may use what call() leaves on the model
            x, y, sample_weight = forward.batch
            with loss.losses_of(self.model, [ops.zeros(())]), loss.stateless():
                return number(
                    self.model._compute_loss(
                        x=x, y=y, y_pred=forward.y_pred, sample_weight=sample_weight, training=False
                    )
                )

        def is_bound() -> bool:
            if abs(value(whole) - sides.whole) > 1e-6 * abs(sides.whole):
                return False  # it is random, so nothing can be said
            try:
                return abs(value(whole, cuts[0]) - sides.whole) > sides.rounding * abs(sides.whole)
            except Exception:  # shapes that do not fit, say
                return True

        sides = Sides(value(whole), [value(cut) for cut in cuts_of(whole, cuts)], self.rounding)
        power = self.power(sides, cuts, lambda: value(whole))
        if power is None:
            self.tell("compute_loss", sides, [cut.num / whole.num for cut in cuts], whole.num)
        found = Found({}, 1 if power is None else power, layer_powers, is_bound())
        if found.is_bound and (metrics := [metric.name for metric in self.model._metrics]):
            stay = "stays as it is" if len(metrics) == 1 else "stay as they are"
            self.told.append(
                "compute_loss uses what call() left on the model, which is of one micro-batch, so the metric "
                f"{', '.join(metrics)} {stay}: return it from call() as an output"
            )
        return found

    def is_shared(self, part: Part, seems: bool) -> bool:
        """Whether the loss is divided by the number of replicas; as it seems, if its value does not show it."""

        def value() -> float:
            return number(part.loss(part.y_true, part.y_pred, part.sample_weight))

        with self.alone() as num_replicas:
            undivided = value()
        if num_replicas == 1 or not undivided or not math.isfinite(undivided):
            return seems
        return abs(value() * num_replicas - undivided) < abs(value() - undivided)

    # --- what fits --------------------------------------------------------------------------------------------

    def power(self, sides: Sides, cuts: list[Forward], again: Callable[[], float]) -> int | None:
        return self.first_that_fits([(p, sides, [(cut.num / self.num) ** p for cut in cuts]) for p in POWERS], again)

    def first_that_fits(self, fits: Sequence[tuple[Any, Sides, Sequence[float]]], again: Callable[[], float]) -> Any:
        """The first choice with whose shares the cuts add up to the whole, None if there is none.

        It is also the first if nothing can be said: a loss that is random, or not finite.
        """
        for choice, sides, shares in fits:
            if sides.distance(shares) <= sides.rounding:
                return choice
        choice, sides, _ = fits[0]
        is_random = abs(again() - sides.whole) > 1e-6 * abs(sides.whole)
        return choice if is_random or not math.isfinite(sides.whole) else None

    def tell(self, name: str, sides: Sides, shares: Sequence[float], num: int) -> None:
        cut = sum(share * value for share, value in zip(shares, sides.cuts, strict=True))
        off = f" (off by {sides.distance(shares):.1e})" if math.isfinite(cut) else ""
        self.told.append(
            f"{name} is neither a mean nor a sum over samples: on {num} samples it is {sides.whole:.6g}, and "
            f"{cut:.6g} when they are cut{off}, so steps in micro-batches are "
            "not those of the full batch: write it as a mean over samples, or train without accumulate()"
        )


def try_out(trial: Trial) -> Found:
    """What the trial finds, with warnings for what cannot be used. It never stops a training that works without it."""
    found = Found()
    if trial.num < 2:
        return found
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the step itself warns
            found = trial.found()
    except BigBatchError:
        raise
    except Exception as error:
        trial.told.append(f"the loss could not be tried on {trial.num} samples ({type(error).__name__}: {error})")
    return found


def spread(batch: Batch, num: int) -> Batch:
    """So many samples from all over the batch, since the first may be all alike; not if it is ragged or sparse."""
    size = rows_of(batch[0])
    leaves = [leaf for leaf in tree.flatten(batch) if leaf is not None and len(leaf.shape)]
    if any(is_ragged(leaf) or hasattr(leaf, "dense_shape") for leaf in leaves):
        return batch
    places = [k * size // num for k in range(num)]

    def picked(leaf: Any) -> Any:
        return leaf if leaf is None or not len(leaf.shape) else ops.take(leaf, places, axis=0)

    return tree.map_structure(picked, batch)


def changes_variables(evaluate: Callable[[], Any]) -> bool:
    """Whether it assigns to variables of Keras other than seeds of random generators, which are integers."""
    held = get_stateless_scope().state_mapping
    before = dict(held)
    evaluate()
    return any(
        value is not before.get(key) and "int" not in keras.backend.standardize_dtype(value.dtype)
        for key, value in held.items()
    )


def same(left: list[Any], right: list[Any]) -> bool:
    """Whether these losses are equal, to rounding."""
    pairs = [(number(a), number(b)) for a, b in zip(left, right, strict=False)]
    return len(left) == len(right) and all(math.isclose(*pair, rel_tol=1e-6) for pair in pairs)


def cuts_of(whole: Forward, cuts: list[Forward]) -> list[Forward]:
    """The cuts with the outputs that they have in the whole, so that what is random in the model does not matter."""
    tensors = loss.tensors_of(whole.y_pred)
    starts, found = [0] * len(tensors), []
    for cut in cuts:
        stops = [start + like.shape[0] for start, like in zip(starts, loss.tensors_of(cut.y_pred), strict=True)]
        pieces = iter([rows(*each) for each in zip(tensors, starts, stops, strict=True)])
        found.append(cut._replace(y_pred=loss.map_tensors(lambda _: next(pieces), whole.y_pred)))  # noqa: B023
        starts = stops
    return found


def rows(tensor: Any, start: int, stop: int) -> Any:
    piece = tensor[start:stop]
    if (mask := get_keras_mask(tensor)) is not None:
        set_keras_mask(piece, mask[start:stop])
    return piece


def shares_by(kind: Kind, part: Part, parts: list[Part], cuts: list[Forward]) -> list[float]:
    nums = [cut.num for cut in cuts]
    if not kind.counted:
        return [float(loss.share_of(num / sum(nums), kind.power)) for num in nums]
    weights = [number(loss.weigh(each, kind, num)) for each, num in zip(parts, nums, strict=True)]
    total = sum(weights)
    return [weight / total if total else 0.0 for weight in weights]


def is_ragged(tensor: Any) -> bool:
    return any(num is None for num in tensor.shape)


def relative_distance(a: Any, b: Any) -> float:
    scale = float(np.abs(b).max(initial=0))
    return float(np.abs(a - b).max(initial=0)) / scale if scale else 0.0


def rows_of(x: Any) -> int:
    return next((int(leaf.shape[0]) for leaf in tree.flatten(x) if leaf is not None and len(leaf.shape)), 0)


def number(value: Any) -> float:
    return float(np.sum(numbers(value)))


def numbers(tensor: Any) -> Any:
    return np.asarray(ops.convert_to_numpy(tensor), "float64")


def rounding(*dtypes: Any) -> float:
    """What rounding may amount to in the coarsest of these dtypes.

    Keras 3.15 rounds some losses in float64 to float32.
    """
    names = {keras.backend.standardize_dtype(dtype) for dtype in dtypes}
    return 5e-2 if names & {"float16", "bfloat16"} else 1e-6 if names == {"float64"} else 1e-5
