"""The ranks that train one model together, each on its part of the batch; or the one process that trains alone."""

from __future__ import annotations  # some builds of torch have no process groups

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler

from ...core.errors import OptionError, OrderError, RankError
from ...core.weight import Reduction, Terms, shares, weighted
from ..gradients import GradientBuffer, Gradients
from .totals import GetTotals, LocalCounts, Totals, exchange

Reduce = Literal["window", "micro_batch"]
_NOTHING: AbstractContextManager[None] = nullcontext()


class Ranks:
    """How the ranks that train a model work together. This class is for one process, which has nobody to wait for.

    `SeveralRanks` is the base of `DataParallel` (ddp.py) and `Sharded` (fsdp.py), which do the communication.

    A step, on every rank, with or without data of its own:

        with ranks.raise_on_all_ranks():                # checks of the input
            ranks.check(…)
        get_totals = ranks.agree(counts)                # a small all-reduce, waited for when the totals are needed
        with ranks.window():
            for micro_batch in window:
                with ranks.passing(is_last=…):
                    …                                   # forward and backward
            ranks.complete(buffer)                      # the sums are now those of all ranks

    Attributes:
        is_distributed: Whether several ranks train the model together.
        is_sharded: Whether each rank holds a part of each parameter; all then run the model equally often.
        keeps_whole_gradients: Whether micro-batches leave their gradients inside of the model until the window ends.
        divisor: What the gradients of all ranks are divided by when they are reduced.
        device: The device on which ranks reduce; None in one process.
        spare: A micro-batch of this step, for a rank that has to run the model after its own are done.
    """

    is_distributed = is_sharded = keeps_whole_gradients = False
    size, rank, divisor = 1, 0, 1.0
    device: torch.device | None = None
    spare: Any = None

    def agree(self, counts: LocalCounts) -> GetTotals:
        """Starts the exchange of the counts; returns a function that waits for the totals."""
        total, num_passes, num_micro_batches, is_ending, *_ = counts
        totals = Totals(total or (0,), (num_passes,), num_micro_batches, is_ending, num_hooks=(counts.num_hooks,))
        return lambda: totals

    def sum_losses(
        self, losses: Sequence[Sequence[Any]], weights: Sequence[Terms], total: Terms, reduction: Reduction
    ) -> Callable[[], Terms]:
        """Returns how to fetch the loss of the whole batch, term by term."""
        columns = _columns(losses)
        return lambda: _weighted(columns, [shares(weight, total, reduction) for weight in weights])

    def add_up_numbers(self, values: Sequence[Sequence[Any]], by: list[Terms], num_terms: int) -> Callable[[], Terms]:
        """Returns how to fetch the sums of numbers over micro-batches and ranks, each times its factor in `by`."""
        columns = _columns(values)
        return lambda: _weighted(columns, by)

    def add_up_tensor(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Starts to add up a tensor over all ranks; returns a function that waits for the sum."""
        return lambda: tensor

    def gathered(self, own: Any) -> list[Any]:
        """What each rank passes here, by rank."""
        return [own]

    def drop(self) -> None:
        """After an error: forgets the gradients inside of the model."""

    def check_in_sync(self, totals: Totals, *, has_window: bool) -> None:
        """Raises OrderError if this rank ends its window while others go on, and all must feed equally many."""

    def agree_on_overflow(self, scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """If each rank has unscaled a part of the gradient, makes an overflow on one of them one on all."""

    # --- if several ranks train the model together ------------------------------------------------------------

    def raise_on_all_ranks(self) -> AbstractContextManager[None]:
        """If an input check inside fails on this rank, raises on all ranks instead of hanging."""
        return _NOTHING

    def check(self, gradients: Gradients, weights: Sequence[Terms] = ()) -> None:
        """Raises if something could not be reduced over ranks."""

    def begin(self, micro_batches: Sequence[Any], get_totals: GetTotals) -> None:
        """Called before the first pass of `step()`."""

    def window(self) -> AbstractContextManager[None]:
        """Around all passes: after an error nothing is left of them inside of the model."""
        return _NOTHING

    def is_last(self, number: int, num_own: int, get_totals: GetTotals, *, has_all_terms: bool) -> bool:
        """Whether the pass with this number reduces the gradients; `has_all_terms` if no term is left out in it."""
        return False

    def passing(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one micro-batch."""
        return _NOTHING

    def check_loss_dtype(self, *, is_low: bool) -> None:
        """Between forward and backward: raises LossError if a loss in low precision cannot be weighed here."""

    def complete(self, buffer: GradientBuffer, *, has_all_terms: bool = True) -> None:
        """Reduces the gradients if no pass has; `has_all_terms` if no pass of this rank left out a term."""

    def buffers_kept(self) -> AbstractContextManager[None]:
        """Around a pass that must not change running statistics."""
        return _NOTHING

    def sum_over_ranks(self, tensor: Tensor) -> None:
        """Replaces a tensor by its sum over all ranks."""

    def largest(self, number: int) -> int:
        """The largest number that a rank passes here."""
        return number

    def sync_ranks(self, weight: Terms) -> Terms:
        """Before a micro-batch of `micro_batch()`; returns the reference for weights if all ranks need the same."""
        return ()

    def check_hooks(self, num_hooks: tuple[int, ...], *, has_changed: bool) -> None:
        """Raises RankError if hooks changed the gradient on some ranks that other ranks do not have."""

    def add_up(self, count: Callable[[], float]) -> float:
        """The sum of the counts of all ranks. If counting fails on this rank, raises on all of them."""
        return count()


class SeveralRanks(Ranks):
    """The ranks of a process group that train one model together: what DDP and fully_shard have in common."""

    is_distributed = True

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self._has_sync_batch_norm = any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.divisor = float(self.size)
        self.device: torch.device = device
        self._is_reduced = False
        self._reduced: set[Tensor] = set()
        """The parameters whose gradients are reduced."""
        # Counts are exchanged on the host, so that no rank waits for its device
        self._host_group: Any = group
        if "cpu" not in dist.get_backend_config(group):
            ranks = dist.get_process_group_ranks(group)
            self._host_group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)

    def agree(self, counts: LocalCounts) -> GetTotals:
        self._is_reduced = False
        return exchange(counts, self._host_group)

    def begin(self, micro_batches: Sequence[Any], get_totals: GetTotals) -> None:
        if self._has_sync_batch_norm and len(set(num_passes := get_totals().num_passes)) > 1:
            raise OrderError(
                f"ranks have {min(num_passes)} to {max(num_passes)} micro-batches but SyncBatchNorm "
                "makes each of them wait for the others in every one: give all ranks equally many"
            )

    @contextmanager
    def raise_on_all_ranks(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            with suppress(RankError):
                exchange(LocalCounts(has_failed=True), self._host_group)()
            raise

    @contextmanager
    def window(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.drop()
            raise

    def check(self, gradients: Gradients, weights: Sequence[Terms] = ()) -> None:
        held = gradients.parameters()
        if strange := [p for p in held if p.requires_grad and p not in self._reduced]:
            raise OptionError(
                f"the gradients of {len(strange)} of {len(held)} parameters that the optimizer holds "
                f"({gradients.name(strange[0])} first) are not reduced over ranks: have them in the model, trainable "
                "and not ignored, when it is wrapped"
            )
        gradients.check_empty()

    def check_hooks(self, num_hooks: tuple[int, ...], *, has_changed: bool) -> None:
        num_changed = exchange(LocalCounts(num_micro_batches=int(has_changed)), self._host_group)().num_micro_batches
        if num_changed:
            raise RankError(
                f"hooks of parameters changed the gradient on {num_changed} of {self.size} ranks, and ranks have "
                f"{min(num_hooks)} to {max(num_hooks)} of them, so their parameters would differ: register the same "
                "hooks on every rank"
            )

    def sum_over_ranks(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=self.group)

    def largest(self, number: int) -> int:
        return max(exchange(LocalCounts(num_passes=number), self._host_group)().num_passes)

    def add_up(self, count: Callable[[], float]) -> float:
        with self.raise_on_all_ranks():
            own = count()
        (total,) = exchange(LocalCounts((own,)), self._host_group)().total
        return float(total)

    def sum_losses(
        self, losses: Sequence[Sequence[Any]], weights: Sequence[Terms], total: Terms, reduction: Reduction
    ) -> Callable[[], Terms]:
        """All ranks take part, so the all-reduce starts at once, whether or not the loss is read."""
        return self.add_up_numbers(losses, [shares(weight, total, reduction) for weight in weights], len(total))

    def add_up_numbers(self, values: Sequence[Sequence[Any]], by: list[Terms], num_terms: int) -> Callable[[], Terms]:
        wait = self.add_up_tensor(_weighted_now(values, by, num_terms, self.device))
        return lambda: tuple(wait().tolist())

    def add_up_tensor(self, tensor: Tensor) -> Callable[[], Tensor]:
        work = dist.all_reduce(tensor, group=self.group, async_op=True)

        def wait() -> Tensor:
            work.wait()
            return tensor

        return wait

    def gathered(self, own: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, own, group=self._host_group)
        return found


def check_group(group: dist.ProcessGroup | None, own: dist.ProcessGroup) -> None:
    """Raises OptionError if the group has other ranks than those that reduce the model's gradients."""
    if group is None or group is own:
        return
    given, wanted = map(dist.get_process_group_ranks, (group, own))
    if given != wanted:
        raise OptionError(
            f"group has {len(given)} ranks but the model's gradients are reduced over {len(wanted)}: "
            "leave group out, or give the model the same group"
        )


def _columns(values: Sequence[Sequence[Any]]) -> list[Any]:
    """The values of all micro-batches, term by term; one tensor where they are on a device."""
    return [
        torch.stack(term) if all(isinstance(value, Tensor) for value in term) else term
        for term in zip(*values, strict=True)
    ]


def _weighted(columns: list[Any], by: list[Terms]) -> Terms:
    """The loss of the whole batch, fetched from the device."""
    fetched = [column.tolist() if isinstance(column, Tensor) else column for column in columns]
    return weighted(list(zip(*fetched, strict=True)), by)


def _weighted_now(losses: Sequence[Sequence[Any]], by: list[Terms], num_terms: int, device: torch.device) -> Tensor:
    """The loss of the whole batch as a tensor on the device, without waiting; zero if there are no losses."""
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
        if not all(isinstance(value, Tensor) for value in kept):  # a loaded window has numbers
            kept = tuple(torch.as_tensor(value, dtype=torch.float64, device=device) for value in kept)
        products = torch._foreach_mul(list(torch.stack(kept).double().unbind()), factors)  # takes plain numbers along
        sums.append(torch.stack(products).sum())
    return torch.stack(sums)
