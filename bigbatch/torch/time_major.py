"""Recognises a batch that is cut along time, so that sequences are cut instead of samples."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..core.errors import BatchError, warn
from . import batch as nest
from .batch import BatchAxis
from .cutting import Cutting
from .internals import is_compiled, own_buffers
from .random import random_state_kept

_RECURRENT_OR_ATTENTION = (nn.RNNBase, nn.MultiheadAttention, nn.Transformer)


class _Call(NamedTuple):
    """The input of a layer."""

    layer: str
    num_steps: int
    num_samples: int | None
    """None if the input has no axis of samples: the layer treats it as one sequence."""

    def arrives(self) -> str:
        what = "one sequence" if self.num_samples is None else f"{self.num_samples} samples"
        return f"reaches {self.layer} as {self.num_steps} time steps of {what}"

    def remedy(self, batch_axis: BatchAxis) -> str:
        if self.num_samples is None:
            return "give the layer an input with an axis of samples, and batch_first=True if that axis is the first"
        if batch_axis != 0:
            return f"pass batch_axis=0 in place of batch_axis={batch_axis} if the samples are first"
        return "pass batch_axis=1, or batch_first=True to the layer if the samples are first already"


@contextmanager
def _calls_along_time(model: nn.Module, batch_axis: BatchAxis) -> Iterator[list[_Call]]:
    """Collects, inside the block, the calls of layers that may have been given a batch cut along time.

    A batch that is cut along its leading axis is right for layers whose samples come first.
    """
    calls: list[_Call] = []
    names = _layers(model)

    def record(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor | PackedSequence)), None)
        what = f"{names[layer]} ({type(layer).__name__}"
        if isinstance(x, PackedSequence):  # packed along its samples, whatever batch_first is
            calls.append(_Call(f"{what}, packed)", len(x.batch_sizes), int(x.batch_sizes[0])))
        elif x is None or x.is_nested or torch.compiler.is_compiling():
            return
        elif x.ndim == 2 and isinstance(layer, _RECURRENT_OR_ATTENTION):
            calls.append(_Call(f"{what}, which takes 2 axes for time and features)", len(x), None))
        elif x.ndim > 2 and not layer.batch_first:
            calls.append(_Call(f"{what} with batch_first=False)", x.size(0), x.size(1)))
        elif x.ndim > 2 and batch_axis != 0:
            calls.append(_Call(f"{what} with batch_first=True)", x.size(1), x.size(0)))

    handles = [layer.register_forward_pre_hook(record, with_kwargs=True) for layer in names]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _layers(model: nn.Module) -> dict[nn.Module, str]:
    """All layers with `batch_first`, by name: torch's recurrent layers and attention, and others written like them."""
    modules = list(model.named_modules())
    if any(is_compiled(module) for _, module in modules):
        return {}  # torch.compile would trace the hooks and compile the model twice
    return {
        module: name or "the model"
        for name, module in modules
        if isinstance(getattr(module, "batch_first", None), bool) and not isinstance(module, torch.jit.ScriptModule)
    }


def cut_along_time(
    run: Callable[[Any], Any], model: nn.Module, micro_batch: Any, batch_axis: BatchAxis = 0
) -> str | None:
    """Returns an error message if cutting a batch into micro-batches like this one cuts it along time; else None.

        message = cut_along_time(lambda rows: loss(model, rows), model, micro_batches[0])

    It computes the loss twice, with two numbers of rows. If the time axis of some layer has that many steps both times,
    the batch is cut along time. If the samples come first and forward transposes them, the sample axis changes
    instead. This runs without gradients, and leaves buffers and random state as they were.

    Args:
        run: Computes the loss of a micro-batch with this model; the result is not used.
        model: The model whose layers are watched.
        micro_batch: One micro-batch.
        batch_axis: Where it was cut.
    """
    calls = _calls_aside(run, model, micro_batch, batch_axis)
    call = _confirmed(calls, run, model, micro_batch, _resized(micro_batch, batch_axis), batch_axis)
    return None if call is None else _message(call, micro_batch, batch_axis)


def other_axes(batch: Any, batch_axis: BatchAxis) -> Iterator[BatchAxis]:
    """Other axes along which the samples of a batch may be, if all its tensors have one size along them.

    For models without a layer that shows it: if accumulating micro-batches cut along another axis gives the gradient
    of the batch, and accumulating those cut along `batch_axis` does not, the samples are along the other one.
    """
    own = [axis for *_, axis in nest.axes(batch, batch_axis)]
    found = [tensor for tensor in nest.tensors(batch) if tensor.ndim]
    for first in (1, 0):
        sizes = {tensor.size(first) for tensor in found if tensor.ndim > first}
        if len(sizes) == 1 and (size := sizes.pop()) > 1:
            other = nest.suggested_axes(batch, size, first)
            if [axis for *_, axis in nest.axes(batch, other)] != own:
                yield other


def _message(call: _Call, micro_batch: Any, batch_axis: BatchAxis) -> str:
    num = nest.batch_size(micro_batch, batch_axis=batch_axis)
    rows = f"{num} rows" if batch_axis == 0 else f"{num} samples by batch_axis={batch_axis}"
    return f"the batch is cut along time: a micro-batch of {rows} {call.arrives()}; {call.remedy(batch_axis)}"


def _confirmed(
    calls: list[_Call],
    run: Callable[[Any], Any],
    model: nn.Module,
    micro_batch: Any,
    other: Any,
    batch_axis: BatchAxis,
) -> _Call | None:
    """The call whose number of time steps is the number of rows, and with `other` too if that can run."""
    num_rows = nest.batch_size(micro_batch, batch_axis=batch_axis)
    suspects = [call for call in calls if call.num_steps == num_rows]
    if suspects and other is not None:
        with suppress(Exception):  # BatchNorm, say, may refuse a single row
            num_other_rows = nest.batch_size(other, batch_axis=batch_axis)
            aside = _calls_aside(run, model, other, batch_axis)
            calls = [call for call in aside if call.num_steps == num_other_rows]
            confirmed = {call._replace(num_steps=num_rows) for call in calls}
            return next((call for call in suspects if call in confirmed), None)
    # else it needs both axes of a tensor in the micro-batch, of which that of samples cannot come from the rows
    found = nest.axes(micro_batch, batch_axis)
    seconds = {
        t.size(1 if a == 0 else 0) for _, t, a in found if isinstance(t, Tensor) and a is not None and t.ndim > 1
    }
    seconds -= {1}
    fitting = [call for call in suspects if call.num_samples in seconds]
    return next((call for call in fitting if call.num_samples and call.num_samples % num_rows), None)


def _resized(micro_batch: Any, batch_axis: BatchAxis) -> Any:
    """The micro-batch without its last row, or with its only row twice; None if some tensors cannot be cut."""
    size = nest.batch_size(micro_batch, batch_axis=batch_axis)
    if len(_dense(micro_batch)) < len(nest.tensors(micro_batch)):
        return None
    if size > 1:
        return nest.map_axes(lambda t, axis: t.narrow(axis, 0, size - 1), micro_batch, batch_axis)
    return nest.map_axes(lambda t, axis: torch.cat([t, t], axis), micro_batch, batch_axis)


def _calls_aside(run: Callable[[Any], Any], model: nn.Module, micro_batch: Any, batch_axis: BatchAxis) -> list[_Call]:
    """The calls in a run on copies of the buffers, because a backward pass may still need the originals."""
    held = [(own, dict(own)) for own in map(own_buffers, model.modules()) if own]
    try:
        for own, buffers in held:
            own.update({name: None if buffer is None else buffer.clone() for name, buffer in buffers.items()})
        with random_state_kept(model), torch.no_grad(), _calls_along_time(model, batch_axis) as calls:
            run(nest.map_tensors(Tensor.clone, micro_batch))  # a loss may write into it
    finally:
        for own, buffers in held:
            own.update(buffers)
    return calls


class TimeAxis:
    """Watches the first pass of the first window with several micro-batches, to find batches cut along time.

        axis.begin(micro_batches, cutting, …)        # once a window
        if axis.is_watching:                # before its first micro-batch
            loss = axis.watched(loss)

    If the batch was cut along time, it raises BatchError before anything has changed. A `Window` of micro-batches was
    not cut: if they are weighted by their leading axis, and that is time, it warns. Batches that are cut in another
    way than along an axis are not watched.

    Args:
        model: The model whose layers are watched.
        can_run_twice: False if several ranks train the model, because a pass may wait for the other ranks.
    """

    def __init__(self, model: nn.Module, *, can_run_twice: bool) -> None:
        self._model = model
        self._can_run_twice = can_run_twice
        self._has_looked = False
        self.is_watching = False
        self._is_cut = True
        self._batch_axis: BatchAxis = 0

    @functools.cached_property
    def has_layers(self) -> bool:
        return bool(_layers(self._model))

    def begin(self, micro_batches: Sequence[Any], cutting: Cutting, *, is_cut: bool, is_counted: bool) -> None:
        """Starts a window; `is_counted` says whether a micro-batch counts by its number of samples."""
        self.is_watching = False
        is_along_axis = cutting.cut is None and (is_cut or (is_counted and cutting.num_samples is None))
        if self._has_looked or len(micro_batches) < 2 or not is_along_axis:
            return
        self._is_cut, self._batch_axis = is_cut, cutting.batch_axis
        self.is_watching = is_cut or len(set(map(_shapes, micro_batches))) > 1  # else their weights are equal

    def watched(self, loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Wraps the loss: the first call looks at the layers."""
        self.is_watching, self._has_looked = False, True

        def watched(model: nn.Module, micro_batch: Any) -> Any:
            axis = self._batch_axis
            other = _resized(micro_batch, axis) if self._can_run_twice else None  # before the loss changes it
            whole = nest.map_tensors(lambda tensor: tensor, micro_batch)
            with _calls_along_time(self._model, axis) as calls:
                found = loss(model, micro_batch)
            call = _confirmed(calls, lambda rows: loss(model, rows), self._model, whole, other, axis)
            if call is not None:
                self._report(call, whole)
            return found

        return watched

    def _report(self, call: _Call, micro_batch: Any) -> None:
        if self._is_cut:
            self._has_looked = False  # so that the next batch is refused too
            raise BatchError(_message(call, micro_batch, self._batch_axis))
        num = nest.batch_size(micro_batch, batch_axis=self._batch_axis)
        what = "leading axis" if self._batch_axis == 0 else f"axis {self._batch_axis}"
        warn(
            f"micro-batches count by their {what}, which is time: one of {num} rows {call.arrives()}; "
            f"{call.remedy(self._batch_axis)}"
        )


def _dense(micro_batch: Any) -> list[Tensor]:
    return [t for t in nest.tensors(micro_batch) if t.layout is torch.strided and not t.is_nested]


def _shapes(micro_batch: Any) -> tuple[torch.Size, ...]:
    return tuple(tensor.shape for tensor in _dense(micro_batch))
