"""Recognises a time-major batch: its leading axis is time, so cutting it cuts sequences instead of samples."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..core.errors import BatchError, warn
from ..core.window import cuts
from . import batch as nest
from .internals import is_compiled, own_buffers
from .random import random_state_kept

_RECURRENT_OR_ATTENTION = (nn.RNNBase, nn.MultiheadAttention, nn.Transformer)


class _Call(NamedTuple):
    """The input of a layer whose leading axis is time."""

    layer: str
    num_steps: int
    num_samples: int | None
    """None if the input has no axis of samples: the layer treats it as one sequence."""

    def arrives(self) -> str:
        what = "one sequence" if self.num_samples is None else f"{self.num_samples} samples"
        return f"reaches {self.layer} as {self.num_steps} time steps of {what}"

    def remedy(self) -> str:
        if self.num_samples is None:
            return "give the layer an input with an axis of samples, and batch_first=True if that axis is the first"
        return (
            "put the samples first (x.transpose(0, 1) in the collate function, and back in forward), or pass "
            "batch_first=True if they are first already"
        )


@contextmanager
def _time_major_calls(model: nn.Module) -> Iterator[list[_Call]]:
    """Collects, inside the block, the calls of layers whose leading axis is time."""
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


def cut_along_time(run: Callable[[Any], Any], model: nn.Module, micro_batch: Any) -> str | None:
    """Returns an error message if cutting a batch into micro-batches like this one cuts it along time; else None.

        message = cut_along_time(lambda rows: loss(model, rows), model, micro_batches[0])

    It computes the loss twice, with two numbers of rows. If the time axis of some layer has that many steps both times,
    the batch is cut along time. If the samples come first and forward transposes them, the sample axis changes
    instead. This runs without gradients, and leaves buffers and random state as they were.

    Args:
        run: Computes the loss of a micro-batch with this model; the result is not used.
        model: The model whose layers are watched.
        micro_batch: One micro-batch.
    """
    calls = _calls_aside(run, model, micro_batch)
    call = _confirmed(calls, run, model, micro_batch, _resized(micro_batch))
    return None if call is None else _message(call, micro_batch)


def cut_along_axis_1(batch: Any, micro_batch_size: int) -> list[Any] | None:
    """Cuts a batch along its second axis, to test whether that is the axis of samples; None if it has no such axis.

    For time-major models without a layer that shows it: if accumulating these micro-batches gives the gradient of the
    batch, and accumulating its rows does not, the batch is time-major.
    """
    sizes = {tensor.size(1) for tensor in nest.tensors(batch) if tensor.ndim > 1}
    if len(sizes) != 1 or (size := sizes.pop()) < 2:
        return None
    return [
        nest.map_tensors(lambda t: t[:, part] if t.ndim > 1 else t, batch)  # noqa: B023 - called at once
        for part in cuts(size, micro_batch_size)
    ]


def _message(call: _Call, micro_batch: Any) -> str:
    rows = nest.batch_size(micro_batch)
    return f"the batch is cut along time: a micro-batch of {rows} rows {call.arrives()}; {call.remedy()}"


def _confirmed(
    calls: list[_Call], run: Callable[[Any], Any], model: nn.Module, micro_batch: Any, other: Any
) -> _Call | None:
    """The call whose number of time steps is the number of rows, and with `other` too if that can run."""
    num_rows = nest.batch_size(micro_batch)
    suspects = [call for call in calls if call.num_steps == num_rows]
    if suspects and other is not None:
        with suppress(Exception):  # BatchNorm, say, may refuse a single row
            num_other_rows = nest.batch_size(other)
            calls = [call for call in _calls_aside(run, model, other) if call.num_steps == num_other_rows]
            confirmed = {call._replace(num_steps=num_rows) for call in calls}
            return next((call for call in suspects if call in confirmed), None)
    # else it needs both axes of a tensor in the micro-batch, of which that of samples cannot come from the rows
    seconds = {tensor.size(1) for tensor in _dense(micro_batch) if tensor.ndim > 1} - {1}
    fitting = [call for call in suspects if call.num_samples in seconds]
    return next((call for call in fitting if call.num_samples and call.num_samples % num_rows), None)


def _resized(micro_batch: Any) -> Any:
    """The micro-batch without its last row, or with its only row twice; None if some tensors cannot be cut."""
    size = nest.batch_size(micro_batch)
    if len(_dense(micro_batch)) < len(nest.tensors(micro_batch)):
        return None
    if size > 1:
        return nest.map_tensors(lambda t: t.narrow(0, 0, size - 1) if t.ndim else t, micro_batch)
    return nest.map_tensors(lambda t: torch.cat([t, t]) if t.ndim else t, micro_batch)


def _calls_aside(run: Callable[[Any], Any], model: nn.Module, micro_batch: Any) -> list[_Call]:
    """The calls in a run on copies of the buffers, because a backward pass may still need the originals."""
    held = [(own, dict(own)) for own in map(own_buffers, model.modules()) if own]
    try:
        for own, buffers in held:
            own.update({name: None if buffer is None else buffer.clone() for name, buffer in buffers.items()})
        with random_state_kept(model), torch.no_grad(), _time_major_calls(model) as calls:
            run(nest.map_tensors(Tensor.clone, micro_batch))  # a loss may write into it
    finally:
        for own, buffers in held:
            own.update(buffers)
    return calls


class TimeAxis:
    """Watches the first pass of the first window with several micro-batches, to find batches cut along time.

        axis.begin(micro_batches, …)        # once a window
        if axis.is_watching:                # before its first micro-batch
            loss = axis.watched(loss)

    If the batch was cut along time, it raises BatchError before anything has changed. A `Window` of micro-batches was
    not cut: if they are weighted by their leading axis, and that is time, it warns.

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

    @functools.cached_property
    def has_layers(self) -> bool:
        return bool(_layers(self._model))

    def begin(self, micro_batches: Sequence[Any], *, is_cut: bool, is_counted: bool) -> None:
        """Starts a window; `is_counted` says whether a micro-batch counts by the size of its leading axis."""
        self.is_watching = False
        if self._has_looked or len(micro_batches) < 2 or not (is_cut or is_counted):
            return
        self._is_cut = is_cut
        self.is_watching = is_cut or len(set(map(_shapes, micro_batches))) > 1  # else their weights are equal

    def watched(self, loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Wraps the loss: the first call looks at the layers."""
        self.is_watching, self._has_looked = False, True

        def watched(model: nn.Module, micro_batch: Any) -> Any:
            other = _resized(micro_batch) if self._can_run_twice else None  # before the loss changes it
            whole = nest.map_tensors(lambda tensor: tensor, micro_batch)
            with _time_major_calls(self._model) as calls:
                found = loss(model, micro_batch)
            call = _confirmed(calls, lambda rows: loss(model, rows), self._model, whole, other)
            if call is not None:
                self._report(call, whole)
            return found

        return watched

    def _report(self, call: _Call, micro_batch: Any) -> None:
        if self._is_cut:
            self._has_looked = False  # so that the next batch is refused too
            raise BatchError(_message(call, micro_batch))
        warn(
            f"micro-batches count by their leading axis, which is time: one of {nest.batch_size(micro_batch)} rows "
            f"{call.arrives()}; pass weight=…, for example weight=lambda batch: batch[0].size(1), or {call.remedy()}"
        )


def _dense(micro_batch: Any) -> list[Tensor]:
    return [t for t in nest.tensors(micro_batch) if t.layout is torch.strided and not t.is_nested]


def _shapes(micro_batch: Any) -> tuple[torch.Size, ...]:
    return tuple(tensor.shape for tensor in _dense(micro_batch))
