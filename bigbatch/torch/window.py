"""A window: the micro-batches of one step, what each counts, and what has been added up so far."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..core.errors import OrderError, WeightError
from ..core.step import Step
from ..core.weight import (
    Reduction,
    Terms,
    Weights,
    as_plain,
    as_terms,
    check_terms,
    check_weight,
    choose,
    from_terms,
    is_number,
    shares,
    totals,
    weighted,
)
from . import sums as arithmetic
from .distributed.totals import LocalCounts, Totals
from .sums import Sums

Weight = Callable[[Any], Any]
_FAR = 2.0**40
_SUMMED = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_SUMMED |= {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
"""What torch can compare and add up: uint64 and float8 it cannot (2.13)."""


class Cut:
    """A batch in micro-batches, with what each of them counts.

    Args:
        micro_batches: The micro-batches, in order.
        weights: Their weights, term by term.
        sizes: How many samples each has; empty if nobody needs to know.
        num_hooks: How many hooks the parameters have.
        reduction: "mean" or "sum".
        is_cut: Whether bigbatch cut them, and not the user.
    """

    def __init__(
        self,
        micro_batches: Sequence[Any] = (),
        weights: Sequence[Terms] = (),
        sizes: Sequence[int] = (),
        num_hooks: int = 0,
        reduction: Reduction = "mean",
        *,
        is_cut: bool = False,
    ) -> None:
        self.micro_batches, self.weights, self.sizes = micro_batches, list(weights), sizes
        self.num_hooks, self.reduction = num_hooks, reduction
        self.is_cut = is_cut
        self.passes = [
            (micro_batch, weight)
            for micro_batch, weight in zip(micro_batches, weights, strict=True)
            if reduction == "sum" or any(weight)  # what counts nothing is left out: its mean may be 0/0
        ]

    @property
    def size(self) -> int | None:
        """The size of the largest micro-batch."""
        return max(self.sizes, default=None)

    def is_whole(self, weight: Terms) -> bool:
        """Whether no term of a micro-batch with this weight is left out since it counts nothing."""
        return self.reduction == "sum" or all(weight)

    def counts(self) -> LocalCounts:
        """What this rank brings to the step."""
        return LocalCounts(totals(self.weights), len(self.passes), len(self.weights), num_hooks=self.num_hooks)


class Shares(dict[Terms, Terms]):
    """What the terms of a loss are multiplied by, by the weight of its micro-batch.

    Computed when it is asked for: the total is known once the ranks agree, and the first forward pass need not wait.

    Args:
        agreed: Returns the totals of all ranks.
        reduction: "mean" or "sum".
    """

    def __init__(self, agreed: Callable[[], Totals], reduction: Reduction) -> None:
        super().__init__()
        self._agreed = agreed
        self._reduction: Reduction = reduction

    def __missing__(self, weight: Terms) -> Terms:
        self[weight] = shares(weight, self._agreed().total, self._reduction)
        return self[weight]


@dataclass
class PartialWindow:
    """What a window has so far: of `micro_batch()`, or of a `step()`, which may be interrupted.

    Args:
        weights: Of `micro_batch()`: the weights so far, and their reference. Of `step()`: the weights of the whole
            batch.
        sums: The gradient sums: of `micro_batch()` for each term, of `step()` for all terms together.
        losses: The losses so far, by micro-batch and term.
        loss_scale: What a GradScaler multiplied losses by when the window began.
        seen: What the parameters looked like after the last micro-batch; None if the window was loaded.
        trainable: Which parameters the micro-batches so far gave gradients to; None before the first.
        is_of_step: Whether it is that of `step()`.
    """

    weights: Weights
    sums: list[Sums]
    losses: list[list[Any]] = field(default_factory=list)
    loss_scale: Tensor | None = None
    seen: list[int] | None = None
    trainable: list[bool] | None = None
    is_of_step: bool = False

    @classmethod
    def of_step(cls, cut: Cut) -> "PartialWindow":
        """One whose micro-batches are all known."""
        weights = Weights(cut.reduction, tuple(1.0 for _ in cut.weights[0]) if cut.weights else (1.0,))
        weights.weights = cut.weights
        return cls(weights, [Sums()], is_of_step=True)

    def __len__(self) -> int:
        return len(self.weights.weights)

    def __getstate__(self) -> dict[str, Any]:
        """A copy is of other parameters, which nobody has looked at."""
        return {**vars(self), "seen": None}

    def share(self, weight: Terms, *, is_movable: bool) -> Terms:
        """What the losses of the next micro-batch are multiplied by: its weight over the reference.

        If the reference is nothing, or so little that this would overflow, the weight becomes the reference.

        Args:
            weight: The weight, term by term.
            is_movable: Whether the sums can be scaled to another reference.
        """
        if is_movable:
            reference = self.weights.reference
            for t, (now, first) in enumerate(zip(weight, reference, strict=False)):  # the first one finds none
                if is_number(now) and is_number(first) and (now > first * _FAR or (now and not self.sums[t])):
                    arithmetic.scale(self.sums[t], first / now)
                    reference = (*reference[:t], now, *reference[t + 1 :])
            self.weights.reference = reference
        return self.weights.share(weight)

    def check_same(self, weights: Sequence[Terms]) -> None:
        """Raises OrderError if this is another batch than the one that was interrupted."""
        remedy = "pass the same batch to go on, or call forget() to drop what was interrupted"
        own = self.weights.weights
        if len(own) != len(weights):
            raise OrderError(
                f"the batch had {len(own)} micro-batches when the step was interrupted, now it has {len(weights)}: "
                f"{remedy}"
            )
        for number, (before, now) in enumerate(zip(own, weights, strict=True), 1):
            if before != now:
                raise OrderError(
                    f"micro-batch {number} had the weight {from_terms(before)} when the step was interrupted, now it "
                    f"has {from_terms(now)}: {remedy}"
                )

    def check_unchanged(self, now: list[int]) -> None:
        """Raises OrderError if the parameters have changed: gradients of two models do not add up."""
        if self.seen is not None:
            self._check_number(self.seen[0], now[0])
        if self.seen is not None and self.seen != now:
            raise OrderError(
                f"the parameters were changed in the middle of a window of {len(self)} micro-batches (by another "
                "accumulator, optimizer.step() or load_state_dict()), so its gradient would be that of two models: "
                "change them between windows, or call forget() to drop this one"
            )

    def _check_number(self, before: int, now: int) -> None:
        if before != now:
            raise OrderError(
                f"the optimizer holds {now} parameters but held {before} after the first {len(self)} micro-batches of "
                "this window, which have no gradient of the others: change its groups between windows, or call "
                "forget() to drop this one"
            )

    def check_trainable(self, parameters: Sequence[Tensor]) -> None:
        """Raises OrderError if parameters were frozen or unfrozen since the micro-batch before."""
        now = [p.requires_grad for p in parameters]
        if self.trainable is not None:
            self._check_number(len(self.trainable), len(now))
        if self.trainable is not None and self.trainable != now:
            num = sum(map(operator.ne, self.trainable, now))
            raise OrderError(
                f"{num} of {len(parameters)} parameters were frozen or unfrozen in the middle of a window of "
                f"{len(self)} micro-batches, so their gradients would be those of a part of it: "
                "call requires_grad_() between windows, or forget() to drop this one"
            )
        self.trainable = now

    def check_scale(self, now: Tensor | None) -> None:
        """Raises OrderError if a GradScaler has changed its scale since the window began."""
        if now is not None and self.loss_scale is not None and float(now) != float(self.loss_scale):
            raise OrderError(
                f"the GradScaler's scale went from {float(self.loss_scale):g} to {float(now):g} in the middle of a "
                "window, so its gradients do not add up and the window was dropped: "
                "give each accumulator a scaler of its own"
            )


class MicroBatch:
    """One micro-batch of the user's own loop; see `Accumulator.micro_batch`.

    Attributes:
        step: The step that this micro-batch completed, once the block has ended; None if its window goes on.
    """

    def __init__(self, feed: Callable[["MicroBatch", Any], None]) -> None:
        self._feed = feed
        self.has_begun = False
        """Whether something may have been added."""
        self.is_fed = False
        """Whether all of it was."""
        self.is_over = False
        self.step: Step | None = None

    def backward(self, loss: Any) -> None:
        """Adds the gradient of this micro-batch's loss to the window.

        Args:
            loss: The mean over what `weight` counts; a tuple if `weight` is one.
        """
        if self.is_over:
            raise OrderError("micro.backward was called after its block, where nothing is added: call it in the block")
        if self.has_begun:
            raise OrderError("micro.backward was called twice in one micro-batch: add the losses up before")
        self._feed(self, loss)

    def check_fed(self) -> None:
        """At the end of the block: raises OrderError unless `backward` was called once, and succeeded."""
        if not self.has_begun:
            raise OrderError("micro.backward(loss) was not called in this micro-batch: call it once in the block")
        if not self.is_fed:
            raise OrderError(
                "micro.backward(loss) failed in this micro-batch, and the block went on: "
                "catch the error outside of the block, and begin the window anew"
            )


def weigh(micro_batches: Sequence[Any], weight: Weight) -> list[Terms]:
    """The weight of each micro-batch, checked; what is on a device is fetched in one go."""
    weights = read([as_terms(weight(micro_batch)) for micro_batch in micro_batches])
    check_weights(weights)
    return weights


def check_weights(weights: Sequence[Terms]) -> None:
    """Raises WeightError unless all weights, and their sums, are finite numbers of at least 0."""
    for number, weight in enumerate(weights):
        if not weight:
            raise WeightError(
                f"the weight of micro-batch {number + 1} has 0 terms: return one number for each of the loss"
            )
        check_weight(weight, of=f"micro-batch {number + 1}")
        check_terms(len(weights[0]), len(weight))
    for total in totals(weights):
        check_weight((total,), of=f"{len(weights)} micro-batches together")


def where(condition: Any, value: Any, other: Any) -> Any:
    """What core/weight.py chooses with: a weight that is still on a device is not waited for."""
    return torch.where(condition, value, other) if isinstance(condition, Tensor) else choose(condition, value, other)


def on_host(weight: Terms) -> Terms:
    """Plain numbers where no device has to be asked; weights per sample are added up."""
    if all(type(w) is int for w in weight):
        return weight
    summed = (_sum(w) if isinstance(w, Tensor) else as_plain(w) for w in weight)
    return tuple(w.item() if isinstance(w, Tensor) and w.device.type == "cpu" else w for w in summed)


def read(weights: Sequence[Terms]) -> list[Terms]:
    """Plain numbers; those that are on a device are fetched together."""
    known = [on_host(weight) for weight in weights]
    waiting = [w for weight in known for w in weight if isinstance(w, Tensor)]
    if not waiting:
        return known
    fetched = iter(torch.stack(waiting).tolist())
    return [tuple(next(fetched) if isinstance(w, Tensor) else w for w in weight) for weight in known]


def _sum(weight: Tensor) -> Tensor:
    """In plain numbers on the CPU; elsewhere wide, since torch divides whole numbers in float32.

    If one sample counts less than nothing, others must not hide it: the sum is then no number.
    """
    if weight.is_meta or weight.is_quantized or weight.is_nested or weight.layout is not torch.strided:
        raise WeightError(
            f"the weight is a tensor on {weight.device.type} with {weight.dtype} and {weight.layout}, whose values "
            "cannot be added up: return a number or a plain dense tensor"
        )
    if weight.dtype not in _SUMMED:
        weight = weight.to(_widest(weight))
    if weight.numel() > 1 and not weight.is_complex() and weight.dtype is not torch.bool:
        is_negative = (weight < 0).any()
        if not weight.is_cpu:
            return weight.detach().sum(dtype=_widest(weight)).where(~is_negative, torch.nan)
        if is_negative:
            raise WeightError(
                f"{int((weight < 0).sum())} of {weight.numel()} samples have a weight below 0 ({weight.min():g} is the "
                "lowest): a weight says how much a sample counts, so it must be at least 0"
            )
    if weight.is_cpu and not weight.is_floating_point():
        return weight.detach().sum()
    return weight.detach().sum(dtype=_widest(weight))


def _widest(weight: Tensor) -> torch.dtype:
    return torch.float32 if weight.device.type == "mps" else torch.float64  # mps has no float64


def fetch_weighted(losses: Sequence[Sequence[Any]], by: list[Terms]) -> Callable[[], Terms]:
    """The loss of the whole batch, fetched from the device when somebody asks for it."""
    columns = [
        torch.stack(term) if all(isinstance(value, Tensor) for value in term) else term
        for term in zip(*losses, strict=True)
    ]

    def fetch() -> Terms:
        fetched = (column.tolist() if isinstance(column, Tensor) else map(float, column) for column in columns)
        return weighted(list(zip(*fetched, strict=True)), by)

    return fetch


def weighted_now(losses: Sequence[Sequence[Any]], by: list[Terms], num_terms: int, device: torch.device) -> Tensor:
    """The same as a tensor on the device; zero if there are none. Nothing is waited for."""
    if not any(isinstance(value, Tensor) for terms in losses for value in terms):
        return torch.tensor(
            weighted([*map(tuple, losses)], by) or [0.0] * num_terms, dtype=torch.float64, device=device
        )
    sums = []
    for values, scales in zip(zip(*losses, strict=True), zip(*by, strict=True), strict=True):
        counted = [(value, scale) for value, scale in zip(values, scales, strict=True) if scale]
        if not counted:
            sums.append(torch.zeros((), dtype=torch.float64, device=device))
            continue
        kept, factors = zip(*counted, strict=True)
        products = torch._foreach_mul(list(torch.stack(kept).double().unbind()), factors)  # takes plain numbers along
        sums.append(torch.stack(products).sum())
    return torch.stack(sums)
