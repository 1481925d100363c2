"""Batches on the host: each micro-batch is copied to the device while the one before it computes."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .batch import map_tensors, tensors

_NUM_SLOTS = 2


class Transfer:
    """Brings micro-batches from the host to the model's CUDA device.

        for micro_batch in transfer.arriving(micro_batches):
            backward(micro_batch)

    The device holds two micro-batches: the one that computes and the one that arrives. If a part of the batch is on the
    device already, you have placed it, and it stays as it is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots: list[_Slot] = []

    def arriving(self, micro_batches: Sequence[Any]) -> Iterator[Any]:
        """The micro-batches, on the device. A micro-batch is overwritten when the one after the next is requested."""
        if not (micro_batches and all(map(self._is_on_host, micro_batches))):
            yield from micro_batches
            return
        stream = _stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        if not self._slots:
            self._slots = [_Slot(self._device) for _ in range(_NUM_SLOTS)]
        slots = [self._slots[number % _NUM_SLOTS] for number in range(len(micro_batches))]
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
        if any(tensor.is_pinned() for tensor in tensors(micro_batches[0])):
            slots[-1].arrived.synchronize()  # the user may overwrite pinned memory once the step returns

    def brought(self, batch: Any) -> Any:
        """A batch on the device, copied at once."""
        return map_tensors(lambda t: t.to(self._device), batch) if self._is_on_host(batch) else batch

    def _is_on_host(self, batch: Any) -> bool:
        return all(tensor.is_cpu for tensor in tensors(batch) if tensor.ndim)


def transfer_for(parameters: Sequence[Tensor]) -> Transfer | None:
    """What brings batches to the parameters; None unless they are all on one CUDA device."""
    devices = {p.device for p in parameters}
    device = devices.pop()
    return Transfer(device) if device.type == "cuda" and not devices else None


class _Slot:
    """Memory on the device that holds one micro-batch after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: list[Tensor] = []
        self.arrived = torch.cuda.Event()
        self.left = torch.cuda.Event()
        """When the pass that uses this memory is done."""

    def send(self, micro_batch: Any, stream: Any) -> Any:
        """Starts the copy; the event `arrived` is when it is done."""
        sent = [tensor.detach() for tensor in tensors(micro_batch)]
        places = iter([self._place(number, tensor, stream) for number, tensor in enumerate(sent)])
        stream.wait_event(self.left)
        with torch.cuda.stream(stream):

            def copied(tensor: Tensor) -> Tensor:
                place = next(places)
                if place is None:
                    return tensor.to(self._device)
                return place.copy_(tensor if tensor.is_pinned() else _pinned(tensor), non_blocking=True)

            brought = map_tensors(copied, micro_batch)
            self.arrived.record(stream)
        return brought

    def _place(self, number: int, tensor: Tensor, stream: Any) -> Tensor | None:
        """Where this tensor goes; None if it is sparse or nested, which gets memory of its own."""
        while len(self._memory) <= number:
            self._memory.append(torch.empty(0, device=self._device))
        if tensor.layout is not torch.strided or tensor.is_nested:
            return None
        memory = self._memory[number]
        if memory.dtype != tensor.dtype or memory.numel() < tensor.numel():
            memory.record_stream(stream)  # a copy into it may not be finished
            memory = self._memory[number] = torch.empty(tensor.numel(), dtype=tensor.dtype, device=self._device)
            stream.wait_stream(torch.cuda.current_stream(self._device))  # its previous owner may still use it
        like = torch.empty_like(tensor, device="meta")  # dense, with the same order of axes
        return memory[: tensor.numel()].as_strided(like.size(), like.stride()).detach()


def _pinned(tensor: Tensor) -> Tensor:
    """A dense copy: `Tensor.pin_memory` also copies the gaps between elements, and fails for expanded tensors."""
    return torch.empty_like(tensor, pin_memory=True).copy_(tensor)


@functools.cache
def _stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)
