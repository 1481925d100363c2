"""Forward and backward of one micro-batch, which add its share of the gradient to the sums of the window."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import LossError, OptionError
from ..core.weight import Terms, as_terms, check_terms
from . import batch as nest
from .distributed.ranks import Ranks
from .gradients import GradientBuffer
from .internals import ALONE, RUN_ENGINE, STORAGE_USERS
from .precision import LOW, Precision
from .transfer import Transfer
from .verify.time_major import TimeAxis
from .window import Shares

Loss = Callable[[Any, Any], Any]
_MAX_SEEDS = 64


class Backward:
    """Runs one micro-batch through the model, forward and backward.

        for micro_batch, weight in window:
            losses.append(backward(loss, micro_batch, weight, shares, buffer))

    stands for

            losses.append(loss(model, micro_batch))
            (losses[-1] * weight / total).backward()

    Args:
        model: What the loss is computed with.
        precision: Autocast and the GradScaler.
        ranks: The ranks that train the model.
        transfer: Brings a batch to the device.
        time_axis: Looks whether the batch was cut along time.
    """

    def __init__(
        self, model: nn.Module, precision: Precision, ranks: Ranks, transfer: Transfer | None, time_axis: TimeAxis
    ) -> None:
        self._model = model
        self.precision = precision
        self._ranks = ranks
        self._transfer = transfer
        self._time_axis = time_axis
        self._seeds: dict[Any, Tensor] = {}
        """What backward passes started from: most micro-batches count the same."""

    def __call__(
        self, loss: Loss, micro_batch: Any, weight: Terms, shares: Shares, buffer: GradientBuffer
    ) -> list[Any]:
        """Adds the gradient of one micro-batch; returns its losses, and keeps nothing else.

        Args:
            loss: `loss(model, micro_batch)`.
            micro_batch: One part of the batch.
            weight: What it counts, term by term.
            shares: By weight, what a loss is multiplied by.
            buffer: What the gradient is added to.
        """
        if buffer.is_in_grad:
            buffer.take()
        if self._time_axis.is_watching:
            loss = self._time_axis.watched(loss)
        terms = self.forward(loss, micro_batch)
        check_loss(terms, len(weight))
        if self._ranks.is_shared:
            self._ranks.check_loss_dtype(is_low=is_low(terms))
        scaled = self.scaled(shares[weight])
        if is_low(terms):
            for t, term in enumerate(terms):
                self.add(term, scaled[t], buffer, in_units=True, keep_graph=t < len(terms) - 1)
        else:
            buffer.put()
            self.run(terms, scaled)
            buffer.take()
        return values_of(terms)

    def add(self, term: Tensor, share: Any, buffer: GradientBuffer, *, in_units: bool, keep_graph: bool) -> None:
        """Adds the gradient of one term.

        Args:
            term: A term of the loss, with its graph.
            share: What it is multiplied by.
            buffer: What the gradient is added to.
            in_units: Whether the share becomes the unit of the sums, where nothing is rounded, and not a factor of the
                loss.
            keep_graph: Whether another backward pass through the same graph follows.
        """
        if isinstance(share, Tensor) or share:
            buffer.put(share if in_units else 1.0)
            self.run((term,), (1.0 if in_units else share,), keep_graph=keep_graph)
            buffer.take()

    def add_nothing(self, loss: Loss, buffer: GradientBuffer) -> None:
        """Runs the model because ranks that have more micro-batches do; the result counts zero."""
        with self._ranks.buffers_kept():
            spare = nest.map_tensors(Tensor.clone, self._ranks.spare)  # a loss may write into it
            terms = self.forward(loss, spare if self._transfer is None else self._transfer.brought(spare))
            buffer.put()
            self.run(terms, tuple(torch.zeros_like(term) for term in terms))
            buffer.take()  # with what other ranks have added

    def scaled(self, shares: Terms) -> Terms:
        """Shares times what ranks divide gradients by when they reduce them."""
        return times(shares, self._ranks.divisor)

    def forward(self, loss: Loss, micro_batch: Any) -> Terms:
        """The loss of a micro-batch, term by term."""
        if self.precision.dtype is None:
            return as_terms(loss(self._model, micro_batch))
        with self.precision.autocast():
            return as_terms(loss(self._model, micro_batch))

    def run(self, terms: Terms, shares: Terms, *, keep_graph: bool = False) -> None:
        """Adds the gradient of sum_t share_t * term_t to .grad. A term with share 0 counts nothing.

        The share enters as the gradient that backward starts from, which saves the multiplication and its own backward
        pass. Backward passes belong outside of autocast.
        """
        counted, seeds = [], []
        for term, share in zip(terms, shares, strict=True):
            if term.requires_grad and (isinstance(share, Tensor) or share):
                counted.append(term)
                seeds.append(self.seed(share, term))
        if not counted:
            return
        if torch.is_autocast_enabled(self.precision.device):
            with torch.autocast(self.precision.device, enabled=False):
                _run_engine(counted, seeds, keep_graph=keep_graph)
        else:
            _run_engine(counted, seeds, keep_graph=keep_graph)

    def seed(self, share: Any, loss: Tensor) -> Tensor:
        """The gradient that a backward pass from this loss starts from."""
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


def _run_engine(losses: list[Tensor], seeds: list[Tensor], *, keep_graph: bool) -> None:
    """torch.autograd.backward; for plain tensors its last line alone, since seeds are known to fit their losses."""
    try:
        if RUN_ENGINE is None or set(map(type, losses)) != {Tensor}:
            torch.autograd.backward(losses, seeds, retain_graph=keep_graph)
        else:
            RUN_ENGINE(tuple(losses), tuple(seeds), keep_graph, False, (), allow_unreachable=True, accumulate_grad=True)
    except RuntimeError as error:
        if keep_graph and "donated buffers" in str(error):  # torch 2.13: its compiler lets a pass overwrite its inputs
            raise OptionError(
                "the backward pass of a compiled model cannot run once for each term of the loss: pass the batch or a "
                "window to step() and return the terms in float32, or set torch._functorch.config.donated_buffer = "
                "False before the model is compiled"
            ) from error
        raise


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


def values_of(losses: Terms) -> list[Any]:
    """The values without the graph: plain numbers on the CPU, elsewhere tensors, since nothing is waited for.

    Those are copies: a scalar may sit on the memory of all that it is the mean of (F.mse_loss in torch 2.13).
    """
    return [loss.item() if loss.is_cpu else loss.detach().reshape(()).clone() for loss in losses]


def times(terms: Terms, factor: float) -> Terms:
    """Every term multiplied by the same."""
    return terms if factor == 1 else tuple(term * factor for term in terms)
