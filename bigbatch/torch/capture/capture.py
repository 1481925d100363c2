"""Micro-batches as CUDA graphs: forward, backward and the addition to the gradient sums, launched as one."""

import warnings
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import BigBatchWarning, CaptureError, OptionError
from ...core.weight import Terms
from .. import batch as nest
from ..distributed.ranks import Replicas
from ..gradient_buffer import HAS_GRAD_DTYPE, Collection
from ..gradients import Gradients
from ..precision import Precision
from .fingerprint import PLAIN, modules_of, surroundings
from .recording import Forward, Pass, Recorded

NUM_WARM_UPS = 1
"""How many passes of a new shape run eagerly before one is recorded: shapes that come once never are."""
MAX_SHAPES = 32
MAX_CHANGES = 8
MAX_CHANGES_TO_RECORD = 1
"""What changed before each of two windows will change before the next: recording would be for this one alone."""


class Capture:
    """Records a pass for every shape of micro-batch, and replays it.

    capture.begin(loss)                                     # once a window
    losses = capture.add(forward, micro_batch, scale, …)    # None: run it eagerly
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
        self._loss: Any = None
        self._has_told = False

    def pool(self) -> Any:
        """Where recordings have their memory, one after the other: nothing in it is needed once a replay is done."""
        if not self._recorded:  # torch lets go of a pool with the last graph in it
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool

    def begin(self, loss: Callable[..., Any]) -> None:
        """Forgets what was recorded if anything that it was recorded with has changed."""
        self._loss = loss
        if not self._has_changed():
            self._num_changes = 0
            return
        self._num_changes += 1
        if self._num_changes == MAX_CHANGES:
            self._tell(
                f"nothing is captured, since something that the loss may depend on has changed before each of "
                f"{MAX_CHANGES} windows: an attribute of the model, a value that the loss closes over, or the place "
                "of a tensor; make it a tensor of the batch"
            )

    def _has_changed(self) -> bool:
        now = [*map(id, self._gradients.parameters), *surroundings(self._model, self._loss)]
        if now == self._surroundings:
            return False
        self._forget()
        self._surroundings = now
        return True

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
                collection.put()
                self.num_replays += 1
                recorded.replay(micro_batch, scale, collection)
                return recorded.take_losses()
            if not self._is_worth_it(key):
                return None
            if self._has_changed():  # a pass that ran eagerly did it, and a replay would not
                self._num_seen[key] = 1
                return None
            modules = modules_of(self._model, self._loss)
            recorded = Pass(modules, self._gradients, self._precision, self._buffers, forward, scale).recorded(
                micro_batch, collection, self.device, self.pool
            )
            if recorded is None:
                return None
            self._recorded[key] = recorded
            return recorded.take_losses()
        except (CaptureError, torch.cuda.OutOfMemoryError) as error:
            self._forget()
            if self.is_required:
                raise
            self.is_on = False
            warnings.warn(f"capture is off from here on: {error}", BigBatchWarning, stacklevel=5)
            return None

    def _is_worth_it(self, key: Hashable) -> bool:
        if self._num_changes > MAX_CHANGES_TO_RECORD:
            return False
        if key not in self._num_seen and len(self._num_seen) >= MAX_SHAPES:
            self._tell(
                f"micro-batches had more than {MAX_SHAPES} shapes, and only the first {MAX_SHAPES} are captured: "
                "pad them to a few lengths, or leave capture out"
            )
            return False
        self._num_seen[key] += 1
        return self._num_seen[key] > NUM_WARM_UPS


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
