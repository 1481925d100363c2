"""Other models in DistributedDataParallel that a loss goes through: the discriminator of a GAN, a second tower.

Each of them would reduce its gradients and broadcast its buffers in every micro-batch, and a rank that has more
micro-batches than others would wait for them forever.
"""

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...core.errors import warn
from .. import internals

_here = threading.local()


class Others:
    """Keeps other models from communicating during the passes of the one that is trained.

    with others.kept_local():   # around forward and backward of a micro-batch
        …
    """

    def __init__(self, own: Any) -> None:
        self._own = own
        self._before: dict[Any, tuple[bool, bool, Any]] = {}
        self._has_warned = False
        _watch()

    @contextmanager
    def kept_local(self) -> Iterator[None]:
        outer, _here.others = getattr(_here, "others", None), self
        try:
            yield
        finally:
            _here.others = outer
            for model, before in self._before.items():
                model.require_backward_grad_sync, model.require_forward_param_sync, model.reducer = before
            self._before.clear()

    def see(self, model: Any) -> None:
        """Called before a forward pass of any model in DistributedDataParallel."""
        if model is self._own or model in self._before:
            return
        is_reducing = model.require_backward_grad_sync and torch.is_grad_enabled()
        self._before[model] = model.require_backward_grad_sync, model.require_forward_param_sync, model.reducer
        model.require_backward_grad_sync = model.require_forward_param_sync = False
        model.reducer = internals.ReducerWithoutRebuild(model.reducer)
        if is_reducing and not self._has_warned and any(p.requires_grad for p in model.parameters()):
            self._has_warned = True
            warn(
                f"the loss goes through another model in DistributedDataParallel (a {type(model.module).__name__}), "
                "which is not reduced over ranks here: zero its gradients before its own step, as a GAN does, or "
                "train both models as one module in one DistributedDataParallel"
            )


@functools.cache
def _watch() -> None:
    """Once for all models: each forward pass in DDP is reported to the `Others` that is active in its thread."""

    def see(model: Any) -> None:
        if (others := getattr(_here, "others", None)) is not None:
            others.see(model)

    internals.before_each_ddp_forward(see)
