"""A batch that is on the host: each micro-batch is copied to the device while the one before it computes."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from . import batch as nest

NUM_SLOTS = 2


class Transfer:
    """Brings micro-batches from the host to the CUDA device that the model is on.

    The device holds two micro-batches: the one that computes and the one that arrives. A batch of which a part is on
    the device already was placed by somebody who knows, and stays as it is.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        devices = {p.device for p in parameters}
        device = devices.pop()
        self._device = device if device.type == "cuda" and not devices else None
        self._slots: list[Slot] = []

    def arriving(self, micro_batches: Sequence[Any]) -> Iterator[Any]:
        """The micro-batches, on the device. One is there until the next but one is asked for."""
        if not (micro_batches and all(map(self._is_on_host, micro_batches))):
            yield from micro_batches
            return
        assert self._device is not None
        stream = _stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        if not self._slots:
            self._slots = [Slot(self._device) for _ in range(NUM_SLOTS)]
        slots = [self._slots[number % NUM_SLOTS] for number in range(len(micro_batches))]
        sent = slots[0].send(micro_batches[0], stream)
        for number, slot in enumerate(slots):
            micro_batch = sent
            if number + 1 < len(slots):
                sent = slots[number + 1].send(micro_batches[number + 1], stream)
            current = torch.cuda.current_stream(self._device)
            current.wait_event(slot.arrived)
            try:
                yield micro_batch
            finally:
                slot.left.record(current)
        if any(tensor.is_pinned() for tensor in nest.tensors(micro_batches[0])):
            slots[-1].arrived.synchronize()  # whoever passed pinned memory may write to it once the step returns

    def brought(self, batch: Any) -> Any:
        """The same at once, for what is needed only now and then."""
        return nest.map_tensors(lambda t: t.to(self._device), batch) if self._is_on_host(batch) else batch

    def _is_on_host(self, batch: Any) -> bool:
        return self._device is not None and all(tensor.is_cpu for tensor in nest.tensors(batch) if tensor.ndim)


class Slot:
    """Memory of the device for one micro-batch after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: list[Tensor] = []
        self.arrived = torch.cuda.Event()
        self.left = torch.cuda.Event()
        """When the pass that used what is here is done with it."""

    def send(self, micro_batch: Any, stream: Any) -> Any:
        """Starts the copy; `arrived` is when it is done."""
        tensors = [tensor.detach() for tensor in nest.tensors(micro_batch)]
        places = iter([self._place(number, tensor, stream) for number, tensor in enumerate(tensors)])
        stream.wait_event(self.left)
        with torch.cuda.stream(stream):

            def copied(tensor: Tensor) -> Tensor:
                place = next(places)
                if place is None:
                    return tensor.to(self._device)
                return place.copy_(tensor if tensor.is_pinned() else pinned(tensor), non_blocking=True)

            brought = nest.map_tensors(copied, micro_batch)
            self.arrived.record(stream)
        return brought

    def _place(self, number: int, tensor: Tensor, stream: Any) -> Tensor | None:
        """Where this tensor goes; None if it has a layout that cannot be put anywhere."""
        while len(self._memory) <= number:
            self._memory.append(torch.empty(0, device=self._device))
        if tensor.layout is not torch.strided or tensor.is_nested:
            return None
        memory = self._memory[number]
        if memory.dtype != tensor.dtype or memory.numel() < tensor.numel():
            memory.record_stream(stream)  # a copy into it may not be done
            memory = self._memory[number] = torch.empty(tensor.numel(), dtype=tensor.dtype, device=self._device)
            stream.wait_stream(torch.cuda.current_stream(self._device))  # somebody may have had this memory before
        like = torch.empty_like(tensor, device="meta")  # dense, with the order of its axes
        return memory[: tensor.numel()].as_strided(like.size(), like.stride()).detach()


def pinned(tensor: Tensor) -> Tensor:
    """A dense copy: `Tensor.pin_memory` would copy the gaps of a tensor too, and cannot copy an expanded one."""
    return torch.empty_like(tensor, pin_memory=True).copy_(tensor)


@functools.cache
def _stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)
