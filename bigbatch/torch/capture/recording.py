"""One pass as a CUDA graph: run eagerly, rehearsed, recorded, replayed, compared."""

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from ...core.errors import CaptureError
from ...core.weight import Terms
from .. import batch as nest
from ..backward import Backward, is_low
from ..gradients import GradientBuffer, Gradients, clear, leaves_of, run_backward
from ..internals import places_of_parameters
from ..sums import Sums
from .fingerprint import Snapshot
from .graph import no_waiting, record, rehearsed

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
LOW_TOLERANCE = 2e-2
TINY = 1e-300

Forward = Callable[[Any], Terms]


@dataclass
class Recorded:
    """A pass that can be replayed: what it reads, what it writes, and what brings it there."""

    graph: torch.cuda.CUDAGraph
    static: Any
    """A micro-batch that stays in its place."""
    seeds: list[Tensor]
    losses: list[Tensor]
    buffers: dict[Tensor, Tensor]
    """Where gradients are added up, by parameter."""
    is_low: bool
    eager: Backward
    numbers: Terms = ()
    """What the seeds were made from."""

    def __post_init__(self) -> None:
        self._inputs = nest.tensors(self.static)

    def replay(self, micro_batch: Any, scale: Terms, buffer: GradientBuffer) -> None:
        """Adds the gradient of a micro-batch."""
        buffer.put(scale[0] if self.is_low else 1.0)
        if self._inputs:
            with torch.no_grad():  # a loss may have called requires_grad_() on them
                torch._foreach_copy_(self._inputs, nest.tensors(micro_batch), non_blocking=True)
        self._take_over(buffer)
        numbers = (1.0,) if self.is_low else scale
        if numbers != self.numbers or self.eager.precision.scaler is not None:
            for seed, number in zip(self.seeds, numbers, strict=True):
                seed.copy_(self.eager.seed(number, seed))
            self.numbers = numbers
        self.graph.replay()

    def take_losses(self) -> list[Tensor]:
        return [loss.clone() for loss in self.losses]

    def _take_over(self, buffer: GradientBuffer) -> None:
        """Sums that are elsewhere, or nowhere, go where the recorded pass adds to them."""
        elsewhere = [(p, own) for p, own in self.buffers.items() if p.grad is not own]
        if not elsewhere:
            return
        torch._foreach_zero_([own for _, own in elsewhere])
        for p, own in elsewhere:
            if p.grad is not None:
                own.add_(p.grad)
            p.grad = own
        buffer.keep()


class Pass:
    """A pass through the model with one micro-batch, on its way to being recorded."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        gradients: Gradients,
        eager: Backward,
        buffers: dict[Tensor, Tensor],
        forward: Forward,
        scale: Terms,
    ) -> None:
        self._modules = modules
        self._gradients = gradients
        self._eager = eager
        self._buffers = buffers
        self._forward = forward
        self._scale = scale

    def recorded(
        self, micro_batch: Any, buffer: GradientBuffer, device: torch.device, pool: Callable[[], Any]
    ) -> Recorded | None:
        """Adds the gradient of the micro-batch by a first replay, which must give what the eager pass gives.

        None, with nothing done, if this is no good moment: there is no gradient, or it is not finite, so that there is
        nothing to compare.
        """
        parameters = buffer.parameters
        static = nest.map_tensors(lambda t: torch.empty_like(t, device=device).copy_(t), micro_batch)
        inputs = nest.detached(static)
        snapshot = Snapshot(self._modules, device)
        before: Sums | None = None
        is_done = False
        try:
            buffer.take()
            terms = self._forward(inputs)
            is_any_low = check_precision(terms)
            buffer.put(self._scale[0] if is_any_low else 1.0)
            before = Sums((p, g.clone()) for p, g in taken(parameters).items())  # they may lie in the buffers
            numbers = (1.0,) if is_any_low else self._scale
            seeds = [self._eager.seed(*pair).clone() for pair in zip(numbers, terms, strict=True)]
            run_backward(*self._eager.counted(terms, numbers))
            buffer.unalias()
            expected = taken(parameters)
            losses = [term.detach().reshape(()).clone() for term in terms]
            strangers = weakly(leaves_of(*terms).difference(parameters, nest.tensors(inputs)))
            del terms
            self._check(snapshot, expected, strangers)
            if not (expected and math.isfinite(norm := expected.norm())):
                return None
            snapshot.restore()
            recorded = self._record(static, seeds, losses, expected, device, pool, is_any_low)
            snapshot.restore()
            recorded.replay(micro_batch, self._scale, buffer)
            self._compare(recorded, expected, losses, norm)
            for p, g in before.items():
                p.grad = g if p.grad is None else p.grad.add_(g)
            buffer.keep()
            is_done = True
            return recorded
        finally:
            if not is_done:  # as if nothing had happened
                snapshot.restore()
                if before is not None:
                    for p in parameters:
                        p.grad = before.get(p)
                    buffer.keep()

    def _record(
        self,
        static: Any,
        seeds: list[Tensor],
        losses: list[Tensor],
        used: Sums,
        device: torch.device,
        pool: Callable[[], Any],
        is_any_low: bool,
    ) -> Recorded:
        for p in used:
            if p not in self._buffers:
                self._buffers[p] = torch.zeros_like(p, dtype=self._gradients.wide_dtype(p), requires_grad=False)
        buffers = {p: self._buffers[p] for p in used}
        leaves = {p: nn.Parameter(p.detach()) if is_held(p) else p for p in used}
        outputs = [torch.empty_like(loss) for loss in losses]

        def work() -> None:
            torch.clear_autocast_cache()  # weights that were cast before would be read for good
            with standing_in(self._modules, leaves):
                terms = self._forward(nest.detached(static))
            found = self._gradients_of(terms, seeds, list(leaves.values()))
            add_up(list(buffers.values()), found)
            for output, term in zip(outputs, terms, strict=True):
                output.copy_(term.detach().reshape(()))
            torch.clear_autocast_cache()

        with rehearsed():
            if any(leaf is not p for p, leaf in leaves.items()):
                work()  # what is compiled may be compiled anew, and waits for the device then
            with no_waiting():
                work()
        return Recorded(record(work, device, pool()), static, seeds, outputs, buffers, is_any_low, self._eager)

    def _gradients_of(self, terms: Terms, seeds: list[Tensor], leaves: list[Tensor]) -> Sequence[Tensor]:
        """What a backward pass would add, which is done for all of them at once."""
        counted = self._counted(terms)
        reached = leaves_of(*(terms[t] for t in counted)) & {*leaves, *self._gradients.parameters}
        if reached != set(leaves):
            raise CaptureError(
                f"the loss reached {len(reached)} parameters and {len(leaves)} before with the same micro-batch, which "
                "cannot be captured: compute it in the same way each time"
            )
        with torch.autocast("cuda", enabled=False):
            return torch.autograd.grad(
                [terms[t] for t in counted], leaves, [seeds[t].expand(terms[t].shape) for t in counted]
            )

    def _counted(self, terms: Terms) -> list[int]:
        return [t for t, scale in enumerate(self._scale) if scale and terms[t].requires_grad]

    def _check(self, snapshot: Snapshot, found: Sums, strangers: list[Any]) -> None:
        """Refuses what a replay would leave out."""
        if sparse := [p for p, g in found.items() if g.is_sparse]:
            raise CaptureError(
                f"{len(sparse)} of {len(found)} gradients ({self._gradients.name(sparse[0])} first) are sparse, which "
                "cannot be captured: make the embedding with sparse=False"
            )
        if alive := [leaf for ref in strangers if (leaf := ref()) is not None]:
            raise CaptureError(
                f"{len(alive)} tensors get gradients but are not among the {len(found)} that the optimizer holds "
                f"(one of shape {tuple(alive[0].shape)} first), which cannot be captured: call requires_grad_(False) "
                "on them, or give them to the optimizer"
            )
        if snapshot.has_drawn_on_host():
            raise CaptureError(
                "the loss draws random numbers on the host, and a captured pass would not draw them anew: "
                "draw them on the device, for example torch.rand((), device=…)"
            )
        if replaced := snapshot.replaced():
            raise CaptureError(
                f"the loss puts new tensors in place of {len(replaced)} that modules have ({replaced[0]} first), and a "
                "captured pass would read the old ones each time: change them in place, for example with copy_()"
            )
        if num_moved := snapshot.num_moved():
            raise CaptureError(
                f"the loss changes {num_moved} parameters that are not trained, which cannot be undone to capture it: "
                "change them between steps, or make them buffers"
            )

    def _compare(self, recorded: Recorded, expected: Sums, losses: list[Tensor], norm: float) -> None:
        tolerance = self._tolerance(expected)
        own = expected.tensors()
        norms = torch.stack(torch._foreach_norm(own)).double()
        torch._foreach_sub_(own, Sums(recorded.buffers).tensors())
        errors = torch.stack(torch._foreach_norm(own)).double() / (norms + norm / 100 + TINY)
        eager, replayed = (torch.stack([*map(Tensor.double, found)]) for found in (losses, recorded.losses))
        apart = torch.cat([errors, ((eager - replayed).abs() / (eager.abs() + TINY)).where(eager.isfinite(), 0.0)])
        worst = float(apart.max())
        if not worst <= tolerance:
            raise CaptureError(
                f"the first replay is {worst:.1e} away from the eager pass, allowed is {tolerance:.0e}, so the loss "
                "depends on something that is not in the micro-batch: make it a tensor of the batch or of the model"
            )

    def _tolerance(self, found: Sums) -> float:
        if torch.is_autocast_enabled("cuda") or self._eager.precision.dtype is not None:
            return LOW_TOLERANCE
        return max(TOLERANCE.get(p.dtype, LOW_TOLERANCE) for p in found)


def check_precision(terms: Terms) -> bool:
    """Whether the loss is in low precision."""
    is_any_low: bool = is_low(terms)
    if is_any_low and len(terms) > 1:
        raise CaptureError(f"a loss of {len(terms)} terms in low precision cannot be captured: return them in float32")
    return is_any_low


def add_up(sums: list[Tensor], found: Sequence[Tensor]) -> None:
    """In few launches where the tensors are alike."""
    alike = [(s, g) for s, g in zip(sums, found, strict=True) if s.dtype == g.dtype and s.stride() == g.stride()]
    if alike:
        torch._foreach_add_(*map(list, zip(*alike, strict=True)))
    for s, g in zip(sums, found, strict=True):
        if s.dtype != g.dtype or s.stride() != g.stride():
            s.add_(g)


def is_held(parameter: Tensor) -> bool:
    """Whether somebody holds on to the node that ends this parameter's backward pass, so that it is not made anew.

    DistributedDataParallel does, and who keeps a loss. It is tied to the stream of the moment when it was made, which
    cannot be recorded. Another parameter in the same memory is free of that.
    """
    mark: Any = get_gradient_edge(parameter).node.metadata
    mark["bigbatch"] = True
    again: Any = get_gradient_edge(parameter).node.metadata
    return "bigbatch" in again


@contextmanager
def standing_in(modules: Sequence[nn.Module], leaves: dict[Tensor, Tensor]) -> Iterator[None]:
    """Inside, modules have other parameters in place of their own."""
    places = [place for module in modules for place in places_of_parameters(module)]
    for place, name, p in places:
        place[name] = leaves.get(p, p)
    try:
        yield
    finally:
        for place, name, p in places:
            place[name] = p


def taken(parameters: Sequence[Tensor]) -> Sums:
    """The gradients, which the parameters no longer hold."""
    sums = Sums((p, p.grad) for p in parameters if p.grad is not None)
    clear(parameters)
    return sums


def weakly(tensors: set[Tensor]) -> list[Any]:
    """Those that the pass made itself are gone when it is."""
    return [weakref.ref(tensor) for tensor in tensors]
