"""DistributedDataParallel: every rank has the whole model; gradients are reduced once a window, by DDP itself."""

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
from ..gradient_buffer import Collection
from ..gradients import Gradients
from .other_models import Others
from .ranks import Shared, check_group
from .totals import Agreed, Agreement, Share

NOT_ALL_USED = (
    "DistributedDataParallel cannot reduce the gradients of a window that used only some of the parameters: "
    "make it with find_unused_parameters=True"
)


class DataParallel(Shared):
    """All passes but one are inside of `no_sync`.

    The one is the last of the window, so that DDP reduces one bucket while the backward pass works on the next. A rank
    without a last pass (it has no data, or its window was fed one micro-batch at a time) makes a pass that adds
    nothing: all ranks then reduce the same buckets in the same order.
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
        self._sparse = sparse_parameters(model)
        self._used: list[Tensor] = []
        """A parameter that had a gradient in the window before."""
        self._others = Others(model)
        self._is_overlapping = False
        self._is_waiting = False
        """Whether DDP would reduce in the next backward pass."""
        self._has_failed = False
        self._has_forgotten = False
        self._check_model(gradients)
        gradients.holder = model if model.gradient_as_bucket_view else None
        noting = weakref.WeakMethod(self._note_pass)
        handle = model.register_forward_hook(lambda *_: note() if (note := noting()) else None)
        weakref.finalize(self, handle.remove)

    # --- what is refused ---------------------------------------------------------------------------------

    def _check_model(self, gradients: Gradients) -> None:
        if self._model.static_graph:
            raise OptionError(
                "DistributedDataParallel with static_graph=True stops reducing gradients once micro-batches are "
                "accumulated (pytorch#143580): make it without static_graph"
            )
        num_made_with = self._model._get_ddp_logging_data().get("num_parameter_tensors", len(self._reduced))
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
        if self._model._join_config.enable:
            raise OrderError("the step is inside of model.join(): leave it out and call flush() after the last batch")

    # --- what DDP may still be waiting for ---------------------------------------------------------------

    def _note_pass(self) -> None:
        """After DDP's forward pass: the next backward pass, whosever it is, will reduce."""
        self._is_waiting |= self._model.require_backward_grad_sync and torch.is_grad_enabled()
        self._model.require_forward_param_sync = False  # buffers travel once a window, with the gradients

    def _forget(self) -> None:
        """Of a pass that never had its backward pass, or of a window that failed: DDP would reduce micro-batches."""
        if self._is_waiting or self._has_failed:
            self._reset()
            self._has_forgotten = True

    def _reset(self) -> None:
        self._model.reducer._reset_state()
        if (used := self._model.reducer._get_local_used_map()) is not None:
            used.zero_()
        self._is_waiting = self._has_failed = False

    def agree(self, share: Share) -> Agreed:
        """What one rank has forgotten, all do: its buckets are made anew, which takes all of them."""
        self._forget()
        agreed = super().agree(share._replace(is_unfinished=self._has_forgotten))

        @functools.cache
        def then() -> Agreement:
            agreement = agreed()
            if agreement.is_unfinished:
                self._reset()
                self._has_forgotten = False
            return agreement

        return then

    def meet(self, weight: Terms) -> Terms:
        self._forget()
        return ()

    def drop(self) -> None:
        self._has_failed = True

    # --- passes ------------------------------------------------------------------------------------------

    def is_last(self, number: int, num_own: int, agreed: Agreed, *, is_whole: bool = True) -> bool:
        is_last = number == num_own - 1 and self._is_overlapping and is_whole
        if is_last:
            agreed()  # what it forgets must be forgotten before the pass that reduces
        return is_last

    def see_loss(self, *, is_low: bool) -> None:
        """One in low precision cannot be the one that reduces: its weight would come too late."""
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
        """After the pass that reduces. DDP rebuilds its buckets before its next pass, which one rank may make alone."""
        try:
            self._model.reducer._rebuild_buckets()
        except RuntimeError as error:
            raise GradientError(NOT_ALL_USED) from error
        self._is_reduced, self._is_waiting = True, False

    def complete(self, collection: Collection, *, is_whole: bool = True) -> None:
        if not self._is_reduced:
            self._add_nothing(collection, is_whole=is_whole)
        self._used = [p for p in collection.parameters if p.grad is not None][:1]

    def _add_nothing(self, collection: Collection, *, is_whole: bool) -> None:
        collection.in_units_of(1.0)
        held = [p for p in collection.parameters if p in self._reduced]
        used = [p for p in held if p.grad is not None]
        parameters: list[Tensor] = [p for p in self._model.parameters() if p in self._reduced]
        if self._model.find_unused_parameters:  # what has no gradient on any rank keeps none
            parameters = used or self._used or parameters[-1:]
        elif is_whole and used and len(used) < len(held):
            raise GradientError(NOT_ALL_USED)
        module = self._model.module
        self._model.module = AddsNothing(parameters, self._sparse, dict(module.named_buffers()))
        self._model.require_forward_param_sync = True
        try:
            with torch.enable_grad():
                self._model(None).backward()  # with device_ids, DDP wants something to bring to the device
        finally:
            self._model.module = module
        self._finish()


class AddsNothing(nn.Module):
    """Uses the parameters and adds zero to their gradients. Its buffers are the model's, which DDP broadcasts."""

    def __init__(self, parameters: list[Tensor], sparse: set[Tensor], buffers: dict[str, Tensor]) -> None:
        super().__init__()
        self._used = parameters
        self._sparse = sparse
        self._of_model = buffers

    def named_buffers(self, *_: Any, **__: Any) -> Iterator[tuple[str, Tensor]]:
        yield from self._of_model.items()

    def forward(self, _: None) -> Tensor:
        # The last layer first, as in a real backward pass: DDP fills its buckets in the order that it sees
        zero: Tensor = _Nothing.apply(self._sparse, *reversed(self._used))
        return zero


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sparse: set[Tensor], *parameters: Tensor) -> Tensor:
        ctx.parameters, ctx.sparse = parameters, sparse
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return None, *(nothing(p, is_sparse=p in ctx.sparse) for p in ctx.parameters)


def nothing(parameter: Tensor, *, is_sparse: bool) -> Tensor:
    """A gradient of zero that takes no memory."""
    if is_sparse:
        indices = torch.zeros(1, 0, dtype=torch.int64, device=parameter.device)
        values = parameter.new_zeros(0, *parameter.shape[1:])
        return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=True)
    return parameter.new_zeros(()).expand(parameter.shape)


def sparse_parameters(model: nn.Module) -> set[Tensor]:
    """Those whose gradients DDP expects to be sparse."""
    return {m.weight for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse}
