"""fully_shard (FSDP2): every rank has a part of each parameter; gradients are reduced once a window or in each pass."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ...core.errors import LossError, OptionError, OrderError, WeightError
from ...core.weight import Terms, from_terms
from .. import internals
from ..batch import map_tensors
from ..gradients import GradientBuffer, Gradients
from ..precision import LOW
from ..window import fetch_weights
from .other_models import Others
from .ranks import Reduce, SeveralRanks, check_group
from .shards import local
from .totals import GetTotals, LocalCounts, Totals

_REMEDY = (
    "keep parameters in float32 and pass fully_shard "
    "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"
)


class Sharded(SeveralRanks):
    """Reduces gradients in every pass, which leaves this rank's part of them, or once, in the last.

    Until that last pass, whole gradients stay inside of the model.

    Parameters are gathered in every pass, so all ranks make equally many passes: a rank that has fewer micro-batches
    runs a spare one that counts zero.
    """

    is_sharded = True

    def __init__(self, model: nn.Module, gradients: Gradients, group: dist.ProcessGroup | None, reduce: Reduce) -> None:
        self._model: Any = model
        self._groups = [g for m in model.modules() if isinstance(m, FSDPModule) for g in internals.fsdp_groups(m)]
        first = self._groups[0]
        mesh = first.mesh_info.mesh
        own = _group_of(mesh)
        check_group(group, own)
        super().__init__(model, own, first.device)
        self.keeps_whole_gradients = reduce == "window"
        self._others = Others(model)
        self._reduced = {p for p in model.parameters() if isinstance(p, DTensor)}
        self._check_model(model, gradients)

    # --- checks ------------------------------------------------------------------------------------------

    def _check_model(self, model: nn.Module, gradients: Gradients) -> None:
        trained = [p for p in model.parameters() if p.requires_grad]
        if plain := [p for p in trained if p not in self._reduced]:
            raise OptionError(
                f"{len(plain)} of {len(trained)} parameters ({gradients.name(plain[0])} first) are not sharded, so "
                "nobody would reduce their gradients: call fully_shard on the whole model too"
            )
        kept = [_dtype_of_sums(g, is_whole=self.keeps_whole_gradients) for g in self._groups]
        if low := [dtype for dtype in kept if dtype in LOW]:
            where = "inside of the model" if self.keeps_whole_gradients else "of its shards"
            raise OptionError(
                f"{len(low)} of {len(self._groups)} groups of parameters would add up gradients {where} in {low[0]}, "
                f"which loses low bits: {_REMEDY}"
            )
        if wide := [p for p in trained if gradients.is_widened(p)]:
            raise OptionError(
                f"{len(wide)} of {len(trained)} parameters are {wide[0].dtype}, which fully_shard keeps for their "
                f"gradients, but these are to add up in {gradients.wide_dtype(wide[0])}: leave accumulate_dtype out, "
                f"and {_REMEDY}"
            )

    def check(self, gradients: Gradients, weights: Sequence[Terms] = ()) -> None:
        super().check(gradients, weights)
        factors = {g.gradient_divide_factor for g in self._groups}
        if len(factors) > 1:
            raise OptionError(
                f"the gradients of {len(factors)} kinds of layers are divided by different numbers: call "
                "set_gradient_divide_factor with the same number on all of them, or on none"
            )
        self.divisor = float(factors.pop() or self.size)
        if partial := [weight for weight in weights if any(weight) and not all(weight)]:
            raise WeightError(
                f"a micro-batch has the weights {partial[0]}, but with fully_shard a rank cannot skip a term "
                "of weight zero: give every micro-batch a weight above 0 for each term, or use DistributedDataParallel"
            )

    # --- passes ------------------------------------------------------------------------------------------

    def begin(self, micro_batches: Sequence[Any], get_totals: GetTotals) -> None:
        """Gives ranks with fewer passes than others a spare micro-batch: their own, or one of another rank."""
        num_passes = get_totals().num_passes  # the first pass gathers parameters, in which all ranks take part
        super().begin(micro_batches, get_totals)
        self.spare = None
        if micro_batches and len(micro_batches) < max(num_passes):
            self.spare = map_tensors(Tensor.clone, micro_batches[0])
        if any(num_passes) and not all(num_passes):
            self._hand_out(micro_batches, num_passes.index(max(num_passes)))

    def _hand_out(self, micro_batches: Sequence[Any], source: int) -> None:
        """Sends a micro-batch of one rank to all, for those without data."""
        found = [map_tensors(Tensor.cpu, micro_batches[0]) if self.rank == source else None]
        dist.broadcast_object_list(found, dist.get_global_rank(self.group, source), self._host_group)
        if not micro_batches:
            self.spare = map_tensors(lambda tensor: tensor.to(self.device), found[0])

    def is_last(self, number: int, num_own: int, get_totals: GetTotals, *, has_all_terms: bool) -> bool:
        return number == max(get_totals().num_passes) - 1

    @contextmanager
    def passing(self, *, is_last: bool) -> Iterator[None]:
        self._set(is_last=is_last or not self.keeps_whole_gradients)
        try:
            with self._others.kept_local():
                yield
        finally:
            self._set(is_last=True)  # for passes that the user makes
        self._is_reduced |= is_last

    def _set(self, *, is_last: bool) -> None:
        self._model.set_requires_gradient_sync(is_last)
        self._model.set_is_last_backward(is_last)

    def check_loss_dtype(self, *, is_low: bool) -> None:
        if is_low:
            raise LossError(
                "the loss is in low precision, which would round the weights of micro-batches: "
                "return it in float32, for example loss.float()"
            )

    def complete(self, buffer: GradientBuffer, *, has_all_terms: bool = True) -> None:
        if self.keeps_whole_gradients and not self._is_reduced:
            internals.fsdp_reduce(self._model)
            self._is_reduced = True

    def drop(self) -> None:
        internals.fsdp_reset(self._model, self._groups)
        for group in self._groups:
            internals.fsdp_drop_gradients(group)

    @contextmanager
    def buffers_kept(self) -> Iterator[None]:
        before = [(buffer, internals.VERSION(buffer), buffer.clone()) for buffer in self._model.buffers()]
        yield
        for buffer, version, value in before:
            if internals.VERSION(buffer) != version:  # what did not change keeps its version: others compare it
                buffer.copy_(value)

    # --- one micro-batch at a time -----------------------------------------------------------------------

    def sync_ranks(self, weight: Terms) -> Terms:
        """Waits for the other ranks, which all take part in a pass; returns the reference for weights.

        All ranks need the same reference, since sums inside of the model cannot be rescaled.
        """
        if len(weight) > 1 and self.keeps_whole_gradients:
            raise OptionError(
                f'a loss of {len(weight)} terms cannot be fed one micro-batch at a time with reduce="window", which '
                'keeps one sum for all of them: pass reduce="micro_batch", or use step()'
            )
        with self.raise_on_all_ranks():
            own = fetch_weights([weight])[0]
            if not all(own):
                raise WeightError(
                    f"this micro-batch has the weight {from_terms(own)}. With fully_shard all ranks run each "
                    "micro-batch together, so one rank cannot skip it: leave it out on all ranks, or use step()"
                )
        totals = self.agree(LocalCounts(own, num_passes=1))()
        passes = totals.num_passes
        if not all(passes):
            raise OrderError(
                f"{passes.count(0)} of {self.size} ranks (rank {passes.index(0)} first) have "
                "no micro-batch while others do: with fully_shard give every rank equally many, or use step(), which "
                "does not need that"
            )
        return tuple(total / self.size for total in totals.total)

    def check_in_sync(self, totals: Totals, *, has_window: bool) -> None:
        if any(totals.num_passes) and (has_window or not totals.num_micro_batches):
            raise OrderError(
                f"rank {self.rank} ends its window while {sum(totals.num_passes)} of {self.size} ranks go on: with "
                "fully_shard give every rank equally many micro-batches, or use step(), which does not need that"
            )

    # --- one gradient in parts ---------------------------------------------------------------------------

    def agree_on_overflow(self, scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """Each rank has looked at its own part of the gradient: an overflow on one is one on all."""
        for found in internals.found_inf(scaler, optimizer):
            dist.all_reduce(local(found), dist.ReduceOp.MAX, group=self.group)


def _dtype_of_sums(group: Any, *, is_whole: bool) -> torch.dtype:
    """The dtype in which whole gradients are added up inside of the model, or a rank's parts of them outside."""
    own: torch.dtype = group.fsdp_params[0].sharded_param.dtype
    policy = group.mp_policy
    return policy.reduce_dtype or policy.param_dtype or own if is_whole else own


def _group_of(mesh: Any) -> Any:
    """All ranks of a device mesh."""
    if mesh.ndim > 1 and math.prod(mesh.shape) == dist.get_world_size():
        return dist.group.WORLD
    return (internals.flattened(mesh) if mesh.ndim > 1 else mesh).get_group()
