"""Forward and backward of one micro-batch, which add its share of the gradient to the sums of the window."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import LossError, warn
from ..core.weight import Terms, check_terms
from .auxiliary import terms_and_aux
from .batch import map_tensors
from .batch_norm import BatchNorms
from .distributed.ranks import Ranks
from .gradients import GradientBuffer, Gradients
from .internals import ALONE, STORAGE_USERS
from .precision import LOW, Precision
from .time_major import TimeAxis
from .transfer import Transfer
from .window import GetShares, MicroBatch, PartialWindow

Loss = Callable[[Any, Any], Any]
_MAX_SEEDS = 64


class Backward:
    """Runs one micro-batch through the model, forward and backward.

        for micro_batch, weight in window:
            values, aux = backward(loss, micro_batch, weight, get_shares, buffer)

    stands for

            value, aux = loss(model, micro_batch)
            (value * weight / total).backward()
    """

    def __init__(
        self,
        model: nn.Module,
        gradients: Gradients,
        precision: Precision,
        ranks: Ranks,
        transfer: Transfer | None,
        time_axis: TimeAxis,
        batch_norms: BatchNorms,
        *,
        has_aux: bool,
    ) -> None:
        self._model = model
        self._gradients = gradients
        self.precision = precision
        self._ranks = ranks
        self._transfer = transfer
        self._time_axis = time_axis
        self.has_aux = has_aux
        self.batch_norms = batch_norms
        self._has_seen_aux = False
        self._seeds: dict[Any, Tensor] = {}
        """What backward passes started with: most micro-batches count the same."""

    def __call__(
        self, loss: Loss, micro_batch: Any, weight: Terms, get_shares: GetShares, buffer: GradientBuffer
    ) -> tuple[list[Any], Any]:
        """Adds the gradient of one micro-batch; returns its losses and aux, and keeps nothing else."""
        if buffer.is_in_grad:
            buffer.unload()
        if self._time_axis.is_watching:
            loss = self._time_axis.watched(loss)
        terms, aux = self.forward(loss, micro_batch, len(weight))
        is_any_low = self._check(terms, weight)
        scaled = self.times_divisor(get_shares(weight))
        values = _values_of(terms)
        if not is_any_low:
            buffer.add(*self.terms_and_seeds(terms, scaled))
            return values, aux
        for t, (term, share) in enumerate(zip(terms, scaled, strict=True)):
            if share:
                buffer.add(*self.terms_and_seeds((term,), (1.0,)), share, keep_graph=t < len(terms) - 1)
        return values, aux

    def feed(self, window: PartialWindow, weight: Terms, micro: MicroBatch, loss: Any) -> None:
        """Adds the gradient of a loss that the user has computed, each term to sums of its own."""
        losses, aux = self._split(loss, len(weight))
        is_any_low = self._check(losses, weight)
        is_sharded = self._ranks.is_sharded
        # The share becomes the unit of the sums, and not a factor of the loss, where that would round it; with a
        # GradScaler, a loss times a large weight would overflow in float16
        in_units = is_any_low or (self.precision.scaler is not None and not is_sharded)
        window.check_trainable(self._gradients.check_empty())
        if window.aux is not None:  # it may be refused, so it comes before anything is added
            window.aux.add(aux, None, is_weighted=micro.is_weighted)
        micro.has_begun = True
        shares = window.share(weight, is_movable=not is_sharded)
        values = _values_of(losses)
        if self.batch_norms.is_watching:  # before the backward pass, in which layers may run again
            self.batch_norms.pool()
            self.batch_norms.begin()
        if not window.buffers:
            window.buffers = [GradientBuffer(self._gradients, sums) for sums in window.sums]
        for t, (term, share, buffer) in enumerate(zip(losses, shares, window.buffers, strict=True)):
            if isinstance(share, Tensor) or share:
                seeded = self.terms_and_seeds((term,), (1.0 if in_units else share,))
                with buffer:
                    buffer.add(*seeded, share if in_units else 1.0, keep_graph=t < len(losses) - 1)
        if self.batch_norms.is_watching:
            self.batch_norms.begin(continues=True)  # compiled code does not know that it runs again in a backward pass
        window.add(weight, values)
        micro.is_fed = True

    def run_spare(self, loss: Loss, buffer: GradientBuffer) -> None:
        """Runs a spare micro-batch that counts zero, because ranks that have more micro-batches run the model."""
        with self._ranks.buffers_kept():
            spare = map_tensors(Tensor.clone, self._ranks.spare)  # a loss may write into it
            spare = spare if self._transfer is None else self._transfer.brought(spare)
            terms, _ = self._split(self._called(loss, spare), None)  # which does not count in BatchNorm's statistics
            buffer.add(
                *self.terms_and_seeds(terms, tuple(torch.zeros_like(term) for term in terms))
            )  # what other ranks add

    def _check(self, terms: Terms, weight: Terms) -> bool:
        """Whether a share would be rounded to the dtype of a term; raises LossError if this is no loss."""
        check_loss(terms, len(weight))
        is_any_low = is_low(terms)
        if self._ranks.is_distributed:
            self._ranks.check_loss_dtype(is_low=is_any_low)
        return is_any_low

    def times_divisor(self, shares: Terms) -> Terms:
        """Shares times the divisor of the ranks: they divide gradients by it when they reduce them."""
        divisor = self._ranks.divisor
        return shares if divisor == 1 else tuple(share * divisor for share in shares)

    def forward(self, loss: Loss, micro_batch: Any, num_weights: int | None) -> tuple[Terms, Any]:
        """The loss of a micro-batch, term by term, and aux."""
        if self.batch_norms.is_watching:
            self.batch_norms.begin()
        returned = self._called(loss, micro_batch)
        if self.batch_norms.is_watching:
            self.batch_norms.pool()
        return self._split(returned, num_weights)

    def _called(self, loss: Loss, micro_batch: Any) -> Any:
        if self.precision.dtype is None:
            return loss(self._model, micro_batch)
        with self.precision.autocast():
            return loss(self._model, micro_batch)

    def _split(self, returned: Any, num_weights: int | None) -> tuple[Terms, Any]:
        """What a loss returned, as its terms and aux. Most return a tensor."""
        if type(returned) is Tensor and not self.has_aux:
            return (returned,), None
        terms, aux = terms_and_aux(returned, num_weights, has_aux=self.has_aux)
        if not self._has_seen_aux:
            self._has_seen_aux = True
            if isinstance(aux, Tensor) and aux.ndim == 0 and aux.requires_grad:
                warn(
                    "the loss returned two numbers, and with has_aux=True the second is reported but not trained: "
                    "return ((loss, penalty), aux) to train both, or (loss, value.detach()) to report it only"
                )
        return terms, aux

    def terms_and_seeds(self, terms: Terms, shares: Terms) -> tuple[list[Tensor], list[Tensor]]:
        """The terms that count, and their seeds: what a backward pass of sum_t share_t * term_t starts with.

        A share enters as a seed, which saves the multiplication and its own backward pass.
        """
        counted, seeds = [], []
        for term, share in zip(terms, shares, strict=True):
            if term.requires_grad and (isinstance(share, Tensor) or share):
                counted.append(term)
                seeds.append(self.seed(share, term))
        return counted, seeds

    def seed(self, share: Any, loss: Tensor) -> Tensor:
        """The gradient that a backward pass from this loss starts with."""
        if isinstance(share, Tensor):
            seed = share.expand(loss.shape)
        else:
            key = (share, loss.shape, loss.dtype, loss.device)
            known = self._seeds.get(key)
            # a hook may have changed it, and .grad or the user may have kept it
            if known is None or known._version or STORAGE_USERS(known.untyped_storage()._cdata) > ALONE:
                if len(self._seeds) > _MAX_SEEDS:
                    self._seeds.clear()
                known = self._seeds[key] = torch.full(loss.shape, share, dtype=loss.dtype, device=loss.device)
            seed = known
        if self.precision.scaler is not None:
            seed = self.precision.scaler.scale(seed)
        return seed if seed.dtype == loss.dtype else seed.to(loss.dtype)


def check_loss(terms: Terms, num_weights: int) -> None:
    """Raises LossError unless the loss has as many terms as weights, each one real number with a graph."""
    if len(terms) != num_weights:
        check_terms(len(terms), num_weights)
    has_graph = False
    for term in terms:
        if not isinstance(term, Tensor):
            raise LossError(f"the loss is a {type(term).__name__}: return a scalar tensor, or a tuple of them")
        if term.numel() != 1:
            raise LossError(
                f"the loss has the shape {tuple(term.shape)}, so {term.numel()} numbers instead of 1: "
                "return the mean, for example loss.mean()"
            )
        if term.is_complex() or term.is_meta:
            kind = f"is {term.dtype}" if term.is_complex() else "is on the device meta, where it has no value"
            raise LossError(f"the loss {kind}: return one real number, computed where the model is")
        has_graph |= term.requires_grad
    if not has_graph:
        raise LossError(
            "the loss has no graph: compute it from the model's output, with gradients enabled and undetached"
        )


def is_low(terms: Terms) -> bool:
    """Whether a share would be rounded to the dtype of a term."""
    return any(term.dtype in LOW for term in terms)


def _values_of(losses: Sequence[Tensor]) -> list[Any]:
    """The values without the graph: plain numbers on the CPU, elsewhere tensors, since nothing is waited for.

    Those are copies: a scalar may sit on the memory of all that it is the mean of (F.mse_loss in torch 2.13).
    """
    return [loss.item() if loss.is_cpu else loss.detach().reshape(()).clone() for loss in losses]
