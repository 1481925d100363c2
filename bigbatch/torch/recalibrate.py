"""Running statistics of BatchNorm from a whole stream of batches, for evaluation."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..core.errors import BatchError, OptionError, warn
from ..core.options import check_callable
from ..core.weight import share
from .batch_norm import add_statistics, over_ranks, wide_dtype
from .internals import BatchNorm, uncompiled
from .random import RandomState, cuda_devices_of
from .transfer import transfer_for

Forward = Callable[[Any, Any], Any]


def recalibrate(model: nn.Module, batches: Iterable[Any], forward: Forward | None = None) -> None:
    """Gives every BatchNorm layer the mean and variance of its input over all batches, whatever their sizes.

        recalibrate(model, loader)

    stands for

        model.eval()
        for layer in batch_norms_of(model):                       # in the order in which they run
            x = torch.cat([input_of(layer, batch) for batch in loader])
            layer.running_mean, layer.running_var = x.mean(…), x.var(…)

    Each layer gets its statistics while the layers before it use theirs, as they will in evaluation. That is why the
    result does not depend on how the data is cut, and why it takes a pass over the data for each layer (which ends at
    that layer). Everything runs in eval mode, without gradients. Random state and other buffers are left as they were,
    and after an error the running statistics too. `num_batches_tracked` does not change.

    With DistributedDataParallel every rank calls this with its own batches, and all get the statistics of all.

    Args:
        model: The model.
        batches: The batches, the same ones each time it is iterated: a list or a DataLoader. They are moved to the
            model's device.
        forward: `forward(model, batch)` runs the model; `model(batch)` if it is left out.
    """
    check_callable("forward", forward)
    inner: Any = uncompiled(model)
    group = inner.process_group if isinstance(inner, nn.parallel.DistributedDataParallel) else None
    inner = uncompiled(inner.module) if group is not None else inner
    layers = _layers(inner, batches)
    run = _Run(inner, layers, batches, forward or _call)
    with _aside(inner, layers):
        statistics = run.first()
        order = _agreed(list(run.order), group)
        for number, name in enumerate(order):
            layer = layers[name]
            state = statistics.get(name, run.empty(layer)) if number == 0 else run.of(name)
            if group is not None:
                state = torch.stack(over_ranks(state, lambda tensor: dist.all_reduce(tensor, group=group)))
            _write(layer, name, state)
        if not order:
            raise BatchError("no BatchNorm layer has run: pass at least one batch, and a forward that runs the model")


def _layers(model: nn.Module, batches: Any) -> dict[str, Any]:
    if any(hasattr(module, "set_requires_gradient_sync") for module in model.modules()):
        raise OptionError(
            "the model is in fully_shard, whose ranks run each pass together to its end: recalibrate a whole copy of "
            "the model, made from its full state dict"
        )
    own = {name: module for name, module in model.named_modules() if isinstance(module, BatchNorm)}
    layers = {name: module for name, module in own.items() if module.running_mean is not None}
    if not layers:
        raise OptionError("the model has no BatchNorm layer with running statistics: there is nothing to recalibrate")
    if len(layers) > 1 and isinstance(batches, Iterator):
        raise OptionError(
            f"batches is a {type(batches).__name__}, which can be read once, but {len(layers)} BatchNorm layers take a "
            "pass each: pass a list or a DataLoader"
        )
    if len(layers) < len(own):
        others = [name for name in own if name not in layers]
        warn(
            f"{len(others)} of {len(own)} BatchNorm layers ({others[0]} first) have no running statistics and "
            "normalise by the batch in evaluation too, so the statistics of layers behind them depend on the batch size"
        )
    return layers


class _Reached(BaseException):
    """Ends a pass at the layer that it was for. No `except Exception` in a model keeps it."""


class _Run:
    """Passes over the data, and what reaches the layers in them."""

    def __init__(self, model: nn.Module, layers: dict[str, Any], batches: Iterable[Any], forward: Forward) -> None:
        self._model, self._layers, self._batches, self._forward = model, layers, batches, forward
        self._transfer = transfer_for(list(model.parameters()))
        self._random = RandomState(cuda_devices_of(model))
        self.order: dict[str, int] = {}
        """The layers in the order in which they run, with how often at most in one pass."""

    def empty(self, layer: Any) -> Tensor:
        mean = layer.running_mean
        return torch.zeros(3, mean.numel(), dtype=wide_dtype(mean.device), device=mean.device)

    def first(self) -> dict[str, Tensor]:
        """Sees which layers run; returns the statistics of the one that runs first."""
        statistics: dict[str, Tensor] = {}
        calls: Counter[str] = Counter()

        def look(name: str, x: Tensor) -> None:
            calls[name] += 1
            self.order[name] = max(self.order.get(name, 0), calls[name])
            if name == next(iter(self.order)):
                self._add(statistics.setdefault(name, self.empty(self._layers[name])), x)

        for _ in self._passes(look, list(self._layers)):
            calls.clear()
        return statistics

    def of(self, name: str) -> Tensor:
        """The statistics of one layer."""
        state = self.empty(self._layers[name])
        is_last_call = self.order.get(name) == 1

        def look(_: str, x: Tensor) -> None:
            self._add(state, x)
            if is_last_call:
                raise _Reached

        for _ in self._passes(look, [name]):
            pass
        return state

    def _passes(self, look: Callable[[str, Tensor], None], names: list[str]) -> Iterator[None]:
        """Runs the model on every batch. Random numbers are the same in every pass over the data."""
        self._random.restore()
        handles = [
            self._layers[name].register_forward_pre_hook(
                lambda _, args, kwargs, name=name: look(name, args[0] if args else next(iter(kwargs.values()))),
                with_kwargs=True,
            )
            for name in names
        ]
        try:
            for batch in self._batches:
                with suppress(_Reached):
                    self._forward(self._model, batch if self._transfer is None else self._transfer.brought(batch))
                yield
        finally:
            for handle in handles:
                handle.remove()
            self._random.restore()

    def _add(self, state: Tensor, x: Tensor) -> None:
        values = x.to(state.dtype).transpose(0, 1).flatten(1)
        var, mean = torch.var_mean(values, 1, correction=0)
        add_statistics(state, mean, var, state.new_tensor(values.size(1)), state.new_zeros(()))


def _call(model: Any, batch: Any) -> Any:
    if isinstance(batch, tuple | list | dict):
        raise BatchError(
            f"a batch is a {type(batch).__name__}, and recalibrate() does not know what of it the model takes: pass "
            "forward=lambda model, batch: model(batch[0]), for example"
        )
    return model(batch)


def _agreed(order: list[str], group: Any) -> list[str]:
    """The same order on all ranks: some may have no data."""
    if group is None:
        return order
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, order, group=group)
    longest: list[str] = max(found, key=len)
    return longest


def _write(layer: Any, name: str, state: Tensor) -> None:
    count, mean, squares = state.unbind()
    num = int(count.min())
    if num < 2:
        raise BatchError(f"the layer {name} has seen {num} values per channel: a variance takes 2 or more")
    var = share(squares, count - 1, torch.where)
    if not bool(torch.isfinite(mean).all() and torch.isfinite(var).all()):
        raise BatchError(f"what reaches the layer {name} is not finite: look for it in the batches and in the model")
    layer.running_mean.copy_(mean)
    layer.running_var.copy_(var)


@contextmanager
def _aside(model: nn.Module, layers: dict[str, Any]) -> Iterator[None]:
    """In eval mode, without gradients and compiled code; restores all but the running statistics of the layers."""
    was_training = {module: module.training for module in model.modules()}
    running = [(b, b.clone()) for layer in layers.values() for b in (layer.running_mean, layer.running_var)]
    written = {b for b, _ in running}
    others = [(b, b.clone()) for b in model.buffers() if b not in written]
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        try:
            for module in was_training:
                module.training = False
            yield
        except BaseException:
            others += running
            raise
        finally:
            for module, training in was_training.items():
                module.training = training
            for buffer, value in others:
                buffer.copy_(value)
