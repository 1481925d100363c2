"""A window: the micro-batches of one step, the weight of each, and what has been added up so far."""

import functools
import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..core.errors import BatchError, Interrupted, OptionError, OrderError, WeightError
from ..core.step import Step
from ..core.weight import (
    Reduction,
    Terms,
    Weights,
    as_plain,
    as_terms,
    check_terms,
    check_weight,
    from_terms,
    shares,
    totals,
)
from ..core.window import Window
from .auxiliary import WindowAux
from .cutting import Cutting
from .distributed.totals import GetTotals, LocalCounts
from .sums import Sums

Weight = Callable[[Any], Any]
GetShares = Callable[[Terms], Terms]
_FAR = 2.0**40
_SIZE_WITHOUT_SINGLES = 3
"""From this size on, a batch can be cut so that no micro-batch has a single sample."""
_REQUIRES_GRAD = operator.attrgetter("requires_grad")
_SUMMED = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_SUMMED |= {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
"""What torch can compare and add up: uint64 and float8 it cannot (2.13)."""


class Cut:
    """A batch in micro-batches, each with its weight.

    Args:
        micro_batches: The micro-batches, in order.
        weights: Their weights, term by term.
        sizes: How many samples each has; empty if that is not known.
        reduction: "mean" or "sum".
        is_cut: Whether bigbatch cut them, and not the user.
        runs_all: Whether micro-batches of weight zero are run too, for their aux.
    """

    def __init__(
        self,
        micro_batches: Sequence[Any] = (),
        weights: Sequence[Terms] = (),
        sizes: Sequence[int] = (),
        reduction: Reduction = "mean",
        *,
        is_cut: bool = False,
        runs_all: bool = False,
    ) -> None:
        self.micro_batches, self.weights, self.sizes = micro_batches, list(weights), sizes
        self.reduction, self.is_cut = reduction, is_cut
        self.largest_micro_batch: int | None = max(sizes, default=None)
        """How many samples the largest micro-batch has; None if that is not known."""
        ran = [
            number
            for number, weight in enumerate(self.weights)
            if reduction == "sum" or any(weight) or runs_all  # skip zero weights: that mean may be 0/0
        ]
        self.passes = [(micro_batches[number], self.weights[number]) for number in ran]
        self._pass_sizes = [sizes[number] for number in ran] if sizes else []
        self.pass_weights = [weight for _, weight in self.passes]
        self.num_skipped = len(self.weights) - len(self.passes)

    @classmethod
    def of(
        cls,
        batch: Any,
        cutting: Cutting,
        micro_batch_size: int | None,
        weight: Weight | None,
        reduction: Reduction,
        *,
        has_norms: bool,
        runs_all: bool = False,
        call: str = "step()",
    ) -> "Cut":
        """Cuts and weighs a batch, or weighs the micro-batches of a window.

        With `has_norms` a micro-batch of one sample is avoided, from which BatchNorm has no statistics.
        """
        is_cut = not isinstance(batch, Window)
        sizes: Sequence[int] = ()
        if is_cut:
            if micro_batch_size is None:
                raise OptionError(f"{call} needs to know where to cut the batch: pass micro_batch_size=…, or a Window")
            micro_batches, sizes = cutting(batch, micro_batch_size, avoid_single_sample=has_norms)
        elif not batch:
            raise BatchError("the window has 0 micro-batches: pass at least one, or make no step")
        else:
            micro_batches = batch
            if weight is None:
                sizes = [cutting.size(part, f"micro_batch[{k}]") for k, part in enumerate(batch)]
        weights = [(size,) for size in sizes] if weight is None else weigh(micro_batches, weight)
        if is_cut and weight is not None and callable(cutting.cut):
            cutting.check_weights(weigh([batch], weight)[0], weights)
        return cls(micro_batches, weights, sizes, reduction, is_cut=is_cut, runs_all=runs_all)

    def num_samples(self, number: int, cutting: Cutting) -> int | None:
        """How many samples the micro-batch of this pass has; None if that is not known."""
        if self._pass_sizes:
            return self._pass_sizes[number]
        with suppress(Exception):  # the loss may have changed the micro-batch
            return cutting.size(self.passes[number][0], "micro_batch")
        return None

    def has_all_terms(self, *weights: Terms) -> bool:
        """Whether every term has a weight in each of these micro-batches; a term without one is not computed."""
        return self.reduction == "sum" or all(map(all, weights))

    def counts(self, num_hooks: int) -> LocalCounts:
        return LocalCounts(totals(self.weights), len(self.passes), len(self.weights), num_hooks=num_hooks)

    def explain(self, error: Exception, num_done: int) -> None:
        """Adds context to an error in a step that may have resumed after `num_done` micro-batches."""
        if num_done and not isinstance(error, Interrupted):
            error.add_note("bigbatch: the progress of the interrupted step was dropped; step() starts the batch again")
        is_of_norm = isinstance(error, ValueError) and "more than 1 value per channel" in str(error)
        if is_of_norm and len(self.sizes) > 1 and self.sizes[-1] == 1:
            num, size = sum(self.sizes), max(self.sizes)
            ends = "has a single sample in each" if size == 1 else "ends with one of a single sample"
            if size < _SIZE_WITHOUT_SINGLES:
                remedy = f"pass a micro_batch_size of {min(num, _SIZE_WITHOUT_SINGLES)} or more, or put BatchNorm into "
                remedy += "eval mode"
            elif self.is_cut:  # layers in training mode would have been cut for
                remedy = "the layer was put into training mode in the loss: call train() between steps"
            else:
                remedy = "give the last micro-batch of a window 2 samples or more"
            raise BatchError(
                f"a batch of {num} in micro-batches of {size} {ends}, from which BatchNorm has no statistics: {remedy}"
            ) from error


def shares_of_step(get_totals: GetTotals, reduction: Reduction) -> GetShares:
    """Returns what turns the weight of a micro-batch into its shares: w / W, term by term.

    The first call waits for the total. The ranks may still be adding it up while the first forward pass runs.
    """
    return functools.cache(lambda weight: shares(weight, get_totals().total, reduction))


@dataclass
class PartialWindow:
    """A window that is partly filled, by `micro_batch()` or by a `step()` that may be interrupted.

    Args:
        weights: Of `micro_batch()`: the weights so far, and their reference. Of `step()`: the weights of the whole
            batch.
        sums: The gradient sums: of `micro_batch()` for each term, of `step()` for all terms together.
        losses: The losses so far, by micro-batch and term.
        aux: What the loss returned beside its value so far; None without `has_aux`.
        loss_scale: What a GradScaler multiplied losses by when the window began.
        seen: What the parameters looked like after the last micro-batch; None if the window was loaded.
        trainable: Which parameters the micro-batches so far gave gradients to; None before the first.
        is_of_step: Whether it is that of `step()`.
        buffers: What adds to the sums of `micro_batch()`, by term.
        shares: What `share` has computed.
        batch_norm: When it is saved or loaded: the statistics of BatchNorm layers so far.
        batch_norm_mode: The option `batch_norm` that it was saved with; None if that is not known.
    """

    weights: Weights
    sums: list[Sums]
    losses: list[list[Any]] = field(default_factory=list)
    aux: WindowAux | None = None
    loss_scale: Tensor | None = None
    seen: list[int] | None = None
    trainable: list[bool] | None = None
    is_of_step: bool = False
    buffers: list[Any] = field(default_factory=list)
    shares: dict[Terms, Terms] = field(default_factory=dict)
    batch_norm: dict[str, list[Tensor]] = field(default_factory=dict)
    batch_norm_mode: Any = None

    @classmethod
    def of_step(cls, cut: Cut, aux: WindowAux | None = None, *, is_of_step: bool = True) -> "PartialWindow":
        """One whose micro-batches are all known: of `step()`, or of `backward()`, which is not interrupted."""
        weights = Weights(cut.reduction)
        weights.weights = cut.weights
        return cls(weights, [Sums()], aux=aux, is_of_step=is_of_step)

    def __len__(self) -> int:
        return len(self.weights.weights)

    def __getstate__(self) -> dict[str, Any]:
        """A copy of an accumulator trains other parameters, so these marks and buffers are not its own."""
        return {**vars(self), "seen": None, "buffers": []}

    def share(self, weight: Terms, *, is_movable: bool) -> Terms:
        """What the losses of the next micro-batch are multiplied by: its weight over the reference.

        If the reference is so little that this would overflow, or came from a weight of 0, it is replaced, provided
        that the sums can be scaled to another (`is_movable`).
        """
        if weight in self.shares:
            return self.shares[weight]
        is_kept = all(self.sums) and not any(isinstance(w, Tensor) for w in weight)
        if is_movable and self.weights.reduction == "mean":
            reference = list(self.weights.reference)
            for t, (now, first) in enumerate(zip(weight, reference, strict=False)):  # the first one finds none
                is_on_host = not isinstance(now, Tensor) and not isinstance(first, Tensor)
                if is_on_host and (now > first * _FAR or (now and not self.sums[t])):
                    better = self.weights.guess((now,))
                    self.sums[t].multiply(*shares((first,), better))
                    (reference[t],) = better
                    self.shares.clear()
            self.weights.reference = tuple(reference)
        share = self.weights.share(weight)
        if is_kept:
            self.shares[weight] = share
        return share

    def add(self, weight: Terms, losses: list[Any]) -> None:
        """Counts a micro-batch whose gradient was added."""
        self.weights.add(weight)
        self.losses.append(losses)

    def summed(self, total: Terms, divisor: float) -> Sums:
        """The sums of all terms as one, each times reference / W and the divisor of the ranks; empties the window's."""
        summed = Sums()
        for sums, rest in zip(self.sums, self.weights.rest(total), strict=True):
            sums.multiply(sums.unit * rest * divisor)
            summed.add(sums)
            sums.clear()
        self.buffers.clear()
        return summed

    def refuse(self, call: str) -> OrderError:
        """The error if this call cannot continue this window."""
        if not self.is_of_step:
            return OrderError(f"a window of {len(self)} micro-batches is open: call flush() before {call}")
        return OrderError(
            f"{call} was called after a step that was interrupted with {len(self.losses)} micro-batches "
            "done: call step() with the same batch to end it, or forget() to drop it"
        )

    def check_same(self, weights: Sequence[Terms]) -> None:
        """Raises OrderError if this is another batch than the one that was interrupted."""
        remedy = "pass the same batch to go on, or call forget() to drop what was interrupted"
        if len(self) != len(weights):
            raise OrderError(
                f"the batch had {len(self)} micro-batches when the step was interrupted, now it has {len(weights)}: "
                f"{remedy}"
            )
        for number, (before, now) in enumerate(zip(self.weights.weights, weights, strict=True), 1):
            if before != now:
                raise OrderError(
                    f"micro-batch {number} had the weight {from_terms(before)} when the step was interrupted, now it "
                    f"has {from_terms(now)}: {remedy}"
                )

    def check_unchanged(self, now: list[int]) -> None:
        """Raises OrderError if the parameters have changed: gradients of two models do not add up."""
        if self.seen is not None and self.seen != now:
            self._check_number(self.seen[0], now[0])
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
        now = list(map(_REQUIRES_GRAD, parameters))
        if self.trainable is not None and self.trainable != now:
            self._check_number(len(self.trainable), len(now))
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

    def __init__(self, feed: Callable[["MicroBatch", Any], None], *, can_skip: bool, is_weighted: bool) -> None:
        self._feed = feed
        self._can_skip = can_skip
        self.is_weighted = is_weighted
        self.is_skipped = False
        self.has_begun = False  # something may have been added
        self.is_fed = False  # all of it was
        self.is_over = False
        self.step: Step | None = None

    def backward(self, loss: Any) -> None:
        """Adds the gradient of this micro-batch's loss to the window.

        Args:
            loss: The mean over what `weight` counts; a tuple if `weight` is one. It may be whatever a loss may return:
                a mapping with "loss", or the pair `(loss, aux)` with `has_aux=True`.
        """
        if self.is_over:
            raise OrderError("micro.backward was called after its block, where nothing is added: call it in the block")
        if self.has_begun:
            raise OrderError("micro.backward was called twice in one micro-batch: add the losses up before")
        if self.is_skipped:
            raise OrderError("micro.backward was called after micro.skip(): call one of them")
        self._feed(self, loss)

    def skip(self) -> None:
        """Leaves this micro-batch out, instead of `backward`: the window continues as if it had not been.

            with accumulator.micro_batch(weight=len(y)) as micro:
                loss = criterion(model(x), y)
                if loss.isfinite():
                    micro.backward(loss)
                else:
                    micro.skip()

        The window still gets its `accumulation_steps` micro-batches. Random numbers that were drawn stay drawn;
        running statistics of BatchNorm leave it out, unless `batch_norm="micro_batch"`. With DistributedDataParallel
        each rank may skip its own; with fully_shard none can, since all ranks run each micro-batch together.
        """
        if self.is_over:
            raise OrderError("micro.skip was called after its block: call it in the block")
        if self.has_begun:
            raise OrderError("micro.skip was called after micro.backward, which added the gradient: call one of them")
        if not self._can_skip:
            raise OrderError(
                "micro.skip was called on a model in fully_shard, whose ranks run each micro-batch together, so the "
                "others would wait forever: leave the micro-batch out on all ranks before the block"
            )
        self.is_skipped = True

    def check_fed(self) -> None:
        """At the end of the block: raises OrderError unless `backward` was called once, and succeeded."""
        if self.is_skipped:
            return
        if not self.has_begun:
            raise OrderError(
                "micro.backward(loss) was not called in this micro-batch: call it once in the block, or micro.skip()"
            )
        if not self.is_fed:
            raise OrderError(
                "micro.backward(loss) failed in this micro-batch, but the block continued: "
                "catch the error outside the block and start a new window"
            )


def weigh(micro_batches: Sequence[Any], weight: Weight) -> list[Terms]:
    """The weight of each micro-batch, checked; what is on a device is fetched in one go."""
    return fetch_weights([as_terms(weight(micro_batch)) for micro_batch in micro_batches])


def fetch_weights(weights: Sequence[Terms]) -> list[Terms]:
    """The weights as plain numbers; those on a device are fetched together.

    Raises WeightError unless all of them, and their totals, are finite numbers of at least 0.
    """
    known = [on_host(weight) for weight in weights]
    if waiting := [w for weight in known for w in weight if isinstance(w, Tensor)]:
        fetched = iter(torch.stack(waiting).tolist())
        known = [tuple(next(fetched) if isinstance(w, Tensor) else w for w in weight) for weight in known]
    for number, weight in enumerate(known, 1):
        if not weight:
            raise WeightError(f"the weight of micro-batch {number} has 0 terms: return one number for each of the loss")
        check_weight(weight, of=f"micro-batch {number}")
        check_terms(len(known[0]), len(weight))
    if known:
        check_weight(totals(known), of=f"{len(known)} micro-batches together")
    return known


def on_host(weight: Terms) -> Terms:
    """Plain numbers where no device has to be asked; weights per sample are added up."""
    if set(map(type, weight)) == {int}:
        return weight
    summed = [_sum(w) if isinstance(w, Tensor) else as_plain(w) for w in weight]
    return tuple([w.item() if isinstance(w, Tensor) and w.is_cpu else w for w in summed])


def _sum(weight: Tensor) -> Tensor:
    """The sum of the weights of all samples; on a device in a wide dtype, since torch divides integers in float32.

    A negative weight could be hidden by the others. It raises WeightError, or makes the sum NaN on a device.
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
    is_integer = weight.is_cpu and not weight.is_floating_point()
    return weight.detach().sum(dtype=None if is_integer else _widest(weight))


def _widest(weight: Tensor) -> torch.dtype:
    return torch.float32 if weight.device.type == "mps" else torch.float64  # mps has no float64
