"""A window that is fed one micro-batch at a time: what it holds, and how it is saved."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..core.errors import OrderError, StateError
from ..core.step import Step
from ..core.weight import Reduction, Terms, Weights, from_terms, is_number, weighted
from . import sums as arithmetic
from .distributed.shards import like, local
from .gradients import Gradients
from .sums import Sums
from .weight import read

FAR = 2.0**40


@dataclass
class OpenWindow:
    """The micro-batches so far: their weights, their losses, and the gradient sums of each term."""

    tally: Weights
    sums: list[Sums]
    losses: list[list[Any]] = field(default_factory=list)
    loss_scale: Tensor | None = None
    """What a GradScaler multiplied losses by when the window began."""
    seen: list[int] | None = None
    """What the parameters looked like after the last micro-batch; None if it was taken up from a state."""
    trainable: list[bool] | None = None
    """Which parameters the micro-batches so far gave gradients to; None before the first."""
    is_of_step: bool = False
    """Whether it is what step() has so far: all weights of the batch, one sum, the losses of what is done."""

    def check_same(self, weights: Sequence[Terms]) -> None:
        """Refuses to go on with another batch than the one that was interrupted."""
        remedy = "pass the same batch to go on, or call forget() to drop what was interrupted"
        own = self.tally.weights
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

    @classmethod
    def of_step(cls, reduction: Reduction, weights: list[Terms]) -> "OpenWindow":
        tally = Weights(reduction, tuple(1.0 for _ in weights[0]) if weights else (1.0,))
        tally.weights = weights
        return cls(tally, [Sums()], is_of_step=True)

    def check_unchanged(self, now: list[int]) -> None:
        """Refuses to add up gradients of different parameters."""
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
        """Refuses to add up gradients of more or fewer parameters than before."""
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

    def measure_by(self, weight: Terms) -> None:
        """This one is the measure if the first is nothing, or so little beside it that w_k / w_1 would overflow."""
        reference = self.tally.reference
        for t, (now, first) in enumerate(zip(weight, reference, strict=False)):  # the first one finds none
            if is_number(now) and is_number(first) and (now > first * FAR or (now and not self.sums[t])):
                arithmetic.scale(self.sums[t], first / now)
                reference = (*reference[:t], now, *reference[t + 1 :])
        self.tally.reference = reference

    def check_scale(self, now: Tensor | None) -> None:
        """Refuses to add up what was scaled differently."""
        if now is not None and self.loss_scale is not None and float(now) != float(self.loss_scale):
            raise OrderError(
                f"the GradScaler's scale went from {float(self.loss_scale):g} to {float(now):g} in the middle of a "
                "window, so its gradients do not add up and the window was dropped: "
                "give each accumulator a scaler of its own"
            )

    def __len__(self) -> int:
        return len(self.tally.weights)

    def __getstate__(self) -> dict[str, Any]:
        """A copy is of other parameters, which nobody has looked at."""
        return {**vars(self), "seen": None}

    def state_dict(self, parameters: list[Tensor]) -> dict[str, Any]:
        """Copies, so that going on does not change what was saved."""
        number = {p: k for k, p in enumerate(parameters)}
        return {
            "reduction": self.tally.reduction,
            "weights": read(self.tally.weights),
            "reference": self.tally.reference,
            "losses": [[float(value) for value in terms] for terms in self.losses],
            "gradients": [{number[p]: local(g).clone() for p, g in sums.items()} for sums in self.sums],
            "units": [float(sums.unit) for sums in self.sums],
            "is_of_step": self.is_of_step,
            "loss_scale": None if self.loss_scale is None else float(self.loss_scale),
            "shapes": [tuple(local(p).shape) for p in parameters],
            "trainable": self.trainable,
        }

    @classmethod
    def load(cls, state: dict[str, Any], own: Gradients, reduction: Reduction) -> "OpenWindow":
        parameters = own.parameters
        shapes = [tuple(local(p).shape) for p in parameters]
        if state["reduction"] != reduction:
            raise StateError(
                f"the state was saved with reduction={state['reduction']!r}, this accumulator has "
                f"{reduction!r}: make it with the same"
            )
        if len(state["shapes"]) != len(shapes):
            raise StateError(
                f"the state is of {len(state['shapes'])} parameters, the optimizer holds {len(shapes)}: "
                "load it into the same model and optimizer"
            )
        for k, (saved, shape) in enumerate(zip(state["shapes"], shapes, strict=True)):
            if tuple(saved) != shape:
                raise StateError(
                    f"parameter {k} has the shape {tuple(saved)} in the state but {shape} in the optimizer: "
                    "load it into the same model and optimizer"
                )
        tally = Weights(reduction)
        tally.weights = [tuple(weight) for weight in state["weights"]]
        tally.reference = tuple(state["reference"])
        loss_scale = state["loss_scale"]
        trainable = state.get("trainable")  # older states have none, nor is_of_step
        window = cls(
            tally,
            [Sums() for _ in state["gradients"]],
            [list(terms) for terms in state["losses"]],
            None if loss_scale is None else torch.tensor(loss_scale),
            trainable=None if trainable is None else [bool(is_trained) for is_trained in trainable],
            is_of_step=bool(state.get("is_of_step", False)),
        )
        for sums, saved, unit in zip(window.sums, state["gradients"], state["units"], strict=True):
            sums.unit = unit
            for k, g in saved.items():
                if not 0 <= k < len(parameters) or tuple(g.shape) != shapes[k]:
                    raise StateError(f"the state has a gradient for parameter {k} that fits none of {len(parameters)}")
                if g.dtype != (dtype := own.wide_dtype(parameters[k])):
                    raise StateError(
                        f"the gradient of parameter {k} is {g.dtype} in the state but adds up in {dtype} here: load it "
                        "into a model of the same dtype, with the same accumulate_dtype"
                    )
                sums[parameters[k]] = like(parameters[k], g.to(parameters[k].device, copy=True))
        return window


class MicroBatch:
    """One micro-batch of the user's own loop; see `Accumulator.micro_batch`."""

    def __init__(self, feed: Callable[["MicroBatch", Any], None]) -> None:
        self._feed = feed
        self.has_begun = False
        """Whether something may have been added."""
        self.is_fed = False
        """Whether all of it was."""
        self.is_over = False
        self.step: Step | None = None
        """The step that this micro-batch completed, once the block has ended; None if its window goes on."""

    def backward(self, loss: Any) -> None:
        """Adds the gradient of this micro-batch's loss, a mean over its `weight`, to the window."""
        if self.is_over:
            raise OrderError("micro.backward was called after its block, where nothing is added: call it in the block")
        if self.has_begun:
            raise OrderError("micro.backward was called twice in one micro-batch: add the losses up before")
        self._feed(self, loss)

    def check_fed(self) -> None:
        """At the end of the block. What `backward` raised may have been caught inside of it."""
        if not self.has_begun:
            raise OrderError("micro.backward(loss) was not called in this micro-batch: call it once in the block")
        if not self.is_fed:
            raise OrderError(
                "micro.backward(loss) failed in this micro-batch, and the block went on: "
                "catch the error outside of the block, and begin the window anew"
            )


def values_of(losses: Terms) -> list[Any]:
    """The values without the graph: plain numbers on the CPU, elsewhere tensors, since nothing is waited for.

    Those are copies: a scalar may sit on the memory of all that it is the mean of (F.mse_loss in torch 2.13).
    """
    return [loss.item() if loss.is_cpu else loss.detach().reshape(()).clone() for loss in losses]


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
