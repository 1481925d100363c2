"""What a pass may change besides gradients, to be restored after a pass that must leave no trace."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..internals import VERSION, is_expanded, own_buffers
from ..random import RandomState


class Snapshot:
    """Random states and the tensors that modules hold besides parameters, at the time when this was made."""

    def __init__(self, modules: Sequence[nn.Module], device: torch.device, others: Sequence[Tensor] = ()) -> None:
        self._others = [(tensor, tensor.clone()) for tensor in others]
        self._random = RandomState([device])
        self._tensors = [
            (place, name, tensor, tensor.detach().clone())
            for module in modules
            for place in (own_buffers(module), module.__dict__)
            for name, tensor in place.items()
            if isinstance(tensor, Tensor) and tensor.grad_fn is None and not is_expanded(tensor)
        ]
        parameters = [p for module in modules for p in module.parameters(recurse=False)]
        self._frozen = [(p, VERSION(p)) for p in parameters if not p.requires_grad]

    def add_new(self, others: Sequence[Tensor]) -> None:
        """Takes in tensors that were made since, as zeros."""
        known = {tensor for tensor, _ in self._others}
        self._others += [(tensor, torch.zeros_like(tensor)) for tensor in others if tensor not in known]

    def has_drawn_on_host(self) -> bool:
        """Whether random numbers were drawn on the host: a replay would not draw them again."""
        return self._random.has_drawn_on_host()

    def replaced(self) -> list[str]:
        """The names of tensors that were replaced by others: a replay would read the old ones again."""
        return [name for place, name, tensor, _ in self._tensors if place.get(name) is not tensor]

    def num_frozen_changed(self) -> int:
        """How many parameters that are not trained have changed. They are not copied, so this cannot be undone."""
        return sum(VERSION(p) != version for p, version in self._frozen)

    def restore(self) -> None:
        with torch.no_grad():
            for place, name, tensor, value in self._tensors:
                tensor.data.copy_(value)  # .data leaves its version: nothing has changed
                place[name] = tensor
            for tensor, value in self._others:
                tensor.copy_(value)
        self._random.restore()
