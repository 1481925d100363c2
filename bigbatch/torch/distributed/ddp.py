"""DistributedDataParallel: every rank has the whole model, and DDP itself reduces gradients, once a window."""

import functools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...core.errors import GradientError, LossError, OptionError, OrderError
from ...core.weight import Terms
from .. import internals
from ..gradients import GradientBuffer, Gradients
from .other_models import Others
from .ranks import SeveralRanks, check_group
from .totals import GetTotals, LocalCounts, Totals

_NOT_ALL_USED = (
    "DistributedDataParallel cannot reduce the gradients of a window that used only some of the parameters: "
    "make it with find_unused_parameters=True"
)


class DataParallel(SeveralRanks):
    """Runs every pass but the last of a window inside of `no_sync`.

        with model.no_sync():
            for micro_batch in window[:-1]:
                backward(micro_batch)
        backward(window[-1])    # DDP reduces one bucket while the backward pass works on the next

    A rank without a last pass, because it has no data or feeds micro-batches one at a time, makes a pass that adds
    zero, so that all ranks reduce the same buckets in the same order.
    """

    def __init__(self, model: DistributedDataParallel, gradients: Gradients, group: dist.ProcessGroup | None) -> None:
        check_group(group, model.process_group)
        super().__init__(model, model.process_group, next(model.parameters()).device)
        self._model = model
        self._reduced = {
            p
            for name, p in model.module.named_parameters()
            if p.requires_grad and name not in model.parameters_to_ignore
        }
        embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
        self._sparse: set[Tensor] = {m.weight for m in embeddings if m.sparse}
        """The parameters whose gradients DDP expects to be sparse."""
        self._used: list[Tensor] = []
        """A parameter that had a gradient in the last window."""
        self._others = Others(model)
        self._is_overlapping = False
        self._is_waiting = False
        """Whether DDP will reduce in the next backward pass, ours or the user's."""
        self._has_failed = False
        self._has_forgotten = False
        self._check_model(gradients)
        gradients.ddp_model = model if model.gradient_as_bucket_view else None
        noting = weakref.WeakMethod(self._note_pass)
        handle = model.register_forward_hook(lambda *_: note() if (note := noting()) else None)
        weakref.finalize(self, handle.remove)

    # --- checks ------------------------------------------------------------------------------------------

    def _check_model(self, gradients: Gradients) -> None:
        if self._model.static_graph:
            raise OptionError(
                "DistributedDataParallel with static_graph=True stops reducing gradients once micro-batches are "
                "accumulated (pytorch#143580): make it without static_graph"
            )
        num_made_with = internals.ddp_num_parameters(self._model, len(self._reduced))
        if num_made_with != len(self._reduced):
            raise OptionError(
                f"DistributedDataParallel was made when {num_made_with} parameters were trainable, now "
                f"{len(self._reduced)} are, and it reduces only those: make it again"
            )
        if wide := [p for p in self._reduced if gradients.is_widened(p)]:
            raise OptionError(
                f"DistributedDataParallel reduces the gradients of {len(wide)} parameters in their own dtype, which is "
                f"{wide[0].dtype}, but they are to add up in {gradients.wide_dtype(wide[0])}: leave accumulate_dtype "
                'out and keep parameters in float32 with precision="bf16", or use fully_shard'
            )

    def check(self, gradients: Gradients, weights: Sequence[Terms] = ()) -> None:
        super().check(gradients, weights)
        if not self._model.require_backward_grad_sync:
            raise OrderError("the step is inside of model.no_sync(), so nothing would be reduced: leave it out")
        if internals.ddp_is_joining(self._model):
            raise OrderError("the step is inside of model.join(): leave it out and call flush() after the last batch")

    # --- a pass that was never finished ------------------------------------------------------------------

    def _note_pass(self) -> None:
        """Called after DDP's forward pass, which makes the next backward pass reduce."""
        self._is_waiting |= self._model.require_backward_grad_sync and torch.is_grad_enabled()
        self._model.require_forward_param_sync = False  # buffers are broadcast once a window

    def _forget(self) -> None:
        """Resets DDP after a pass without a backward pass, or a window that failed: it would reduce a micro-batch."""
        if self._is_waiting or self._has_failed:
            self._reset()
            self._has_forgotten = True

    def _reset(self) -> None:
        internals.ddp_reset(self._model)
        self._is_waiting = self._has_failed = False

    def agree(self, counts: LocalCounts) -> GetTotals:
        """If one rank has reset DDP, all do: its buckets are rebuilt, in which all ranks take part."""
        self._forget()
        get_totals = super().agree(counts._replace(is_unfinished=self._has_forgotten))

        @functools.cache
        def then() -> Totals:
            totals = get_totals()
            if totals.is_unfinished:
                self._reset()
                self._has_forgotten = False
            return totals

        return then

    def sync_ranks(self, weight: Terms) -> Terms:
        self._forget()
        return ()

    def drop(self) -> None:
        self._has_failed = True

    # --- passes ------------------------------------------------------------------------------------------

    def is_last(self, number: int, num_own: int, get_totals: GetTotals, *, has_all_terms: bool) -> bool:
        is_last = number == num_own - 1 and self._is_overlapping and has_all_terms
        if is_last:
            get_totals()  # if DDP is to be reset, then before the pass that reduces
        return is_last

    def check_loss_dtype(self, *, is_low: bool) -> None:
        """A loss in low precision gets its weight after the backward pass, so that pass must not reduce."""
        if is_low and self._is_waiting:
            raise LossError(
                "the loss of this window's last micro-batch is in low precision but that of those before is not: "
                "return all of them in one dtype, for example loss.float()"
            )
        self._is_overlapping = not is_low

    @contextmanager
    def passing(self, *, is_last: bool) -> Iterator[None]:
        self._model.require_forward_param_sync = is_last
        with self._others.kept_local(), self._reducing() if is_last else self._model.no_sync():
            yield

    @contextmanager
    def _reducing(self) -> Iterator[None]:
        yield
        if self._is_waiting:  # else the loss went around DDP, to its module
            self._finish()

    def _finish(self) -> None:
        """After the pass that reduces."""
        try:
            internals.ddp_rebuild_buckets(self._model)
        except RuntimeError as error:
            raise GradientError(_NOT_ALL_USED) from error
        self._is_reduced, self._is_waiting = True, False

    def complete(self, buffer: GradientBuffer, *, has_all_terms: bool = True) -> None:
        if not self._is_reduced:
            self._reduce_with_zeros(buffer, has_all_terms=has_all_terms)
        self._used = [p for p in buffer.parameters if p.grad is not None][:1]

    def _reduce_with_zeros(self, buffer: GradientBuffer, *, has_all_terms: bool) -> None:
        """Makes DDP reduce what is in .grad, by a backward pass that adds zeros."""
        held = [p for p in buffer.parameters if p in self._reduced]
        used = [p for p in held if p.grad is not None]
        parameters: list[Tensor] = [p for p in self._model.parameters() if p in self._reduced]
        if self._model.find_unused_parameters:  # a parameter without a gradient on any rank keeps none
            parameters = used or self._used or parameters[-1:]
        elif has_all_terms and used and len(used) < len(held):
            raise GradientError(_NOT_ALL_USED)
        module = self._model.module
        self._model.module = _ZeroModel(parameters, self._sparse, dict(module.named_buffers()))
        self._model.require_forward_param_sync = True
        try:
            with torch.enable_grad():
                self._model(None).backward()  # with device_ids, DDP wants an argument to move
        finally:
            self._model.module = module
        self._finish()


class _ZeroModel(nn.Module):
    """Stands in for the model: its output is 0, and so is every gradient. DDP broadcasts the model's buffers."""

    def __init__(self, parameters: list[Tensor], sparse: set[Tensor], buffers: dict[str, Tensor]) -> None:
        super().__init__()
        self._used = parameters
        self._sparse = sparse
        self._of_model = buffers

    def named_buffers(self, *_: Any, **__: Any) -> Iterator[tuple[str, Tensor]]:
        yield from self._of_model.items()

    def forward(self, _: None) -> Tensor:
        # The last layer first, as in a real backward pass: DDP fills its buckets in the order that it observes
        zero: Tensor = _ZeroGradients.apply(self._sparse, *reversed(self._used))
        return zero


class _ZeroGradients(torch.autograd.Function):
    """0, whose gradient for each parameter is zeros that take no memory."""

    @staticmethod
    def forward(ctx: Any, sparse: set[Tensor], *parameters: Tensor) -> Tensor:
        ctx.parameters, ctx.sparse = parameters, sparse
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return None, *(_zero(p, is_sparse=p in ctx.sparse) for p in ctx.parameters)


def _zero(parameter: Tensor, *, is_sparse: bool) -> Tensor:
    """A gradient of zero that takes no memory."""
    if is_sparse:
        indices = torch.zeros(1, 0, dtype=torch.int64, device=parameter.device)
        values = parameter.new_zeros(0, *parameter.shape[1:])
        return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=True)
    return parameter.new_zeros(()).expand(parameter.shape)
