"""A copy of the user's model, a batch, and the ways to take its gradient."""

import copy
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..core.diagnosis import Array
from ..core.errors import BigBatchWarning, OptionError
from ..core.verification import relative_error
from ..core.weight import Reduction, Terms, as_terms, scales, totals
from ..core.window import Window, cuts
from . import nest
from .accumulator import Accumulator, Loss
from .replay import Recording, Replay
from .weight import Weight, weigh

Gradient = dict[str, Tensor]  # by the parameter's name; a parameter without a gradient is not in it
Loop = Callable[[nn.Module, list[Any]], Any]


class Trial:
    """A copy of the model, a batch, and the ways to take its gradient."""

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
        self.state = copy.deepcopy(model.state_dict())

    def full(self) -> tuple[Gradient, list[Tensor | None]]:
        """The gradient of the whole batch, and the random numbers that were drawn for it."""
        with Recording() as recording:
            return self.gradient_of(self.batch), recording.draws

    def gradient_of(self, batch: Any) -> Gradient:
        self.reset()
        torch.stack(as_terms(self.loss(self.model, batch))).sum().backward()
        return self.taken()

    def accumulated(self, replay: Replay | None) -> Gradient:
        """What the accumulator hands to an optimizer."""
        self.reset()
        part_by_id = {id(m): part for m, part in zip(self.micro_batches, self.parts, strict=True)}

        def loss(model: nn.Module, micro_batch: Any) -> Any:
            if replay is not None:
                replay.start(part_by_id[id(micro_batch)])
            return self.loss(model, micro_batch)

        seen: Gradient = {}
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        optimizer.register_step_pre_hook(lambda *_: seen.update(self.taken()))
        accumulator = Accumulator(self.model, optimizer, loss, weight=self.weight, reduction=self.reduction)
        with replay or nullcontext(), warnings.catch_warnings():
            warnings.simplefilter("ignore", BigBatchWarning)  # what there is to say will be a cause
            is_applied = accumulator.step(Window(self.micro_batches)).is_applied
        if not is_applied:  # not finite, so it was kept from the optimizer
            return {name: torch.full_like(p, torch.nan) for name, p in self.model.named_parameters()}
        return seen

    def by_loop(self, loop: Loop) -> tuple[Gradient, Gradient]:
        """What a foreign loop leaves, and what it leaves when it runs again without anything in between."""
        self.reset()
        loop(self.model, list(self.micro_batches))
        first = self.taken()
        self.restore()
        loop(self.model, list(self.micro_batches))
        return first, self.taken()

    def right_scales(self) -> Array:
        """How much each micro-batch should count."""
        weights: list[Terms] = [(size,) for size in self.sizes]
        if self.weight is not None:
            weights = weigh(self.micro_batches, self.weight)
        total = totals(weights)
        return np.array([scales(w, total, self.reduction) for w in weights])

    def taken(self) -> Gradient:
        return {
            name: p.grad.detach().to_dense().clone() if p.grad.is_sparse else p.grad.detach().clone()
            for name, p in self.model.named_parameters()
            if p.grad is not None
        }

    def reset(self) -> None:
        self.restore()
        self.model.zero_grad(set_to_none=True)

    def restore(self) -> None:
        """Buffers as they were: a BatchNorm's running statistics move with every pass."""
        self.model.load_state_dict(self.state)


def errors_of(full: Gradient, other: Gradient) -> dict[str, float]:
    norms = {name: float(torch.linalg.vector_norm(g)) for name, g in full.items()}
    total = float(np.linalg.norm(list(norms.values())))
    errors = {}
    for name in full.keys() | other.keys():
        if name not in full or name not in other:
            present = full.get(name, other.get(name))
            distance = float(torch.linalg.vector_norm(present)) if present is not None else 0.0
        else:
            distance = float(torch.linalg.vector_norm(other[name] - full[name]))
        errors[name] = relative_error(distance, norms.get(name, 0.0), total)
    return {name: errors[name] for name in [*full, *(other.keys() - full.keys())]}


def products_of(found: Sequence[Gradient]) -> Array:
    """The dot products of gradients with each other."""
    products = np.zeros((len(found), len(found)))
    for name in {name for gradient in found for name in gradient}:
        some = next(g[name] for g in found if name in g)
        rows = torch.stack([g.get(name, torch.zeros_like(some)).flatten() for g in found])
        rows = torch.view_as_real(rows).flatten(1) if rows.is_complex() else rows
        products += (rows @ rows.T).double().cpu().numpy()
    return products


def copied(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper: compile nothing for a check
    try:
        twin = copy.deepcopy(model)
    except RuntimeError as error:
        raise OptionError(f"the model cannot be copied, which verify() needs: {error}") from error
    for tensor in [*twin.parameters(), *twin.buffers()]:
        tensor.data = cast_to(tensor.data, dtype)
    return twin


def cast_to(batch: Any, dtype: torch.dtype) -> Any:
    def cast(tensor: Tensor) -> Tensor:
        if tensor.is_complex():
            return tensor.to(torch.promote_types(dtype, torch.complex64))
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return nest.map_tensors(cast, batch)
