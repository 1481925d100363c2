"""Micro-batches as CUDA graphs: forward, backward and the addition to the gradient sums, launched as one."""

from collections import Counter
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import CaptureError, OptionError, warn
from ...core.weight import Terms
from .. import batch as nest
from ..backward import Backward, Loss
from ..distributed.ranks import Ranks
from ..gradients import GradientBuffer, Gradients
from ..internals import uncompiled
from ..window import GetShares
from .fingerprint import PLAIN, fingerprint, modules_of
from .recording import Pass, Recorded

_NUM_WARM_UPS = 1  # passes of a new shape that run eagerly before one is recorded: many shapes occur only once
_MAX_SHAPES = 32
_MAX_CHANGES = 8  # changes before so many windows in a row are worth a warning
_MAX_CHANGES_TO_RECORD = 1  # after more of them the next is likely, and a recording would serve one window alone


class _Capture:
    """Records a pass for every shape of micro-batch and replays it.

        capture.begin(loss)                                               # once a window
        values, aux = capture(loss, micro_batch, weight, get_shares, buffer)  # as Backward

    What cannot be captured runs eagerly, or raises CaptureError if capture `is_required`.
    """

    def __init__(
        self, model: nn.Module, gradients: Gradients, eager: Backward, device: torch.device, *, is_required: bool
    ) -> None:
        self._model = model
        self._gradients = gradients
        self._eager = eager
        self.device = device
        self.is_required = is_required
        self.is_on = True
        self.num_replays = 0
        self._pool = torch.cuda.graph_pool_handle()
        self._recorded: dict[Hashable, Recorded] = {}
        self._num_seen: Counter[Hashable] = Counter()
        self._memory: dict[Tensor, Tensor] = {}  # where recorded passes add up gradients, by parameter
        self._fingerprint: list[Any] = []
        self._num_changes = 0
        self._loss: Any = None
        self._has_warned = False

    def pool(self) -> Any:
        """The memory that all recordings share: a replay needs none of it once it is done."""
        if not self._recorded:  # torch frees a pool with the last graph in it
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool

    def begin(self, loss: Loss) -> None:
        """Forgets what was recorded if anything that it depends on has changed."""
        if not self.is_on:
            return
        self._loss = loss
        if not self._has_changed():
            self._num_changes = 0
            return
        self._num_changes += 1
        if self._num_changes == _MAX_CHANGES:
            self._warn(
                f"nothing is captured, since something that the loss may depend on has changed before each of "
                f"{_MAX_CHANGES} windows: an attribute of the model, a value that the loss closes over, or the place "
                "of a tensor; make it a tensor of the batch"
            )

    def _has_changed(self) -> bool:
        now = [id(self._loss), *map(id, self._gradients.parameters()), *fingerprint(self._model, self._loss)]
        if now == self._fingerprint:
            return False
        self._forget()
        self._fingerprint = now
        return True

    def _forget(self) -> None:
        self._recorded.clear()
        self._memory.clear()
        self._num_seen.clear()

    def __call__(
        self, loss: Loss, micro_batch: Any, weight: Terms, get_shares: GetShares, buffer: GradientBuffer
    ) -> tuple[list[Any], Any]:
        """Adds the gradient of a micro-batch and returns its losses and aux. The arguments are those of Backward.

        Aux is in memory that the next replay overwrites.
        """
        if self.is_on:
            try:
                recorded = self._replayed(loss, micro_batch, weight, get_shares, buffer)
                if recorded is not None:
                    return [loss.clone() for loss in recorded.losses], recorded.aux
            except (CaptureError, torch.cuda.OutOfMemoryError) as error:
                self._forget()
                if self.is_required:
                    raise
                self.is_on = False
                warn(f"capture is off from here on: {error}")
        return self._eager(loss, micro_batch, weight, get_shares, buffer)

    def _replayed(
        self, loss: Loss, micro_batch: Any, weight: Terms, get_shares: GetShares, buffer: GradientBuffer
    ) -> Recorded | None:
        """Returns the recorded pass that has done it; None, with nothing done, if it has to run eagerly."""
        scale = self._eager.times_divisor(get_shares(weight))
        if not any(scale):
            return None  # it runs for its aux only, without a backward pass
        key = (tuple(map(bool, scale)), _shape_of(micro_batch, self.device))
        if (recorded := self._recorded.get(key)) is not None:
            self.num_replays += 1
            recorded.replay(micro_batch, scale, buffer)
            return recorded
        if not self._is_worth_it(key):
            return None
        if self._has_changed():  # an eager pass did it, and a replay would not
            self._num_seen[key] = 1
            return None

        modules = modules_of(self._model, loss)
        this = Pass(loss, scale, modules, self._gradients, self._eager, self._memory, self.device)
        recorded = this.recorded(micro_batch, buffer, self.pool)
        if recorded is not None:
            self._recorded[key] = recorded
        return recorded

    def _is_worth_it(self, key: Hashable) -> bool:
        """Whether to record a micro-batch of this shape now."""
        if self._num_changes > _MAX_CHANGES_TO_RECORD:
            return False
        if key not in self._num_seen and len(self._num_seen) >= _MAX_SHAPES:
            self._warn(
                f"micro-batches had more than {_MAX_SHAPES} shapes, and only the first {_MAX_SHAPES} are captured: "
                "pad them to a few lengths, or leave capture out"
            )
            return False
        self._num_seen[key] += 1
        return self._num_seen[key] > _NUM_WARM_UPS

    def _warn(self, message: str) -> None:
        if not self._has_warned:
            warn(message)
            self._has_warned = True


def _shape_of(micro_batch: Any, device: torch.device) -> Hashable:
    """What two micro-batches must have in common to be replayed by the same graph."""
    found: list[Any] = [type(micro_batch)]
    for name, leaf in nest.leaves(micro_batch, "micro_batch"):
        if isinstance(leaf, Tensor):
            if leaf.layout is not torch.strided or leaf.is_nested or (leaf.ndim and leaf.device != device):
                raise CaptureError(
                    f"{name} is a tensor on {leaf.device} with the layout {leaf.layout}, which cannot be captured: "
                    f"have all tensors of a batch on the host, or all on {device}, and dense"
                )
            found.append((name, leaf.shape, leaf.dtype))
        elif type(leaf) in PLAIN:
            found.append((name, type(leaf), leaf))
        else:
            raise CaptureError(
                f"{name} is a {type(leaf).__name__}, which a captured pass would not see change: make it a tensor, "
                "or None"
            )
    return tuple(found)


def capture_for(
    capture: Any, model: nn.Module, loss: Any, gradients: Gradients, eager: Backward, ranks: Ranks
) -> _Capture | None:
    """Returns what captures passes, or None if this is not wanted or not possible."""
    if capture is False:
        return None
    if capture is not True and capture != "auto":
        raise OptionError(f'capture={capture!r} is unknown: pass True, False or "auto"')
    parameters = gradients.parameters()
    if reason := _why_not(parameters, loss, gradients, ranks):
        if capture is True:
            raise OptionError(reason)
        return None
    model = uncompiled(model)
    inner: Any = model.module if ranks.is_distributed else model
    return _Capture(inner, gradients, eager, parameters[0].device, is_required=capture is True)


def _why_not(parameters: list[Tensor], loss: Any, gradients: Gradients, ranks: Ranks) -> str | None:
    """Why nothing can be captured, if that is known from the start."""
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
    if ranks.is_sharded:
        return "fully_shard gathers parameters in every pass, which cannot be captured: use DistributedDataParallel"
    return None
