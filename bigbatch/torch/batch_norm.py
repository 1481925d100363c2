"""BatchNorm under accumulation: running statistics are updated once per step, with those of the whole batch."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..core import batch as core_batch
from ..core import moments
from ..core.errors import CaptureError, OrderError, StateError, warn
from ..core.moments import Moments
from ..core.options import Option, check_choice
from ..core.weight import share
from .distributed.ranks import Ranks
from .internals import VERSION, BatchNorm, batch_norm_into, has_plain_forward, is_in_backward, own_buffers

_Row = tuple[Tensor, Tensor, Tensor]
Mode = Literal["batch", "micro_batch", "frozen"]


REMEDY = 'pass batch_norm="frozen"'
_REMEDY_WITHOUT_STATISTICS = "make them with track_running_stats=True and freeze them"


def check_mode(name: str, value: Any) -> Any:
    return check_choice(name, value, ("batch", "micro_batch", "frozen"))


class BatchNorms:
    """The BatchNorm layers of a model, in the passes of a window.

        with batch_norms.window(is_new=True):           # restores everything at the end, also after an error
            for micro_batch in window:
                batch_norms.begin()                     # forgets passes that do not count
                loss(model, micro_batch)                # each layer leaves mean and variance of this pass
                batch_norms.pool()                      # adds them to those of the window, call by call
                …
        batch_norms.finish()
        # for each call in a pass: running = (1 - momentum) * running + momentum * pooled, over all ranks

    While a layer runs, it writes to memory of its own instead of its buffers, with momentum 1: the kernel that
    normalises leaves the statistics there, so that nothing is computed twice. All layers are then pooled together, in
    float64, by operations that a CUDA graph can record. Outside of its own forward, a layer has its usual buffers.

    Args:
        model: The model.
        batch_norm: What happens to running statistics, see `Accumulator`.
        ranks: The ranks that train the model together.
    """

    batch_norm = Option(check_mode)

    def __init__(self, model: nn.Module, batch_norm: Mode, ranks: Ranks) -> None:
        self.batch_norm = batch_norm
        self._model = model
        self._layers = [_Layer(module, name) for module, name in _named(model)]
        self.has_layers = bool(self._layers)
        self.is_watching = False
        self._is_replicated = any(isinstance(module, nn.DataParallel) for module in model.modules())
        self._ranks = ranks
        self._groups: list[_Group] = []
        self._has_run = False
        self._has_warned = self._has_warned_of_unseen = False

    def __getstate__(self) -> dict[str, Any]:
        """A copy has layers of its own, and the statistics of the window that is open."""
        layers = [(layer.module, layer.name) for layer in self._layers]
        return {**vars(self), "is_watching": False, "_layers": layers, "_groups": self.state()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update({**state, "_groups": []})
        self._layers = [_Layer(*layer) for layer in state["_layers"]]
        self.load(state["_groups"])

    # --- what is known before a window --------------------------------------------------------------------

    def normalising(self) -> list[str]:
        """The names of the layers that normalise by the micro-batch they are given."""
        return [layer.name for layer in self._normalising()]

    def _normalising(self) -> "list[_Layer]":
        self.refresh()
        is_frozen = self.batch_norm == "frozen"
        return [layer for layer in self._layers if _normalises_by_batch(layer.module, is_frozen=is_frozen)]

    def refresh(self) -> None:
        """Lists the layers again if the user has replaced some. A model that began with none is not looked at again."""
        if not self.has_layers:
            return
        modules = [module for module in self._model.modules() if isinstance(module, BatchNorm)]
        if modules != [layer.module for layer in self._layers]:
            known = {layer.module: layer for layer in self._layers}
            self._layers = [known.get(module) or _Layer(module, name) for module, name in _named(self._model)]

    def warn(self, num_micro_batches: int) -> None:
        """Warns once, before the first window of several micro-batches that some layers normalise one by one."""
        if num_micro_batches > 1 and not self._has_warned:
            layers = self._normalising()
            has_statistics = any(layer.module.running_mean is not None for layer in layers)
            self._has_warned = core_batch.warn_of_batch_norm(
                [layer.name for layer in layers],
                REMEDY if has_statistics else _REMEDY_WITHOUT_STATISTICS,
                has_pooled_statistics=has_statistics and self.batch_norm == "batch",
            )

    # --- a window -----------------------------------------------------------------------------------------

    @contextmanager
    def window(self, *, is_new: bool) -> Iterator[None]:
        """Around all passes of a window."""
        if is_new:
            self.start()
        with self.watching():
            yield

    def start(self) -> None:
        """Starts a window."""
        if self.batch_norm != "batch":
            return
        watchable = [layer for layer in self._layers if layer.is_watchable()]
        if {layer for group in self._groups for layer in group.layers if layer.is_current()} != set(watchable):
            kinds: dict[Any, list[_Layer]] = {}
            for layer in watchable:
                mean = layer.module.running_mean
                kinds.setdefault((mean.device, mean.dtype), []).append(layer)
            self._groups = [_Group(layers) for layers in kinds.values()]
        for group in self._groups:
            group.clear()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around passes: the layers leave their statistics with us, or behave as in eval mode."""
        if self.batch_norm == "micro_batch" or self.is_watching:
            yield
        elif self.batch_norm == "frozen":
            with self._frozen():
                yield
        else:
            layers = [layer for group in self._groups for layer in group.layers]
            before = [(layer, layer.num_tracked()) for layer in self._layers]
            for layer in () if self._is_replicated else layers:
                layer.watch()
            self.is_watching = True
            try:
                yield
            finally:
                self.is_watching = False
                for layer in () if self._is_replicated else layers:
                    layer.unwatch()
            if not self._has_warned_of_unseen:
                self._warn_of_unseen([layer.name for layer, then in before if layer.num_tracked() != then])

    @contextmanager
    def _frozen(self) -> Iterator[None]:
        frozen = [
            layer.module for layer in self._layers if layer.module.training and layer.module.running_mean is not None
        ]
        for module in frozen:
            module.training = False
        try:
            yield
            if thawed := [module for module in frozen if module.training]:
                raise OrderError(
                    f"train() was called during a pass, which put {len(thawed)} of {len(frozen)} frozen BatchNorm "
                    'layers back into training mode: call it between steps, or leave out batch_norm="frozen"'
                )
        finally:
            for module in frozen:
                module.training = True

    def _warn_of_unseen(self, names: Sequence[str]) -> None:
        if names:
            self._has_warned_of_unseen = True
            which = f"layers ({names[0]} first)" if len(names) > 1 else f"layer ({names[0]})"
            warn(
                f"{len(names)} BatchNorm {which} updated running statistics with every micro-batch, because bigbatch "
                "cannot pool what compiled or replicated code runs, or a lazy layer in its first window: call "
                'recalibrate(model, batches) before evaluation, or pass batch_norm="micro_batch" if this is what you '
                "want"
            )

    @contextmanager
    def passing(self, *, is_first: bool) -> Iterator[None]:
        """Around one micro-batch of `micro_batch()`."""
        self.refresh()
        if is_first:
            self.start()
        self.begin()
        with self.watching():
            yield

    def close(self, *, has_window: bool, is_counted: bool) -> None:
        """At the end of a window of `micro_batch()`; this rank may have none."""
        if not has_window:
            self.refresh()
            self.start()
        if is_counted:
            self.finish()

    # --- a pass -------------------------------------------------------------------------------------------

    def begin(self, *, continues: bool = False) -> None:
        """Before a pass: forgets what layers have left since the last one, in a pass that does not count.

        With `continues` it is the rest of a pass: the calls that are already pooled are the first ones of it.
        """
        for group in self._groups:
            group.begin(continues=continues)

    def pool(self) -> None:
        """After a pass: adds the statistics that layers have left to those of the window."""
        for group in self._groups:
            self._has_run |= group.pool()

    def finish(self) -> None:
        """At the end of a window: updates the running statistics, with those of all ranks."""
        if self.batch_norm != "batch" or not (self._has_run or self._ranks.is_distributed):
            return
        num_calls = max((len(group.states) for group in self._groups), default=0)
        if self._ranks.is_distributed:
            num_calls = self._ranks.largest(num_calls)  # a rank without data does not know
        for group in self._groups:
            group.grow(num_calls)
            for state in group.states:  # in the order of the calls
                group.update(state, self._ranks)

    # --- what is kept with a window -----------------------------------------------------------------------

    def state(self) -> dict[str, list[Tensor]]:
        """The statistics of the window so far, by layer: number of values, mean and squared deviations of each call."""
        return {
            layer.name: [part.clone() for parts in own for part in parts]
            for group in self._groups
            for layer, *own in zip(group.layers, *(state.split(group.sizes, 1) for state in group.states), strict=True)
        }

    def tensors(self) -> list[Tensor]:
        """The memory in which they are."""
        return [state for group in self._groups for state in group.states]

    def load(self, state: dict[str, list[Tensor]], mode: Mode | None = None) -> None:
        """Continues with saved statistics; raises StateError, with nothing changed, if they do not fit the model.

        Args:
            state: What `state` returned.
            mode: The `batch_norm` of the accumulator that saved it; None if that is not known.
        """
        self.refresh()
        if self.has_layers and mode is not None and mode != self.batch_norm:
            raise StateError(
                f"the state was saved in the middle of a window with batch_norm={mode!r}, this accumulator has "
                f"{self.batch_norm!r}: make it with the same, or save after a step"
            )
        modules = {layer.name: layer.module for layer in self._layers}
        for name, (count, *_) in state.items():
            own = getattr(modules.get(name), "running_mean", None)
            if own is None or own.shape != count.shape:
                raise StateError(
                    f"the state has statistics of {len(count)} channels for a BatchNorm layer {name!r}, which this "
                    "model does not have: load it into the same model"
                )
        self.start()
        for group in self._groups:
            group.grow(max((len(parts) // 3 for parts in state.values()), default=1))
            for number, own in enumerate(group.states):
                for layer, values in zip(group.layers, own.split(group.sizes, 1), strict=True):
                    if saved := state.get(layer.name, [])[3 * number : 3 * number + 3]:
                        values.copy_(torch.stack(saved))
            self._has_run |= bool(state)


class _Layer:
    """A BatchNorm layer, and the memory in which it leaves the statistics of its calls in a pass.

    Attributes:
        rows: For the first, second, … call in a pass: the mean, the unbiased variance, the number of values.
        spare: The same for calls that do not count.
        num_calls: How many calls in this pass counted.
        num_pooled: How many of them have been added to the statistics of the window.
    """

    def __init__(self, module: Any, name: str) -> None:
        self.module, self.name = module, name
        self.rows: list[_Row] = []
        self.num_calls = self.num_pooled = 0
        self._buffers = own_buffers(module)
        self._mean: Tensor | None = None
        self._before: Callable[..., Any] | None = None
        self._watched = MethodType(_watched(self), module)
        self._copier = _copier(self)

    def is_watchable(self) -> bool:
        mean = self.module.running_mean
        return isinstance(mean, Tensor) and not is_lazy(mean) and self.module.running_var is not None

    def is_current(self) -> bool:
        """Whether the layer has the buffers that the memory was made for."""
        mean = self.module.running_mean
        return bool(self.rows) and mean is not None and (mean.device, mean.dtype, mean.shape) == self._kind

    def prepare(self, wide: torch.dtype) -> None:
        mean = self.module.running_mean
        self._kind = (mean.device, mean.dtype, mean.shape)
        self._wide = wide
        self.rows = [self.row()]
        self.spare = self.row()

    def row(self) -> _Row:
        """Tensors of their own, since autograd and torch.compile take care of tensors that share memory."""
        mean = self.module.running_mean
        return torch.zeros_like(mean), torch.zeros_like(mean), torch.zeros(1, dtype=self._wide, device=mean.device)

    def num_tracked(self) -> int:
        """Changes when anything but us updates the running statistics."""
        tracked = self.module.num_batches_tracked
        return 0 if tracked is None else VERSION(tracked)

    def watch(self) -> None:
        self._mean = self.module.running_mean
        own = vars(self.module)
        self._before = own.get("forward")  # accelerate sets one
        own["forward"], own["__deepcopy__"] = self._watched, self._copier
        self.is_plain = self._before is None and has_plain_forward(self.module)

    def unwatch(self) -> None:
        own = vars(self.module)
        del own["__deepcopy__"]
        if self._before is None:
            del own["forward"]
        else:
            own["forward"] = self._before
        self._before = None

    def plain(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """What would run without us; `module` may be a copy that the loss has made."""
        if self._before is not None and module is self.module:
            return self._before(*args, **kwargs)
        return type(module).forward(module, *args, **kwargs)

    def next_row(self) -> _Row:
        """Activation checkpointing runs a layer again in the backward pass: that call does not count."""
        if is_in_backward():
            return self.spare
        if self.num_calls == len(self.rows):
            if self.module.running_mean.is_cuda and torch.cuda.is_current_stream_capturing():
                raise CaptureError(
                    f"the BatchNorm layer {self.name} ran {self.num_calls + 1} times with a micro-batch and "
                    f"{self.num_calls} before with the same: compute the loss in the same way each time"
                )
            self.rows.append(self.row())
        self.num_calls += 1
        return self.rows[self.num_calls - 1]

    def is_own(self) -> bool:
        """Whether the layer has its own buffers: `functional_call` brings others."""
        return self._buffers.get("running_mean") is self._mean

    def run_with(self, row: _Row, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Runs a layer whose code is not that of torch's BatchNorm, and may read its running statistics."""
        mean, var, _ = row
        module, before, momentum = self.module, dict(self._buffers), self.module.momentum
        is_synchronized = isinstance(module, nn.SyncBatchNorm) and has_plain_forward(module, nn.SyncBatchNorm)
        scratch = {name: None if b is None else b.clone() for name, b in before.items()}
        if is_synchronized:  # over ranks: only its own kernel knows the statistics
            scratch.update(running_mean=mean, running_var=var)
            module.momentum = 1.0
        try:
            self._buffers.update(scratch)
            output = self.plain(module, *args, **kwargs)
        finally:
            self._buffers.update(before)
            module.momentum = momentum
        if not is_synchronized:
            with torch.no_grad():
                x = x.to(torch.promote_types(x.dtype, mean.dtype))
                for own, found in zip((var, mean), torch.var_mean(x, [0, *range(2, x.ndim)]), strict=True):
                    own.copy_(found)
        return output


def _watched(layer: _Layer) -> Callable[..., Any]:
    """The forward of a layer while it is watched. torch.compile traces it, with the operations on our memory."""

    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        if module is not layer.module or not (module.training and module.track_running_stats):
            return layer.plain(module, *args, **kwargs)
        if torch.compiler.is_compiling():
            if not layer.is_plain or layer.num_calls == len(layer.rows):
                return layer.plain(module, *args, **kwargs)  # its running statistics change, which is noticed
            row = layer.rows[layer.num_calls]
            layer.num_calls += 1
        elif layer.is_own():
            row = layer.next_row()
        else:
            return layer.plain(module, *args, **kwargs)
        x = args[0] if args else next(iter(kwargs.values()))
        output = batch_norm_into(module, x, *row[:2]) if layer.is_plain else layer.run_with(row, x, *args, **kwargs)
        with torch.no_grad():
            row[2].fill_(x.numel() // x.size(1))
        return output

    return forward


def _copier(layer: _Layer) -> Callable[[dict[int, Any]], Any]:
    """What `copy.deepcopy` calls while a layer is watched: the copy of a model is not watched."""

    def deepcopy(memo: dict[int, Any]) -> Any:
        layer.unwatch()
        try:
            return copy.deepcopy(layer.module, memo)
        finally:
            layer.watch()

    return deepcopy


class _Group:
    """Layers whose running statistics are on one device and of one dtype; all are pooled at once.

    Attributes:
        states: For the first, second, … call of the layers in a pass, the statistics of the window so far, channel by
            channel: the number of values, their mean and the sum of their squared deviations from it. Always in the
            same memory, which CUDA graphs add to.
    """

    def __init__(self, layers: list[_Layer]) -> None:
        self.layers = layers
        means = [layer.module.running_mean for layer in layers]
        device = means[0].device
        self.wide = wide_dtype(device)
        self.sizes = [mean.numel() for mean in means]
        for layer in layers:
            layer.prepare(self.wide)
        self.states = [torch.zeros(3, sum(self.sizes), dtype=self.wide, device=device)]
        numbers = torch.arange(len(layers))
        self._layer_of = numbers.repeat_interleave(torch.tensor(self.sizes)).to(device)
        self._lost = torch.tensor([_lost(layer.module) for layer in layers], dtype=self.wide).to(device)
        self._lost_by_channel = self._lost[self._layer_of]
        self._momenta: tuple[Any, ...] = ()

    def clear(self) -> None:
        """For a new window. What a pass left is cleared too: the kernel multiplies it by 0, which keeps NaN."""
        torch._foreach_zero_([*self.states, *(t for layer in self.layers for row in layer.rows for t in row)])
        for layer in self.layers:
            layer.num_calls = layer.num_pooled = 0

    def begin(self, *, continues: bool) -> None:
        torch._foreach_zero_([n for layer in self.layers for _, _, n in layer.rows])
        for layer in self.layers:
            layer.num_calls = layer.num_pooled if continues else 0

    def grow(self, num_calls: int) -> None:
        """Makes memory for so many calls of a layer in a pass."""
        while len(self.states) < num_calls:
            self.states.append(torch.zeros_like(self.states[0]))

    @torch.no_grad()
    def pool(self) -> bool:
        """Returns whether any layer has run."""
        num_calls = max(layer.num_calls for layer in self.layers)
        self.grow(num_calls)
        for layer in self.layers:
            layer.num_pooled = layer.num_calls
            layer.rows += [layer.row() for _ in range(num_calls - len(layer.rows))]  # they have seen 0 values
        for call, state in enumerate(self.states[:num_calls]):
            means, variances, numbers = zip(*(layer.rows[call] for layer in self.layers), strict=True)
            number = torch.cat(numbers)[self._layer_of]
            add_statistics(state, torch.cat(means), torch.cat(variances), number, self._lost_by_channel)
        return num_calls > 0

    @torch.no_grad()
    def update(self, state: Tensor, ranks: Ranks) -> None:
        """Updates the running statistics of the layers that ran in this call, unless something is not finite."""
        count, mean, squares = state.unbind()
        lost = self._lost_by_channel
        if ranks.is_distributed:
            count, mean, squares = over_ranks(state, ranks.sum_over_ranks)
            lost = torch.ones_like(lost)
        var = share(squares, (count - lost).clamp(min=1), torch.where)
        is_bad = ~(torch.isfinite(mean) & torch.isfinite(var))
        num_bad = torch.zeros_like(self._lost).index_add_(0, self._layer_of, is_bad.to(self.wide))
        has_run = torch.zeros_like(self._lost).index_add_(0, self._layer_of, count) > 0
        is_updated = has_run & (num_bad == 0)
        factor, is_written = (each[self._layer_of] for each in (self._factors(), is_updated))
        for name, found in (("running_mean", mean), ("running_var", var)):
            buffers = [getattr(layer.module, name) for layer in self.layers]
            old = torch.cat(buffers).to(self.wide)
            new = torch.where(is_written, (1 - factor) * old + factor * found, old)
            torch._foreach_copy_(buffers, list(new.to(buffers[0].dtype).split(self.sizes)))
        for layer, once in zip(self.layers, is_updated.unbind(), strict=True):
            if layer.module.num_batches_tracked is not None:
                layer.module.num_batches_tracked.add_(once)

    def _factors(self) -> Tensor:
        """The momentum of each layer. None is a cumulative average: 1 over the number of batches, this one included."""
        momenta = tuple(layer.module.momentum for layer in self.layers)
        if momenta != self._momenta:
            self._momenta = momenta
            given = [0.0 if momentum is None else momentum for momentum in momenta]
            self._given = torch.tensor(given, dtype=self.wide).to(self.states[0].device)
            self._is_average = torch.tensor([momentum is None for momentum in momenta]).to(self.states[0].device)
        if None not in momenta:
            return self._given
        counts = [layer.module.num_batches_tracked for layer in self.layers]
        tracked = [self._given.new_zeros(()) if count is None else count.to(self.wide) for count in counts]
        return torch.where(self._is_average, 1 / (torch.stack(tracked) + 1), self._given)


def add_statistics(state: Tensor, mean: Tensor, var: Tensor, number: Tensor, lost: Tensor) -> None:
    """Adds the mean and variance of more values to the state, in place.

    Args:
        state: The number of values so far, their mean and the sum of their squared deviations, channel by channel.
        mean: The mean of the new values.
        var: Their variance.
        number: How many they are.
        lost: How many fewer the variance divides by: 1 if it is unbiased.
    """
    found = Moments(number, mean, var * (number - lost).clamp(min=0))
    for own, new in zip(state.unbind(), moments.pool(Moments(*state.unbind()), found, torch.where), strict=True):
        own.copy_(new)


def over_ranks(state: Tensor, sum_over_ranks: Callable[[Tensor], Any]) -> Moments:
    """The statistics of all ranks, from the state of this one."""

    def add_up(tensors: list[Tensor]) -> Sequence[Tensor]:
        stacked = torch.stack(tensors)
        sum_over_ranks(stacked)
        return stacked.unbind()

    (found,) = moments.over_ranks([Moments(*state.unbind())], add_up, torch.where)
    return found


def wide_dtype(device: torch.device) -> torch.dtype:
    """The dtype in which statistics are added up."""
    return torch.float32 if device.type == "mps" else torch.float64  # mps has no float64


def _lost(module: nn.Module) -> float:
    """How many values a layer's variance lacks to be unbiased, as far as they are this rank's.

    The statistics of SyncBatchNorm are those of all its ranks. Every rank counts them by its own values, so that
    together they count once: the sum of (n - 1/ranks) over the ranks is N - 1.
    """
    if isinstance(module, nn.SyncBatchNorm) and dist.is_available() and dist.is_initialized():
        return 1 / dist.get_world_size(module.process_group or dist.group.WORLD)
    return 1.0


def _named(model: nn.Module) -> list[tuple[nn.Module, str]]:
    return [(module, name) for name, module in model.named_modules() if isinstance(module, BatchNorm)]


def _normalises_by_batch(module: Any, *, is_frozen: bool = False) -> bool:
    return bool(module.running_mean is None or (module.training and not is_frozen))


def freeze(model: nn.Module) -> None:
    """Has BatchNorm layers use their running statistics, as with `batch_norm="frozen"`."""
    for module, _ in _named(model):
        module.training &= module.running_mean is None


def normalising(model: nn.Module) -> list[str]:
    """The names of the BatchNorm layers that normalise by the batch they are given."""
    return [name for module, name in _named(model) if _normalises_by_batch(module)]
