"""A copy of the user's model, a batch, and the ways to take its gradient."""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..core.audit import Gradient, Loop
from ..core.diagnosis import Array
from ..core.errors import BigBatchWarning, OptionError
from ..core.weight import Reduction, Terms, as_terms, scales, totals
from ..core.window import Window, cuts
from . import nest
from .accumulator import Accumulator
from .checks import batch_norms
from .collection import leaves_of
from .passes import Loss
from .replay import Recording, Replay
from .weight import Weight, weigh


class Trial:
    """As core/audit.py wants it. Dropout is compared with the same masks wherever they can be cut like the batch."""

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        loss: Loss,
        micro_batch_size: int,
        weight: Weight | None,
        reduction: Reduction,
    ) -> None:
        self.model = model
        self.batch = batch
        self.loss = loss
        self.weight = weight
        self.reduction: Reduction = reduction
        self.batch_size = nest.batch_size(batch)
        self.micro_batches, self.sizes = nest.cut(batch, micro_batch_size)
        self.parts = cuts(self.batch_size, micro_batch_size)
        held = [*model.parameters(), *model.buffers(), *nest.tensors(batch)]  # a loss may change its batch in place
        self._held = [(t, t.detach().clone()) for t in held]
        self._replay: Replay | None = None
        self._notes: list[str] = []
        self._foreign: dict[Tensor, Tensor | None] = {}

    def full(self) -> Gradient:
        with Recording() as recording:
            gradient = self._gradient_of(self.batch)
        self._replay = Replay(recording.draws, self.batch_size) if recording.draws else None
        return gradient

    def accumulated(self) -> Gradient:
        self._reset()
        part_by_id = {id(m): part for m, part in zip(self.micro_batches, self.parts, strict=True)}
        replay = self._replay

        def loss(model: nn.Module, micro_batch: Any) -> Any:
            if replay is not None:
                replay.start(part_by_id[id(micro_batch)])
            return self.loss(model, micro_batch)

        seen: dict[str, Array] = {}
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        optimizer.register_step_pre_hook(lambda *_: seen.update(self._taken()))
        with replay or nullcontext(), warnings.catch_warnings():
            warnings.simplefilter("ignore", BigBatchWarning)  # what there is to say will be a cause
            accumulator = Accumulator(self.model, optimizer, loss, weight=self.weight, reduction=self.reduction)
            is_applied = accumulator.step(Window(self.micro_batches)).is_applied
        if replay is not None:
            self._notes = [about_randomness(self.model, replay.is_faithful)]
        if not is_applied:  # not finite, so it was kept from the optimizer
            return {name: np.full(tuple(p.shape), np.nan) for name, p in self.model.named_parameters()}
        return seen

    def micro(self, number: int) -> Gradient:
        return self._gradient_of(self.micro_batches[number])

    def by_loop(self, loop: Loop) -> tuple[Gradient, Gradient]:
        self._reset()
        loop(self.model, list(self.micro_batches))
        first = self._taken()
        self._restore()
        loop(self.model, list(self.micro_batches))
        return first, self._taken()

    def right_scales(self) -> Array:
        weights: list[Terms] = [(size,) for size in self.sizes]
        if self.weight is not None:
            weights = weigh(self.micro_batches, self.weight)
        total = totals(weights)
        return np.array([scales(w, total, self.reduction) for w in weights])

    def notes(self) -> list[str]:
        return list(self._notes)

    def layer_causes(self) -> list[str]:
        if not (names := batch_norms(self.model)):
            return []
        return [
            f"BatchNorm in training mode ({', '.join(names)}) normalises by the micro-batch instead of the batch: "
            "put it into eval mode, or use GroupNorm or LayerNorm"
        ]

    @contextmanager
    def quiet(self) -> Iterator[None]:
        with in_eval(list(self.model.modules())):
            yield

    @contextmanager
    def without_dropout(self) -> Iterator[None]:
        """All but BatchNorm goes into eval mode: dropout hides in attention and recurrent layers too."""
        if self._replay is None:
            yield
            return
        self._notes = ["dropout was switched off for the comparison, since a foreign loop draws masks of its own"]
        with in_eval([m for m in self.model.modules() if not isinstance(m, _BatchNorm)]):
            yield

    def _gradient_of(self, batch: Any) -> Gradient:
        self._reset()
        total = torch.stack([term.reshape(()) for term in as_terms(self.loss(self.model, batch))]).sum()
        self._keep_foreign(total)
        total.backward()
        return self._taken()

    def _keep_foreign(self, loss: Tensor) -> None:
        """Remembers the gradients of what the loss brought along: parameters of its own, or of another model."""
        own = set(self.model.parameters())
        for leaf in leaves_of(loss):
            if leaf not in own and leaf not in self._foreign:
                self._foreign[leaf] = leaf.grad

    def give_back(self) -> None:
        """The gradients of what is not ours as they were."""
        for leaf, gradient in self._foreign.items():
            leaf.grad = gradient

    def _taken(self) -> dict[str, Array]:
        return {
            name: (p.grad.to_dense() if p.grad.is_sparse else p.grad).detach().cpu().numpy().copy()
            for name, p in self.model.named_parameters()
            if p.grad is not None
        }

    def _reset(self) -> None:
        self._restore()
        self.model.zero_grad(set_to_none=True)

    def _restore(self) -> None:
        """Buffers as they were: a BatchNorm's running statistics move with every pass."""
        with torch.no_grad():
            for tensor, value in self._held:
                tensor.copy_(value)


def about_randomness(model: nn.Module, is_faithful: bool) -> str:
    names = [name for name, module in model.named_modules() if is_dropout(module) and module.training]
    where = f"dropout ({', '.join(names)})" if names else "dropout or other random numbers"
    if is_faithful:
        return (
            f"{where}: compared with the same masks; in training each micro-batch draws its own, "
            "which is as good a draw as the full batch's but not the same"
        )
    return f"{where}: the draws could not be cut like the batch, so the masks differ; compare in eval mode"


def is_dropout(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.dropout._DropoutNd)


@contextmanager
def in_eval(modules: list[nn.Module]) -> Iterator[None]:
    before = [module.training for module in modules]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module, training in zip(modules, before, strict=True):
            module.training = training


def copied(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper: compile nothing for a check
    model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model  # this rank's own
    try:
        twin = copy.deepcopy(model)
    except (RuntimeError, TypeError) as error:
        raise OptionError(f"the model cannot be copied, which verify() needs: {error}") from error
    for tensor in [*twin.parameters(), *twin.buffers()]:
        tensor.data = cast_to(tensor.data, dtype)
    return twin


def cast_to(batch: Any, dtype: torch.dtype) -> Any:
    """A copy, as precise as that."""

    def cast(tensor: Tensor) -> Tensor:
        wanted = dtype if tensor.is_floating_point() else tensor.dtype
        if tensor.is_complex():
            wanted = torch.promote_types(dtype, torch.complex64)
        return tensor.detach().to(wanted, copy=True).requires_grad_(tensor.requires_grad)

    return nest.map_tensors(cast, batch)
