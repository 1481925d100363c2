"""The processes that train one model together, each on its part of the batch; here the one that is alone."""

from __future__ import annotations  # some builds of torch have no process groups

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler

from ...core.errors import OptionError, OrderError, RankError
from ...core.weight import Terms
from ..gradients import GradientBuffer, Gradients
from ..window import fetch_weighted, weighted_now
from .totals import Agreed, LocalCounts, Totals, exchange

Reduce = Literal["window", "micro_batch"]


class Ranks:
    """A model that one process trains alone, and what is asked of one that several share.

    A step goes like this on every rank, with or without data of its own:

        with ranks.raise_on_all_ranks():                        # what is refused here is refused on all ranks
            ranks.check(…)
        agreed = ranks.agree(share)                  # a small reduction, waited for when it is needed
        with ranks.passing(is_last=…):               # around forward and backward of every micro-batch
            …
        ranks.complete(buffer)                   # what was collected is now that of all ranks
    """

    is_shared = False
    size = 1
    rank = 0
    divisor = 1.0
    """What the gradients of all ranks are divided by when they are reduced."""
    is_sharded = False
    holds_gradients = False
    """Whether micro-batches leave their gradients inside of the model until the window ends."""
    spare: Any = None
    """Something to go through the model with, for a rank that has nothing itself."""
    _nothing: AbstractContextManager[None] = nullcontext()

    def agree(self, share: LocalCounts) -> Agreed:
        """Starts the exchange of the counts; what it returns waits for the totals, if they have not come yet."""
        totals = Totals(
            share.total or (0,),
            (share.num_passes,),
            share.num_micro_batches,
            share.is_ending,
            num_hooks=(share.num_hooks,),
        )
        return lambda: totals

    def raise_on_all_ranks(self) -> AbstractContextManager[None]:
        """Around what may refuse its input before the ranks agree: the others hear of it."""
        return self._nothing

    def raise_on_all_ranks_before_sync(self) -> AbstractContextManager[None]:
        """The same around what comes before `sync_ranks`, where ranks meet."""
        return self._nothing

    def check(self, gradients: Gradients, weights: Sequence[Terms] = ()) -> None:
        """Refuses what could not be reduced over ranks."""

    def begin(self, micro_batches: Sequence[Any], agreed: Agreed) -> None:
        """Before the first pass of a window that is at hand."""

    def window(self) -> AbstractContextManager[None]:
        """Around all passes: if anything is raised, nothing is left of them inside of the model."""
        return self._nothing

    def num_passes(self, agreed: Agreed) -> int:
        """How many times this rank has to go through the model at least."""
        return 0

    def is_last(self, number: int, num_own: int, agreed: Agreed, *, is_whole: bool = True) -> bool:
        """Whether gradients are reduced in the pass of this number; `is_whole` if no term counts zero in it."""
        return False

    def passing(self, *, is_last: bool) -> AbstractContextManager[None]:
        return self._nothing

    def check_loss_dtype(self, *, is_low: bool) -> None:
        """Between forward and backward: a loss in low precision gets its weight after its backward pass."""

    def complete(self, buffer: GradientBuffer, *, is_whole: bool = True) -> None:
        """Reduces the gradients if no pass has; `is_whole` if no pass of this rank left out a term."""

    def drop(self) -> None:
        """After an error: forgets what is inside of the model of a window that nobody will finish."""

    def buffers_kept(self) -> AbstractContextManager[None]:
        """Around a pass that must not show in running statistics."""
        return self._nothing

    def sync_ranks(self, weight: Terms) -> Terms:
        """Before a micro-batch that is fed by itself; what weights are measured by, if ranks must have it in common."""
        return ()

    def check_in_sync(self, totals: Totals, *, has_window: bool) -> None:
        """Refuses to end a window that other ranks go on with, if all must feed equally many micro-batches."""

    def check_saving(self, num_micro_batches: int) -> None:
        """Refuses to save a window whose gradients cannot be had."""

    def sum_losses(self, losses: Sequence[Sequence[Any]], by: list[Terms], num_terms: int) -> Callable[[], Terms]:
        """The loss of the whole batch; fetched when somebody asks."""
        return fetch_weighted(losses, by)

    def check_hooks(self, num_hooks: tuple[int, ...], *, has_changed: bool) -> None:
        """Refuses hooks that change the gradient on some ranks and are not there on others; reading it is fine."""

    def agree_on_overflow(self, scaler: GradScaler | None, optimizer: torch.optim.Optimizer) -> None:
        """Where each rank has seen only a part of the gradient."""


class Shared(Ranks):
    """A model that the ranks of a process group train together."""

    is_shared = True

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self._has_sync_batch_norm = any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.divisor = float(self.size)
        self._device = device
        self._is_reduced = False
        self._reduced: set[Tensor] = set()
        """The parameters whose gradients are reduced."""
        # Numbers travel over the host: no rank waits for a device to know how much there is
        has_host = "cpu" in dist.get_backend_config(group)
        self._host_group = group if has_host else _host_group(group)

    def agree(self, share: LocalCounts) -> Agreed:
        self._is_reduced = False
        return exchange(share, self._host_group)

    def begin(self, micro_batches: Sequence[Any], agreed: Agreed) -> None:
        if self._has_sync_batch_norm and len(set(agreed().num_passes)) > 1:
            raise OrderError(
                f"ranks have {min(agreed().num_passes)} to {max(agreed().num_passes)} micro-batches but SyncBatchNorm "
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
        held = gradients.parameters
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

    def sum_losses(self, losses: Sequence[Sequence[Any]], by: list[Terms], num_terms: int) -> Callable[[], Terms]:
        """Every rank takes part, so it starts at once, whether or not somebody will ask."""
        sums = weighted_now(losses, by, num_terms, self._device)
        work = dist.all_reduce(sums, group=self.group, async_op=True)

        def fetch() -> Terms:
            work.wait()
            return tuple(sums.tolist())

        return fetch


def _host_group(group: dist.ProcessGroup) -> Any:
    return dist.new_group(dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True)


def check_group(group: dist.ProcessGroup | None, own: dist.ProcessGroup) -> None:
    """Refuses a group of other ranks than those that reduce the model's gradients."""
    if group is None or group is own:
        return
    given, wanted = map(dist.get_process_group_ranks, (group, own))
    if given != wanted:
        raise OptionError(
            f"group has {len(given)} ranks but the model's gradients are reduced over {len(wanted)}: "
            "leave group out, or give the model the same group"
        )
