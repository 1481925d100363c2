"""DistributedDataParallel: every rank has the whole model; gradients are reduced once a window, by DDP itself."""

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..core.errors import GradientError, LossError, OptionError, OrderError
from .agreement import Agreed, Agreement, Share
from .gradients import Collection, Gradients
from .replicas import Shared, check_group

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
        self._sparse = sparse_parameters(model)
        self._is_overlapping = False
        self._is_waiting = False
        model.register_forward_hook(self._note_pass)
        self._check()
        if wide := [p for p in model.parameters() if p.requires_grad and gradients.is_widened(p)]:
            raise OptionError(
                f"{len(wide)} parameters of the DistributedDataParallel model are {wide[0].dtype}, in which it would "
                'also reduce their gradients: keep them in float32 and pass precision="bf16", or use fully_shard with '
                "MixedPrecisionPolicy(reduce_dtype=torch.float32)"
            )

    def _check(self) -> None:
        if self._model.static_graph:
            raise OptionError(
                "DistributedDataParallel with static_graph=True stops reducing gradients once micro-batches are "
                "accumulated (pytorch#143580): make it without static_graph"
            )
        if not self._model.require_backward_grad_sync:
            raise OrderError("the step is inside of model.no_sync(), so nothing would be reduced: leave it out")
        if self._model._join_config.enable:
            raise OrderError("the step is inside of model.join(): leave it out and call flush() after the last batch")

    def _note_pass(self, *_: Any) -> None:
        """After DDP's forward pass: the next backward pass, whosever it is, will reduce."""
        self._is_waiting |= self._model.require_backward_grad_sync and torch.is_grad_enabled()

    def agree(self, share: Share) -> Agreed:
        """If a rank's DDP waits for a backward pass that never came, all forget it: micro-batches would be reduced."""
        agreed = super().agree(replace(share, is_unfinished=self._is_waiting))

        @functools.cache
        def then() -> Agreement:
            agreement = agreed()
            if agreement.is_unfinished:
                self._model.reducer._reset_state()
                self._is_waiting = False
            return agreement

        return then

    def is_last(self, number: int, num_own: int, agreed: Agreed) -> bool:
        if number == 0:
            self._check()
        is_last = number == num_own - 1 and self._is_overlapping
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

    def passing(self, *, is_last: bool) -> AbstractContextManager[None]:
        return self._reducing() if is_last else self._model.no_sync()

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

    def complete(self, collection: Collection) -> None:
        if self._is_reduced:
            return
        self._check()
        collection.in_units_of(1.0)
        parameters: list[Tensor] = [p for p in self._model.parameters() if p.requires_grad]
        used = [p for p in parameters if p.grad is not None]
        if self._model.find_unused_parameters:  # what has no gradient on any rank keeps none
            parameters = used or parameters[:1]
        elif used and len(used) < len(parameters):
            raise GradientError(NOT_ALL_USED)
        module = self._model.module
        self._model.module = AddsNothing(parameters, self._sparse, dict(module.named_buffers()))
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
        return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)
    return parameter.new_zeros(()).expand(parameter.shape)


def sparse_parameters(model: nn.Module) -> set[Tensor]:
    """Those whose gradients DDP expects to be sparse."""
    return {m.weight for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse}


def wrapped(model: nn.Module) -> DistributedDataParallel | None:
    """The DDP module that this model is, compiled or not."""
    model = getattr(model, "_orig_mod", model)
    return model if isinstance(model, DistributedDataParallel) else None
