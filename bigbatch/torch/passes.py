"""The passes of a window that is at hand: each adds its share of the gradient."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import Interrupted
from ..core.options import Fixed
from ..core.step import Step
from ..core.weight import Terms
from . import batch as nest
from . import checks
from . import sums as arithmetic
from .capture.capture import Capture
from .distributed.totals import Agreed
from .gradient_buffer import Collection
from .precision import is_low
from .transfer import Transfer
from .update import Update
from .verify.time_major import TimeAxis
from .weight import Scales, times
from .window import OpenWindow, values_of

Loss = Callable[[Any, Any], Any]


class Passes(Update):
    """Every micro-batch goes through the model, forward and backward, by itself or captured."""

    model = Fixed()
    _transfer: Transfer
    _capture: Capture | None
    _batch_norms: list[nn.Module]
    _has_told_batch_norm = False
    _time_axis: TimeAxis
    is_interrupted = False
    """Whether `interrupt` was called and nothing has stopped yet."""
    _so_far: OpenWindow | None = None
    """What an interrupted step has."""

    def _step(
        self,
        loss: Any,
        passes: list[tuple[Any, Terms]],
        agreed: Agreed,
        micro_batch_size: int | None,
        window: OpenWindow,
    ) -> Step:
        """The step of a window whose micro-batches are all at hand; on a rank without any, of those of the others.

        There is something in the window already if the step was interrupted before.
        """
        (sums,), losses = window.sums, window.losses
        scales_of = Scales(agreed, self.reduction)
        capture = self._capture if self._capture is not None and self._capture.is_on else None
        if capture is not None:
            capture.begin(loss)
        is_overlapping = self._replicas.is_shared and capture is None
        micro_batches = [micro_batch for micro_batch, _ in passes[len(losses) :]]
        self._replicas.begin(micro_batches, agreed)
        self._gradients.refuse_foreign()
        with self._replicas.window(), self._gradients.collecting(sums) as collection:
            for number, micro_batch in enumerate(self._transfer.arriving(micro_batches), len(losses)):
                weight = passes[number][1]
                is_last = is_overlapping and self._replicas.is_last(
                    number, len(passes), agreed, is_whole=self._is_whole(weight)
                )
                with self._replicas.passing(is_last=is_last):
                    losses.append(self._accumulate(loss, micro_batch, weight, scales_of, collection))
                if self.is_interrupted and len(losses) < len(passes) and not self._replicas.is_shared:
                    break
            for number in range(len(passes), self._replicas.num_passes(agreed)):
                with self._replicas.passing(is_last=self._replicas.is_last(number, len(passes), agreed)):
                    self._add_nothing(loss, collection)
            if self._replicas.is_shared and agreed().has_weight(self.reduction):
                self._replicas.complete(collection, is_whole=all(self._is_whole(weight) for _, weight in passes))
        if len(losses) < len(passes):
            raise self._interruption(window, len(passes))
        arithmetic.scale(sums, sums.unit)
        summed = self._replicas.sum_losses(losses, [scales_of[w] for _, w in passes], len(agreed().total))
        return self._apply(sums, summed, agreed(), micro_batch_size)

    # --- interruption ------------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Asks the step under way to stop after its micro-batch; from a signal handler or another thread too.

        It raises `Interrupted`, and what it has so far is kept: `step` with the same batch goes on from there, bit for
        bit as if nothing had been, in this process or in one that takes up `state_dict`. If no step is under way, the
        next one raises before it begins. Where several ranks train the model together, steps are finished, and the
        request is left for the caller to see.
        """
        self.is_interrupted = True

    def _interruption(self, window: OpenWindow, num_passes: int) -> Interrupted:
        """Keeps what there is; says how to go on."""
        if self._capture is not None:  # recorded passes add to memory of their own
            window.sums[0].update({p: g.clone() for p, g in window.sums[0].items()})
        window.loss_scale, window.seen = self._precision.loss_scale(), self._seen()
        window.check_trainable(self._gradients.parameters)
        self._so_far = window
        self.is_interrupted = False
        return Interrupted(
            f"step {self.num_steps + 1} was interrupted after {len(window.losses)} of {num_passes} micro-batches: "
            "save state_dict(), and call step() with the same batch to go on"
        )

    def _stop_before_beginning(self, what: str) -> None:
        if self.is_interrupted and not self._replicas.is_shared:
            self.is_interrupted = False
            raise Interrupted(
                f"step {self.num_steps + 1} was interrupted before this {what}: save state_dict(), and pass the same "
                f"{what} to go on"
            )

    def _accumulate(
        self,
        loss: Loss,
        micro_batch: Any,
        weight: Terms,
        scales_of: Scales,
        collection: Collection,
    ) -> list[Any]:
        """Adds the gradient of one micro-batch; returns its losses and lets go of everything else."""
        if self._capture is not None and self._capture.is_on:
            scale = times(scales_of[weight], self._replicas.divisor)
            losses = self._capture.add(partial(self._terms, loss, len(weight)), micro_batch, scale, collection)
            if losses is not None:
                return losses
        collection.take()
        terms = self._terms(self._time_axis.watched(loss), len(weight), micro_batch)
        collection.put()
        is_any_low = any(map(is_low, terms))
        self._replicas.see_loss(is_low=is_any_low)
        scale = times(scales_of[weight], self._replicas.divisor)
        if is_any_low:
            for t, term in enumerate(terms):
                self._add_unscaled(term, scale[t], collection, keep_graph=t < len(terms) - 1)
        else:
            collection.in_units_of(1.0)
            self._precision.backward(terms, scale)
            collection.added()
        return values_of(terms)

    def _terms(self, loss: Loss, num_weights: int, micro_batch: Any) -> Terms:
        """The loss of a micro-batch, term by term, checked."""
        terms = self._precision.terms(loss, self.model, micro_batch)
        checks.check_loss(terms, num_weights)
        return terms

    def _add_unscaled(self, term: Tensor, scale: Any, collection: Collection, *, keep_graph: bool) -> None:
        """Adds a term's gradient as it is: its weight goes into the measure of the sums, where nothing is rounded."""
        if isinstance(scale, Tensor) or scale:
            collection.in_units_of(scale)
            self._precision.backward((term,), (1.0,), keep_graph=keep_graph)
            collection.added()

    def _add_nothing(self, loss: Loss, collection: Collection) -> None:
        """Goes through the model for the sake of ranks that have more micro-batches; what it adds counts zero."""
        with self._replicas.buffers_kept():
            collection.take()
            spare = nest.map_tensors(Tensor.clone, self._replicas.spare)  # a loss may write into it
            terms = self._precision.terms(loss, self.model, self._transfer.brought(spare))
            collection.put()
            self._precision.backward(terms, tuple(torch.zeros_like(term) for term in terms))
            collection.added()  # what other ranks add has come with it

    def _is_whole(self, weight: Terms) -> bool:
        """Whether no term is left out since it counts nothing."""
        return self.reduction == "sum" or all(weight)

    def _check_nonfinite(self) -> None:
        """By what is known on all ranks alike: of the last step it may not be."""
        self._nonfinite.check(self.num_steps - 1)
        self._nonfinite.check_not_stopped()

    def _tell_batch_norm(self, num_micro_batches: int) -> None:
        if num_micro_batches > 1 and self._batch_norms and not self._has_told_batch_norm:
            self._has_told_batch_norm = checks.tell_batch_norm(self.model)
