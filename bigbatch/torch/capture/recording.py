"""One pass as a CUDA graph: run eagerly, rehearsed, recorded, replayed, and compared with the eager pass."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from ...core.auxiliary import flattened, name_of, rebuilt
from ...core.errors import CaptureError
from ...core.weight import Terms
from .. import batch as nest
from ..backward import Backward, Loss, check_loss, is_low
from ..gradients import GradientBuffer, Gradients, clear, leaves_of, run_backward
from ..internals import places_of_parameters
from ..sums import Sums
from .fingerprint import PLAIN
from .graph import capture_errors, no_waiting, record
from .snapshot import Snapshot

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
_LOW_TOLERANCE = 2e-2
_TINY = 1e-300


@dataclass
class Recorded:
    """A pass that can be replayed."""

    inputs: list[Tensor]  # the micro-batch, in fixed memory
    seeds: list[Tensor]  # what backward starts from, term by term
    losses: list[Tensor]  # of the last replay
    sums: Sums  # what the graph adds gradients to
    aux: Any  # of the last replay
    is_low: bool  # whether the loss is in low precision
    eager: Backward
    graph: Any = None
    factors: Terms = ()  # what the seeds were made from

    def replay(self, micro_batch: Any, scale: Terms, buffer: GradientBuffer) -> None:
        """Adds the gradient of a micro-batch to the sums of the window."""
        unit, factors = _unit_and_factors(scale, is_low=self.is_low)
        buffer.load(unit)
        elsewhere = [(p, own) for p, own in self.sums.items() if p.grad is not own]
        if elsewhere:  # the sums go to the memory that the graph adds to
            torch._foreach_zero_([own for _, own in elsewhere])
            for p, own in elsewhere:
                p.grad = own if p.grad is None else own.add_(p.grad)
            buffer.store_new()
        self.run(micro_batch, factors)

    def run(self, micro_batch: Any, factors: Terms) -> None:
        """Adds the gradient of a micro-batch, with each term of the loss multiplied by its factor, to `sums`."""
        if self.inputs:
            with torch.no_grad():  # a loss may have called requires_grad_() on them
                torch._foreach_copy_(self.inputs, nest.tensors(micro_batch), non_blocking=True)
        if factors != self.factors or self.eager.precision.scaler is not None:
            for seed, factor in zip(self.seeds, factors, strict=True):
                seed.copy_(self.eager.seed(factor, seed))
            self.factors = factors
        self.graph.replay()


@dataclass
class Pass:
    """Forward and backward of one micro-batch, to be recorded."""

    loss: Loss
    scale: Terms  # what each term of the loss is multiplied by
    modules: Sequence[nn.Module]  # those that take part
    gradients: Gradients
    eager: Backward
    memory: dict[Tensor, Tensor]  # where recorded passes add up gradients; the same for all of them
    device: torch.device

    def recorded(self, micro_batch: Any, buffer: GradientBuffer, pool: Callable[[], Any]) -> Recorded | None:
        """Adds the gradient of the micro-batch by a first replay, which must give what the eager pass gives.

        Returns None, with nothing done, if there is nothing to compare: no gradient, or one that is not finite.
        """
        static = nest.map_tensors(lambda t: torch.empty_like(t, device=self.device).copy_(t), micro_batch)
        snapshot = Snapshot(self.modules, self.device, self.eager.batch_norms.tensors())
        buffer.unload()
        sums = Sums()
        is_done = False
        try:
            terms, aux = self._forward(inputs := nest.detached(static))
            snapshot.add_new(self.eager.batch_norms.tensors())  # a layer may have run more often than before
            is_any_low = is_low(terms)
            unit, factors = _unit_and_factors(self.scale, is_low=is_any_low)
            buffer.load(unit)
            sums.update((p, g.clone()) for p, g in _taken(buffer).items())  # they may lie in `memory`
            seeds = [self.eager.seed(*pair).clone() for pair in zip(factors, terms, strict=True)]
            run_backward(*self.eager.terms_and_seeds(terms, factors))
            buffer.unalias()
            expected = _taken(buffer)
            losses = [term.detach().reshape(()).clone() for term in terms]
            others = WeakSet(leaves_of(*terms).difference(buffer.parameters, nest.tensors(inputs)))
            aux = self._static(aux)
            del terms  # and with them what the pass has made for itself
            self._check(snapshot, expected, list(others))
            norm = expected.norm()
            if not expected or not math.isfinite(norm):
                return None
            for p in expected.keys() - self.memory.keys():
                self.memory[p] = torch.zeros_like(p, dtype=self.gradients.wide_dtype(p), requires_grad=False)
            own = Sums((p, self.memory[p]) for p in expected)
            outputs = [torch.empty_like(loss) for loss in losses]
            recorded = Recorded(nest.tensors(static), seeds, outputs, own, aux, is_any_low, self.eager)
            snapshot.restore()
            recorded.graph = self._graph(static, recorded, pool)
            snapshot.restore()
            torch._foreach_zero_(list(own.values()))
            recorded.run(micro_batch, factors)
            self._compare(recorded, expected, losses, norm)
            for p, g in own.items():
                sums[p] = g.add_(sums[p]) if p in sums else g
            is_done = True
            return recorded
        finally:
            for p in buffer.parameters:
                p.grad = sums.get(p)
            buffer.store_new()
            if not is_done:
                snapshot.restore()

    def _forward(self, inputs: Any) -> tuple[Terms, Any]:
        terms, aux = self.eager.forward(self.loss, inputs, len(self.scale))
        check_loss(terms, len(self.scale))
        if is_low(terms) and len(terms) > 1:
            raise CaptureError(
                f"a loss of {len(terms)} terms in low precision cannot be captured: return them in float32"
            )
        return terms, aux

    def _static(self, aux: Any) -> Any:
        """Memory for the aux of replays; raises CaptureError if some of it would not change with the micro-batch."""

        def memory_for(name: str, leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                if leaf.device != self.device or leaf.layout is not torch.strided or leaf.is_nested:
                    raise CaptureError(
                        f"{name} is a tensor on {leaf.device} with the layout {leaf.layout}, which a captured pass "
                        f"does not compute again: return a dense one on {self.device}"
                    )
                return torch.empty(leaf.shape, dtype=leaf.dtype, device=self.device)
            if type(leaf) not in PLAIN:
                raise CaptureError(
                    f"{name} is a {type(leaf).__name__}, which a captured pass does not compute again: return a tensor"
                )
            return leaf

        leaves = flattened(aux)
        return rebuilt(aux, {path: memory_for(name_of(path), leaf) for path, leaf in leaves.items()})

    def _check(self, snapshot: Snapshot, expected: Sums, others: list[Tensor]) -> None:
        """Raises CaptureError if the eager pass did something that a replay would leave out."""
        if sparse := [p for p, g in expected.items() if g.is_sparse]:
            raise CaptureError(
                f"{len(sparse)} of {len(expected)} gradients ({self.gradients.name(sparse[0])} first) are sparse, "
                "which cannot be captured: make the embedding with sparse=False"
            )
        if others:
            raise CaptureError(
                f"{len(others)} tensors get gradients but are not among the {len(expected)} that the optimizer holds "
                f"(one of shape {tuple(others[0].shape)} first), which cannot be captured: call "
                "requires_grad_(False) on them, or give them to the optimizer"
            )
        if snapshot.has_drawn_on_host():
            raise CaptureError(
                "the loss draws random numbers on the host, and a captured pass would not draw them again: "
                "draw them on the device, for example torch.rand((), device=…)"
            )
        if replaced := snapshot.replaced():
            raise CaptureError(
                f"the loss replaces {len(replaced)} tensors that modules hold ({replaced[0]} first), and a captured "
                "pass would read the old ones each time: change them in place, for example with copy_()"
            )
        if num_changed := snapshot.num_frozen_changed():
            raise CaptureError(
                f"the loss changes {num_changed} parameters that are not trained, which cannot be undone to capture "
                "it: change them between steps, or make them buffers"
            )

    def _graph(self, static: Any, recorded: Recorded, pool: Callable[[], Any]) -> torch.cuda.CUDAGraph:
        """The pass as a graph, which is not run yet."""
        leaves = {p: nn.Parameter(p.detach()) if _is_held(p) else p for p in recorded.sums}

        def work() -> None:
            torch.clear_autocast_cache()  # weights that were cast before would be read forever
            with _replaced(self.modules, leaves):
                terms, aux = self._forward(nest.detached(static))
            found = self._gradients_of(terms, recorded.seeds, list(leaves.values()))
            _add(list(recorded.sums.values()), found)
            for output, term in zip(recorded.losses, terms, strict=True):
                output.copy_(term.detach().reshape(()))
            _copy_aux(recorded.aux, aux)
            torch.clear_autocast_cache()

        with capture_errors():
            if any(leaf is not p for p, leaf in leaves.items()):
                work()  # compiled code may be compiled again, which waits for the device
            with no_waiting():
                work()
        return record(work, self.device, pool())

    def _gradients_of(self, terms: Terms, seeds: list[Tensor], leaves: list[Tensor]) -> Sequence[Tensor]:
        """What a backward pass adds to each leaf; adding it up takes few launches if they are added all at once."""
        counted = [(terms[t], seeds[t]) for t, scale in enumerate(self.scale) if scale and terms[t].requires_grad]
        losses = [term for term, _ in counted]
        reached = leaves_of(*losses) & {*leaves, *self.gradients.parameters()}
        if reached != set(leaves):
            raise CaptureError(
                f"the loss reached {len(reached)} parameters and {len(leaves)} before with the same micro-batch, which "
                "cannot be captured: compute it in the same way each time"
            )
        with torch.autocast("cuda", enabled=False):
            return torch.autograd.grad(losses, leaves, [seed.expand(term.shape) for term, seed in counted])

    def _compare(self, recorded: Recorded, expected: Sums, losses: list[Tensor], norm: float) -> None:
        """Raises CaptureError if a replay gave other gradients or losses than the eager pass."""
        tolerance = max(_TOLERANCE.get(p.dtype, _LOW_TOLERANCE) for p in expected)
        if torch.is_autocast_enabled("cuda") or self.eager.precision.dtype is not None:
            tolerance = _LOW_TOLERANCE
        apart = expected.tensors()
        norms = torch.stack(torch._foreach_norm(apart)).double()
        torch._foreach_sub_(apart, recorded.sums.tensors())
        errors = torch.stack(torch._foreach_norm(apart)).double() / (norms + norm / 100 + _TINY)
        eager, replayed = (torch.stack([*map(Tensor.double, found)]) for found in (losses, recorded.losses))
        loss_errors = ((eager - replayed).abs() / (eager.abs() + _TINY)).where(eager.isfinite(), 0.0)
        worst = float(torch.cat([errors, loss_errors]).max())
        if not worst <= tolerance:
            raise CaptureError(
                f"the first replay is {worst:.1e} away from the eager pass, allowed is {tolerance:.0e}, so the loss "
                "depends on something that is not in the micro-batch: make it a tensor of the batch or of the model"
            )


def _unit_and_factors(scale: Terms, *, is_low: bool) -> tuple[Any, Terms]:
    """The unit of the sums, and what the loss is multiplied by. In low precision, a factor of the loss would round."""
    return (scale[0], (1.0,)) if is_low else (1.0, scale)


def _taken(buffer: GradientBuffer) -> Sums:
    """The gradients, which the parameters no longer hold."""
    sums = Sums((p, p.grad) for p in buffer.parameters if p.grad is not None)
    clear(buffer.parameters)
    return sums


def _add(sums: list[Tensor], found: Sequence[Tensor]) -> None:
    """In few launches where the tensors are alike."""
    alike: list[tuple[Tensor, Tensor]] = []
    for s, g in zip(sums, found, strict=True):
        if s.dtype == g.dtype and s.stride() == g.stride():
            alike.append((s, g))
        else:
            s.add_(g)
    if alike:
        torch._foreach_add_(*map(list, zip(*alike, strict=True)))


def _copy_aux(static: Any, aux: Any) -> None:
    """Copies aux to where replays leave it; raises CaptureError if the loss returned another one before."""
    expected, found = flattened(static), flattened(aux)
    if expected.keys() != found.keys():
        raise CaptureError(
            f"the loss returned {len(found)} values of aux and {len(expected)} before with the same micro-batch: "
            "return the same each time"
        )
    for path, leaf in found.items():
        before = expected[path]
        if isinstance(before, Tensor) and isinstance(leaf, Tensor) and before.shape == leaf.shape:
            before.copy_(leaf.detach())
        elif isinstance(before, Tensor) or before != leaf:
            raise CaptureError(
                f"{name_of(path)} is not the same in two passes with the same micro-batch, so a captured pass would "
                "repeat an old one: compute it from the micro-batch, as a tensor"
            )


def _is_held(parameter: Tensor) -> bool:
    """Whether somebody keeps the AccumulateGrad node of this parameter alive: DDP does, or a loss the user still holds.

    The node is tied to the stream of the moment when it was made, so that it cannot be recorded. Another parameter in
    the same memory has a node of its own.
    """
    mark: Any = get_gradient_edge(parameter).node.metadata
    mark["bigbatch"] = True
    again: Any = get_gradient_edge(parameter).node.metadata
    return "bigbatch" in again


@contextmanager
def _replaced(modules: Sequence[nn.Module], leaves: dict[Tensor, Tensor]) -> Iterator[None]:
    """Inside, modules have these leaves in place of their parameters."""
    places = [place for module in modules for place in places_of_parameters(module)]
    for place, name, p in places:
        place[name] = leaves.get(p, p)
    try:
        yield
    finally:
        for place, name, p in places:
            place[name] = p
