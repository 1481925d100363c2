"""Other models in DistributedDataParallel that a loss goes through: the discriminator of a GAN, a second tower.

Each of them would reduce its gradients, and broadcast its buffers, with every micro-batch, and ranks that have more
micro-batches than others would wait for ever.
"""

import functools
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ...core.errors import BigBatchWarning

_here = threading.local()


class Others:
    """Keeps other models from talking to their ranks during the passes of one that is trained.

    with others.kept_local():   # around forward and backward of a micro-batch
        …
    """

    def __init__(self, own: Any) -> None:
        self._own = own
        self._before: dict[Any, tuple[bool, bool, Any]] = {}
        self._has_told = False
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
        """Before a forward pass of any model."""
        if model is self._own or model in self._before:
            return
        is_reducing = model.require_backward_grad_sync and torch.is_grad_enabled()
        self._before[model] = model.require_backward_grad_sync, model.require_forward_param_sync, model.reducer
        model.require_backward_grad_sync = model.require_forward_param_sync = False
        model.reducer = Waiting(model.reducer)
        if is_reducing and not self._has_told and any(p.requires_grad for p in model.parameters()):
            self._has_told = True
            warnings.warn(
                f"the loss goes through another model in DistributedDataParallel (a {type(model.module).__name__}), "
                "which is not reduced over ranks here: zero its gradients before its own step, as a GAN does, or "
                "train both models as one module in one DistributedDataParallel",
                BigBatchWarning,
                stacklevel=2,
            )


class Waiting:
    """A reducer that does not rebuild its buckets for now, since that takes all ranks."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


@functools.cache
def _watch() -> None:
    """DDP has no hook that all of its instances call (torch 2.13), so its method is wrapped, once."""
    kind: Any = DistributedDataParallel
    before = kind._pre_forward

    @functools.wraps(before)
    def pre_forward(model: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and (others := getattr(_here, "others", None)) is not None:
            others.see(model)
        return before(model, *args, **kwargs)

    kind._pre_forward = pre_forward
