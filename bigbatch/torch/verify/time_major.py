"""Recognises a time-major batch: its leading axis is time, so cutting it cuts sequences instead of samples."""

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ...core.errors import BatchError, BigBatchWarning
from ...core.window import cuts
from .. import batch as nest

RECURRENT_OR_ATTENTION = (nn.RNNBase, nn.MultiheadAttention, nn.Transformer)


class Call(NamedTuple):
    """The input of a layer whose leading axis is time."""

    layer: str
    num_steps: int
    num_samples: int | None
    """None if the input has no axis of samples: the layer takes it for one sequence."""

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
def time_major_calls(model: nn.Module) -> Iterator[list[Call]]:
    """Inside, notes what every layer that has its leading axis for time is called with."""
    calls: list[Call] = []
    handles = [
        module.register_forward_pre_hook(_noting(calls, name or "the model", module), with_kwargs=True)
        for name, module in _layers(model)
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Those with `batch_first`, as torch's recurrent layers and attention have it, and layers that follow them."""
    modules = list(model.named_modules())
    if any(hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) is not None for _, m in modules):
        return []  # torch.compile would trace the hooks and compile the model twice
    return [
        (name, module)
        for name, module in modules
        if isinstance(getattr(module, "batch_first", None), bool) and not isinstance(module, torch.jit.ScriptModule)
    ]


def _noting(calls: list[Call], name: str, layer: Any) -> Callable[..., None]:
    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor | PackedSequence)), None)
        if isinstance(x, PackedSequence):  # its axis of samples is the one it was packed along, whatever batch_first is
            num_steps, num_samples = len(x.batch_sizes), int(x.batch_sizes[0])
            calls.append(Call(f"{name} ({type(layer).__name__}, packed)", num_steps, num_samples))
            return
        if x is None or x.is_nested or torch.compiler.is_compiling():
            return
        if x.ndim == 2 and isinstance(layer, RECURRENT_OR_ATTENTION):
            calls.append(
                Call(f"{name} ({type(layer).__name__}, which takes 2 axes for time and features)", len(x), None)
            )
        elif x.ndim > 2 and not layer.batch_first:
            calls.append(Call(f"{name} ({type(layer).__name__} with batch_first=False)", x.size(0), x.size(1)))

    return note


def cut_along_time(run: Callable[[Any], Any], model: nn.Module, micro_batch: Any) -> str | None:
    """Says so in a sentence if cutting a batch into micro-batches like this one cuts along time; else None.

    `run(micro_batch)` computes the loss with this model; its result is not used. It runs twice, with two numbers of
    rows: the batch is cut along time if the axis of time of some layer has that many steps both times. A batch whose
    samples come first, transposed in forward, changes the axis of samples instead. So:

        sentence = cut_along_time(lambda rows: loss(model, rows), model, micro_batches[0])

    Gradients are off meanwhile; buffers and torch's random state are left as they were.
    """
    whole, other = nest.map_tensors(lambda tensor: tensor, micro_batch), _resized(micro_batch)
    with time_major_calls(model) as calls:
        _run_aside(run, model, whole)
    found = _confirmed(calls, run, model, micro_batch, other)
    return None if found is None else _sentence(found, micro_batch)


def cut_along_axis_1(batch: Any, micro_batch_size: int) -> list[Any] | None:
    """Micro-batches of so many columns, for a trial: are these the samples? None if the batch has no such axis.

    For a time-major model without any layer that would show it. If accumulating these micro-batches, each weighted by
    its number of columns, gives the gradient of the batch, and accumulating its rows does not, then it is time-major.
    """
    sizes = {tensor.size(1) for tensor in nest.tensors(batch) if tensor.ndim > 1}
    if len(sizes) != 1 or (size := sizes.pop()) < 2:
        return None
    return [
        nest.map_tensors(lambda t: t[:, part] if t.ndim > 1 else t, batch)  # noqa: B023 - called at once
        for part in cuts(size, micro_batch_size)
    ]


def _sentence(call: Call, micro_batch: Any) -> str:
    rows = nest.batch_size(micro_batch)
    return f"the batch is cut along time: a micro-batch of {rows} rows {call.arrives()}; {call.remedy()}"


def _confirmed(
    calls: list[Call], run: Callable[[Any], Any], model: nn.Module, micro_batch: Any, other: Any
) -> Call | None:
    """The call whose number of time steps is the number of rows, and still is with another number of rows."""
    num_rows = nest.batch_size(micro_batch)
    suspects = [call for call in calls if call.num_steps == num_rows]
    if not suspects or other is None:
        return _by_its_shape(suspects, micro_batch)
    num_other_rows = nest.batch_size(other)
    with time_major_calls(model) as calls:
        try:
            _run_aside(run, model, other)
        except Exception:  # BatchNorm, say, may refuse a single row
            return _by_its_shape(suspects, micro_batch)
    confirmed = {call._replace(num_steps=num_rows) for call in calls if call.num_steps == num_other_rows}
    return next((call for call in suspects if call in confirmed), None)


def _by_its_shape(suspects: list[Call], micro_batch: Any) -> Call | None:
    """The call that has both axes of a tensor of the micro-batch, if the second cannot be the samples."""
    rows = nest.batch_size(micro_batch)
    seconds = {tensor.size(1) for tensor in _dense(micro_batch) if tensor.ndim > 1} - {1}
    fitting = [call for call in suspects if call.num_steps == rows and call.num_samples in seconds]
    return next((call for call in fitting if call.num_samples and call.num_samples % rows), None)


def _resized(micro_batch: Any) -> Any:
    """The same without its last row, or two of it if there is only one; None if its tensors cannot be cut."""
    size = nest.batch_size(micro_batch)
    if len(_dense(micro_batch)) < len(nest.tensors(micro_batch)):
        return None
    if size > 1:
        return nest.map_tensors(lambda t: t.narrow(0, 0, size - 1) if t.ndim else t, micro_batch)
    return nest.map_tensors(lambda t: torch.cat([t, t]) if t.ndim else t, micro_batch)


def _run_aside(run: Callable[[Any], Any], model: nn.Module, micro_batch: Any) -> None:
    """With copies of the buffers: a backward pass may still need the originals as they are."""
    held = [(module._buffers, dict(module._buffers)) for module in model.modules() if module._buffers]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    try:
        for own, buffers in held:
            own.update({name: None if buffer is None else buffer.clone() for name, buffer in buffers.items()})
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            run(nest.map_tensors(Tensor.clone, micro_batch))  # a loss may write into it
    finally:
        for own, buffers in held:
            own.update(buffers)


class TimeAxis:
    """Looks at the first pass of the first window that has several micro-batches.

    A batch that was cut along time is refused before anything has changed. A window of micro-batches was not cut, but
    where they count by their leading axis, a warning says that this is time.

    axis.begin(micro_batches, …)        # once a window
    loss = axis.watched(loss)           # once a micro-batch; the loss itself but for the first
    """

    def __init__(self, model: nn.Module, *, can_run_twice: bool) -> None:
        self._model = model
        self._can_run_twice = can_run_twice
        """Not where several ranks train the model: a pass may wait for the other ranks."""
        self._has_looked = False
        """Once is enough."""
        self._is_watching = False
        self._is_cut = True

    @functools.cached_property
    def _has_layers(self) -> bool:
        return bool(_layers(self._model))

    def begin(self, micro_batches: Sequence[Any], *, is_cut: bool, is_counted: bool) -> None:
        """`is_counted` if the weight of a micro-batch is the size of its leading axis."""
        self._is_watching = False
        if self._has_looked or len(micro_batches) < 2 or not (is_cut or is_counted) or not self._has_layers:
            return
        self._is_cut = is_cut
        self._is_watching = is_cut or len(set(map(_shapes, micro_batches))) > 1  # else their weights are equal anyway

    def watched(self, loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        if not self._is_watching:
            return loss
        self._is_watching, self._has_looked = False, True

        def watched(model: nn.Module, micro_batch: Any) -> Any:
            other = _resized(micro_batch)  # before the loss takes something out of it
            whole = nest.map_tensors(lambda tensor: tensor, micro_batch)
            with time_major_calls(self._model) as calls:
                found = loss(model, micro_batch)
            if self._can_run_twice:
                call = _confirmed(calls, lambda rows: loss(model, rows), self._model, whole, other)
            else:
                call = _by_its_shape(calls, whole)
            if call is not None:
                self._tell(call, whole)
            return found

        return watched

    def _tell(self, call: Call, micro_batch: Any) -> None:
        if self._is_cut:
            self._has_looked = False  # the next batch is refused too
            raise BatchError(_sentence(call, micro_batch))
        warnings.warn(
            f"micro-batches count by their leading axis, which is time: one of {nest.batch_size(micro_batch)} rows "
            f"{call.arrives()}; pass weight=…, for example weight=lambda batch: batch[0].size(1), or {call.remedy()}",
            BigBatchWarning,
            stacklevel=7,
        )


def _dense(micro_batch: Any) -> list[Tensor]:
    return [t for t in nest.tensors(micro_batch) if t.layout is torch.strided and not t.is_nested]


def _shapes(micro_batch: Any) -> tuple[torch.Size, ...]:
    return tuple(tensor.shape for tensor in _dense(micro_batch))
