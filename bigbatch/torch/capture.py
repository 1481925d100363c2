"""Micro-batches as CUDA graphs: forward, backward and the addition to the gradient sums, launched as one."""

import math
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from ..core.errors import BigBatchWarning, CaptureError, OptionError
from ..core.weight import Terms
from . import gradients, nest
from .gradients import HAS_GRAD_DTYPE, Collection, Gradients, Sums, leaves_of
from .graph import no_waiting, record
from .precision import Precision, is_low
from .replicas import Replicas
from .surroundings import PLAIN, Kept, surroundings

NUM_WARM_UPS = 2
"""How many passes of a new shape run eagerly before one is recorded: kernels are chosen, compiled, loaded."""
MAX_SHAPES = 32
MAX_CHANGES = 8
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
LOW_TOLERANCE = 2e-2
TINY = 1e-300

Forward = Callable[[Any], Terms]


class Capture:
    """Records a pass for every shape of micro-batch, and replays it.

        capture.begin(loss)                                     # once a window
        losses = capture.add(forward, micro_batch, scale, …)    # None: run it eagerly

    The first passes of a shape run eagerly and so warm up what needs it; shapes that come once are never recorded.
    The pass that is recorded also runs eagerly, and the first replay must give the same gradient.
    """

    def __init__(
        self,
        model: nn.Module,
        sums: Gradients,
        precision: Precision,
        device: torch.device,
        *,
        is_required: bool,
    ) -> None:
        self._model = model
        self._gradients = sums
        self._precision = precision
        self.device = device
        self.is_required = is_required
        self.is_on = True
        self.num_replays = 0
        self._pool = torch.cuda.graph_pool_handle()
        self._recorded: dict[Hashable, Recorded] = {}
        self._num_seen: Counter[Hashable] = Counter()
        self._buffers: dict[Tensor, Tensor] = {}
        self._surroundings: list[Any] = []
        self._num_changes = 0
        self._has_told = False

    def pool(self) -> Any:
        """Where recordings have their memory, one after the other: nothing in it is needed once a replay is done."""
        if not self._recorded:  # torch lets go of a pool with the last graph in it
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool

    def begin(self, loss: Callable[..., Any]) -> None:
        """Forgets what was recorded if anything that it was recorded with has changed."""
        now = [*map(id, self._gradients.parameters), *surroundings(self._model, loss)]
        if now == self._surroundings:
            self._num_changes = 0
            return
        self._forget()
        self._surroundings = now
        self._num_changes += 1
        if self._num_changes == MAX_CHANGES:
            self._tell(
                f"nothing is captured, since something that the loss may depend on has changed before each of "
                f"{MAX_CHANGES} windows: an attribute of the model, a value that the loss closes over, or the place "
                "of a tensor; make it a tensor of the batch"
            )

    def _tell(self, message: str) -> None:
        if not self._has_told:
            warnings.warn(message, BigBatchWarning, stacklevel=6)
            self._has_told = True

    def _forget(self) -> None:
        self._recorded.clear()
        self._buffers.clear()
        self._num_seen.clear()

    def add(self, forward: Forward, micro_batch: Any, scale: Terms, collection: Collection) -> list[Tensor] | None:
        """Adds the gradient of a micro-batch and returns its losses, or None if it has to be run eagerly."""
        try:
            key = (tuple(map(bool, scale)), shape_of(micro_batch, self.device))
            recorded = self._recorded.get(key)
            if recorded is not None:
                collection.check()
                self.num_replays += 1
                return recorded.replay(micro_batch, scale, collection)
            if not self._is_worth_it(key):
                return None
            found = self._record(forward, micro_batch, scale, collection)
        except (CaptureError, torch.cuda.OutOfMemoryError) as error:
            self._forget()
            if self.is_required:
                raise
            self.is_on = False
            warnings.warn(f"capture is off from here on: {error}", BigBatchWarning, stacklevel=5)
            return None
        if found is None:
            return None
        self._recorded[key], losses = found
        return losses

    def _is_worth_it(self, key: Hashable) -> bool:
        if key not in self._num_seen and len(self._num_seen) >= MAX_SHAPES:
            self._tell(
                f"micro-batches had more than {MAX_SHAPES} shapes, and only the first {MAX_SHAPES} are captured: "
                "pad them to a few lengths, or leave capture out"
            )
            return False
        self._num_seen[key] += 1
        return self._num_seen[key] > NUM_WARM_UPS

    def _record(
        self, forward: Forward, micro_batch: Any, scale: Terms, collection: Collection
    ) -> "tuple[Recorded, list[Tensor]] | None":
        """The recorded pass and the losses of its first replay; None if this is no good moment to record it."""
        parameters = collection.parameters
        kept = Kept(self._model, self.device)
        static = nest.map_tensors(
            lambda tensor: torch.empty_like(tensor, device=self.device).copy_(tensor), micro_batch
        )
        before: Sums | None = None
        is_done = False
        try:
            with no_waiting():
                terms = forward(static)
                is_any_low = self._check(terms)
                collection.check()
                collection.in_units_of(scale[0] if is_any_low else 1.0)
                before = Sums((p, g.clone()) for p, g in taken(parameters).items())  # may be where replays add to
                numbers = (1.0,) if is_any_low else scale
                seeds = [self._precision.seed(*pair).clone() for pair in zip(numbers, terms, strict=True)]
                self._backward(terms, seeds, scale)
            expected = taken(parameters)
            losses = [term.detach().reshape(()).clone() for term in terms]
            strangers = self._strangers(terms, parameters, nest.tensors(static))
            del terms
            self._check_pass(kept, expected, strangers)
            norm = gradients.norm(expected)
            if not math.isfinite(norm) or not all(map(math.isfinite, map(float, losses))):
                return None  # nothing to compare with: an overflow, say
            recorded = self._recording(forward, static, seeds, losses, expected, scale, is_low=is_any_low)
            kept.restore()
            gradients.clear(parameters)
            found = recorded.replay(micro_batch, scale, collection)
            self._compare(expected, losses, found, norm)
            for p, g in before.items():
                p.grad = g if p.grad is None else p.grad.add_(g)
            collection.added()
            is_done = True
            return recorded, found
        finally:
            if not is_done:  # as if nothing had happened, for the eager pass
                kept.restore()
                if before is not None:
                    for p in parameters:
                        p.grad = before.get(p)
                    collection.added()

    def _recording(
        self,
        forward: Forward,
        static: Any,
        seeds: list[Tensor],
        losses: list[Tensor],
        used: Sums,
        scale: Terms,
        *,
        is_low: bool,
    ) -> "Recorded":
        """Records the pass; its gradients go where they will stay for all passes of this kind."""
        for p in used:
            if p not in self._buffers:
                self._buffers[p] = torch.zeros_like(p, dtype=self._gradients.wide_dtype(p), requires_grad=False)
        leaves = self._leaves(used)
        for p, leaf in leaves.items():
            leaf.grad = self._buffers[p]
        outputs = [torch.empty_like(loss) for loss in losses]

        def work() -> None:
            torch.clear_autocast_cache()  # weights that were cast before would be read for good
            terms = forward(static)
            self._backward(terms, seeds, scale)
            for output, term in zip(outputs, terms, strict=True):
                output.copy_(term.detach().reshape(()))

        try:
            with standing_in(self._model, leaves):
                graph = record(work, self.device, self.pool())
        finally:
            torch.clear_autocast_cache()
        others = [p for p in self._gradients.parameters if p.grad is not None and leaves.get(p) is not p]
        if others or any(leaf.grad is not self._buffers[p] for p, leaf in leaves.items()):
            raise CaptureError(
                f"the loss reached {len(others)} parameters beside the {len(used)} that it reached before with the "
                "same micro-batch, so a pass cannot be captured: compute it in the same way each time"
            )
        buffers = {p: self._buffers[p] for p in used}
        return Recorded(graph, static, nest.tensors(static), seeds, outputs, buffers, is_low, self._precision)

    def _leaves(self, used: Sums) -> dict[Tensor, Tensor]:
        """What stands for the parameters while a pass is recorded: they themselves, or others in the same memory.

        Who holds on to the end of a parameter's backward pass (DistributedDataParallel, a loss that somebody keeps)
        ties it to the stream of an earlier moment, which cannot be recorded. Another parameter is free of that.
        """
        return {p: nn.Parameter(p.detach()) if is_held(p) else p for p in used}

    def _backward(self, terms: Terms, seeds: list[Tensor], scale: Terms) -> None:
        counted = [t for t, s in enumerate(scale) if s and terms[t].requires_grad]
        with self._precision.backward_pass():
            torch.autograd.backward([terms[t] for t in counted], [seeds[t].expand(terms[t].shape) for t in counted])

    # --- what cannot be captured -------------------------------------------------------------------------

    def _check(self, terms: Terms) -> bool:
        """Whether the loss is in low precision."""
        is_any_low = any(map(is_low, terms))
        if is_any_low and len(terms) > 1:
            raise CaptureError(
                f"a loss of {len(terms)} terms in low precision cannot be captured: return them in float32"
            )
        return is_any_low

    @staticmethod
    def _strangers(terms: Terms, parameters: Sequence[Tensor], own: list[Tensor]) -> list[Any]:
        """Leaves that get gradients but are not the optimizer's; those that the pass made itself are gone soon."""
        known = {id(tensor) for tensor in [*parameters, *own]}
        return [weakref.ref(leaf) for term in terms for leaf in leaves_of(term) if id(leaf) not in known]

    def _check_pass(self, kept: Kept, found: Sums, strangers: list[Any]) -> None:
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
        if kept.has_drawn_on_host():
            raise CaptureError(
                "the loss draws random numbers on the host, and a captured pass would not draw them anew: "
                "draw them on the device, for example torch.rand((), device=…)"
            )

    def _compare(self, expected: Sums, losses: list[Tensor], found: list[Tensor], norm: float) -> None:
        tolerance = self._tolerance(expected)
        own = gradients.values(expected)
        norms = torch.stack(torch._foreach_norm(own)).double()
        torch._foreach_sub_(own, gradients.values(Sums((p, self._buffers[p]) for p in expected)))
        errors = torch.stack(torch._foreach_norm(own)).double() / (norms + norm / 100 + TINY)
        eager, replayed = torch.stack([*map(Tensor.double, losses)]), torch.stack([*map(Tensor.double, found)])
        apart = torch.cat([errors, (eager - replayed).abs() / (eager.abs() + TINY)])
        worst = float(apart.max())
        if not worst <= tolerance:
            raise CaptureError(
                f"the first replay is {worst:.1e} away from the eager pass, allowed is {tolerance:.0e}, so the loss "
                "depends on something that is not in the micro-batch: make it a tensor of the batch or of the model"
            )

    def _tolerance(self, found: Sums) -> float:
        dtypes = {p.dtype for p in found}
        if torch.is_autocast_enabled("cuda") or self._precision.dtype is not None:
            return LOW_TOLERANCE
        return max(TOLERANCE.get(dtype, LOW_TOLERANCE) for dtype in dtypes)


@dataclass
class Recorded:
    """One pass: what it reads, what it writes, and what brings it there."""

    graph: torch.cuda.CUDAGraph
    static: Any
    inputs: list[Tensor]
    seeds: list[Tensor]
    losses: list[Tensor]
    buffers: dict[Tensor, Tensor]
    is_low: bool
    precision: Precision
    numbers: Terms = ()
    """What the seeds were made from, where they still are that."""

    def replay(self, micro_batch: Any, scale: Terms, collection: Collection) -> list[Tensor]:
        for static, tensor in zip(self.inputs, nest.tensors(micro_batch), strict=True):
            static.copy_(tensor, non_blocking=True)
        self._take_over()
        collection.in_units_of(scale[0] if self.is_low else 1.0)
        numbers = (1.0,) if self.is_low else scale
        if numbers != self.numbers or self.precision.scaler is not None:
            for seed, number in zip(self.seeds, numbers, strict=True):
                seed.copy_(self.precision.seed(number, seed))
            self.numbers = numbers
        self.graph.replay()
        collection.added()
        return [loss.clone() for loss in self.losses]

    def _take_over(self) -> None:
        """Sums that are elsewhere, or nowhere, go where the recorded pass adds to them."""
        elsewhere = [(p, buffer) for p, buffer in self.buffers.items() if p.grad is not buffer]
        if not elsewhere:
            return
        torch._foreach_zero_([buffer for _, buffer in elsewhere])
        for p, buffer in elsewhere:
            if p.grad is not None:
                buffer.add_(p.grad)
            p.grad = buffer


def is_held(parameter: Tensor) -> bool:
    """Whether somebody holds on to the node that ends this parameter's backward pass: if not, each pass has its own."""
    mark: Any = get_gradient_edge(parameter).node.metadata
    mark["bigbatch"] = True
    again: Any = get_gradient_edge(parameter).node.metadata
    return "bigbatch" in again


@contextmanager
def standing_in(model: nn.Module, leaves: dict[Tensor, Tensor]) -> Iterator[None]:
    """Inside, the model has other parameters in place of its own."""
    places: list[tuple[Any, Any, Any]] = []
    for module in model.modules():
        places += [(module._parameters, name, p) for name, p in module._parameters.items()]
        weights: Any = getattr(module, "_flat_weights", ())  # recurrent layers have a list of their own
        places += [(weights, number, p) for number, p in enumerate(weights)]
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
    gradients.clear(parameters)
    return sums


def shape_of(micro_batch: Any, device: torch.device) -> Hashable:
    """What must be the same for a recorded pass to be that of this micro-batch."""
    if nest.is_row(micro_batch):
        return tuple(_described(tensor, "micro_batch", device) for tensor in micro_batch)
    leaves = nest.leaves(micro_batch, "micro_batch")
    return type(micro_batch), tuple((name, _described(leaf, name, device)) for name, leaf in leaves)


def _described(leaf: Any, name: str, device: torch.device) -> Hashable:
    if isinstance(leaf, Tensor):
        if leaf.layout is torch.strided and not leaf.is_nested and (leaf.device == device or not leaf.ndim):
            return leaf.shape, leaf.dtype
        raise CaptureError(
            f"{name} is a tensor on {leaf.device} with the layout {leaf.layout}, which cannot be captured: "
            f"have all tensors of a batch on the host, or all on {device}, and dense"
        )
    if type(leaf) in PLAIN:
        return type(leaf), leaf
    raise CaptureError(
        f"{name} is a {type(leaf).__name__}, which a captured pass would not see change: make it a tensor, or none"
    )


def capture_for(
    capture: Any, model: nn.Module, loss: Any, sums: Gradients, precision: Precision, replicas: Replicas
) -> Capture | None:
    """What captures passes, if that is wanted and possible."""
    if capture is False:
        return None
    if capture is not True and capture != "auto":
        raise OptionError(f'capture={capture!r} is unknown: pass True, False or "auto"')
    parameters = sums.parameters
    if reason := why_not(parameters, loss, sums, replicas):
        if capture is True:
            raise OptionError(reason)
        return None
    model = getattr(model, "_orig_mod", model)  # behind torch.compile's wrapper
    inner: Any = model.module if replicas.is_shared else model
    return Capture(inner, sums, precision, parameters[0].device, is_required=capture is True)


def why_not(parameters: list[Tensor], loss: Any, sums: Gradients, replicas: Replicas) -> str | None:
    """What stands in the way from the start."""
    devices = sorted({str(p.device) for p in parameters})
    if len(devices) > 1:
        return f"the parameters are on {len(devices)} devices ({', '.join(devices)}) and 1 can be captured: use one"
    if parameters[0].device.type != "cuda":
        return (
            f"the parameters are on {devices[0]}, and only what runs on a CUDA device can be captured: "
            'move the model there, or pass capture="auto"'
        )
    if loss is None:
        return "only step() can be captured, which needs a loss: pass Accumulator(model, optimizer, loss, …)"
    if replicas.is_sharded:
        return "fully_shard gathers parameters in every pass, which cannot be captured: use DistributedDataParallel"
    if not HAS_GRAD_DTYPE and (wide := [p for p in parameters if sums.is_widened(p)]):
        return (
            f"{len(wide)} of {len(parameters)} parameters add up gradients in {sums.wide_dtype(wide[0])}, which can "
            "be captured from torch 2.10 on: update torch, or keep parameters in float32"
        )
    return None
