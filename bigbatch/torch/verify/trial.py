"""A copy of the user's model, a batch, and the ways to take its gradient."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...core.batch import batch_norm_causes
from ...core.errors import BatchError, BigBatchWarning
from ...core.verify.trial import Array, Gradient, Loop, Rows, scales_of
from ...core.weight import Reduction, Terms, as_terms
from ...core.window import Window
from .. import batch as nest
from .. import hooks
from ..accumulator import Accumulator
from ..auxiliary import without_aux
from ..backward import Loss, check_loss
from ..batch_norm import REMEDY, Mode, freeze, normalising
from ..cutting import Cutting, take
from ..gradients import leaves_of
from ..internals import BatchNorm, Dropout
from ..random import RandomState, cuda_devices_of
from ..time_major import cut_along_time, other_axes
from ..window import Weight, weigh
from .draws import Recording, Replay
from .foreign import Steps, as_array


class Trial:
    """Implements `core.verify.trial.Trial`, with the same dropout masks for both gradients if they can be cut."""

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        loss: Loss,
        sizes: int | Sequence[int],
        weight: Weight | None,
        reduction: Reduction,
        cutting: Cutting,
        batch_norm: Mode = "batch",
        *,
        has_aux: bool = False,
    ) -> None:
        """`sizes` is that of a micro-batch, or those of all."""
        is_frozen = batch_norm == "frozen"
        self._activated = _put_into_training(model, (Dropout,) if is_frozen else (Dropout, BatchNorm))
        if is_frozen:
            freeze(model)
        self.model = model
        self.batch = batch
        self.loss = without_aux(loss, has_aux=has_aux)
        self.weight = weight
        self.reduction: Reduction = reduction
        self._cutting = cutting
        micro_batches: Sequence[Any] = ()
        if isinstance(sizes, int):
            has_norms = bool(normalising(model))
            micro_batches, sizes = cutting(batch, sizes, avoid_single_sample=has_norms)  # as step() does
        self.parts: Sequence[Rows] = [
            range(stop - size, stop) for size, stop in zip(sizes, accumulate(sizes), strict=True)
        ]
        self._cut: dict[Rows, Any] | None = None
        """What the user's own function returned for each part: it cannot be asked for other rows."""
        if callable(cutting.cut):
            self._cut = {range(sum(sizes)): batch, **dict(zip(self.parts, micro_batches, strict=True))}
        self.batch_size = sum(sizes)
        self.parameters = list(model.parameters())
        self.epsilon = max(torch.finfo(p.dtype).eps for p in self.parameters)
        self._value_of = {t: t.detach().clone() for t in (*self.parameters, *model.buffers())}
        self._random = RandomState(cuda_devices_of(model))
        self._replay: Replay | None = None
        self._other_draws: list[str] = []
        """The random generators that were used outside of torch's operations."""
        self._mode_notes: list[str] = []
        self._notes: list[str] = []
        self._loop_notes: list[str] = []
        self._loop_causes: list[str] = []
        self._foreign: dict[Tensor, Tensor | None] = {}
        self._changed: list[str] = []
        self._weights: list[Terms] = [(len(part),) for part in self.parts]
        if weight is not None:
            self._weights = weigh([self._rows(part) for part in self.parts], weight)
            if self._cut is not None:
                (whole,) = weigh([self._rows(range(self.batch_size))], weight)
                cutting.check_weights(whole, self._weights)

    # --- gradients -------------------------------------------------------------------------------------------

    def full(self) -> Gradient:
        with Recording() as recording:
            gradient, _ = self._pass(self._rows(range(self.batch_size)))
        self._changed = [n for n, t in self.model.named_buffers() if not torch.equal(t, self._value_of[t])]
        draws = recording.draws if self._cut is None else [None] * len(recording.draws)
        self._replay = Replay(draws, self.batch_size) if draws else None
        self._other_draws = self._random.drawn()
        self._notes = []
        if self._other_draws:
            self._notes.append(
                f"random numbers ({' and '.join(self._other_draws)}) are drawn by the model or the loss, and cannot be "
                "cut like the batch: each micro-batch was compared with the same state of the generator; in training "
                "each draws its own"
            )
        return gradient

    def accumulated(self) -> Gradient:
        self._reset()
        replay = self._replay
        micro_batches = [self._rows(part) for part in self.parts]
        numbers = {id(micro_batch): number for number, micro_batch in enumerate(micro_batches)}

        def loss(model: nn.Module, micro_batch: Any) -> Any:
            number = numbers.get(id(micro_batch))  # None if the accumulator tries something out
            if number is not None:
                self._random.restore()
            if replay is not None:
                replay.start(None if number is None else self.parts[number])
            return self.loss(model, micro_batch)

        def weight(micro_batch: Any) -> Any:  # as it was before the loss or the weight changed the micro-batch
            return self._weights[numbers[id(micro_batch)]]

        found: dict[str, Array] = {}
        optimizer = torch.optim.SGD(self.parameters, lr=0.0)
        optimizer.register_step_pre_hook(lambda *_: found.update(self._gradient()))
        with replay or nullcontext(), warnings.catch_warnings():
            warnings.simplefilter("ignore", BigBatchWarning)  # reported as causes instead
            own_weight = None if self.weight is None else weight
            accumulator = Accumulator(
                self.model,
                optimizer,
                loss,
                weight=own_weight,
                reduction=self.reduction,
                batch_axis=self._cutting.batch_axis,
                cut=self._cutting.cut,
                num_samples=self._cutting.num_samples,
            )
            is_applied = accumulator.step(Window(micro_batches)).is_applied
        if replay is not None:
            self._notes.insert(0, _about_masks(self.model, replay.is_faithful))
        if not is_applied:  # not finite
            return {name: np.full(tuple(p.shape), np.nan) for name, p in self.model.named_parameters()}
        return found

    def gradient_of(self, rows: Rows, term: int | None = None) -> tuple[Gradient, float]:
        with self.without_hooks():
            if self._replay is not None:
                self._replay.start(rows)
            gradient, loss = self._pass(self._rows(rows), term, self._replay)
        if not np.isfinite(loss):  # cross entropy without labels is 0/0, its gradient 0 (torch 2.13)
            gradient = {name: np.full_like(g, np.nan) for name, g in gradient.items()}
        return gradient, loss

    def by_loop(self, loop: Loop, order: Rows | None = None) -> tuple[Gradient, Gradient]:
        self._reset()
        found = []
        for _ in range(2):
            self._restore()
            with Steps(self.parameters) as steps:
                loop(self.model, [self._rows(self.parts[k]) for k in order or range(len(self.parts))])
            found.append(self._left_by(steps))
        return found[0], found[1]

    def _left_by(self, steps: Steps) -> dict[str, Array]:
        """The gradient that a loop left, gave to an optimizer, or changed the parameters by."""
        names: dict[Tensor, str] = {p: name for name, p in self.model.named_parameters()}
        found = {names[p]: g for p, g in steps.gradients.items()} if steps.gradients else self._gradient()
        self._loop_notes, self._loop_causes = [], steps.causes(len(self.parts))
        if any(np.any(g) for g in found.values()):
            return found
        moved = {n: as_array(self._value_of[p] - p.detach()) for n, p in self.model.named_parameters()}
        if not any(np.any(g) for g in moved.values()):
            self._loop_causes.append(
                "the loop leaves no gradient, takes no step of an optimizer that holds the model's parameters, and "
                "changes no parameter: work on the model that it is given"
            )
            return found
        full = self.full()
        along = sum(float((moved[n] * g).sum().real) for n, g in full.items())
        square = sum(float((abs(moved[n]) ** 2).sum()) for n in full)
        self._loop_notes.append(
            "the loop leaves no gradients, so the change of the parameters was compared, which shows the direction but "
            "not the size of the gradient: leave the gradients on the model to have both compared"
        )
        return {n: g * (along / square) for n, g in moved.items()} if along > 0 else moved

    def explained(self) -> list[str]:
        if self._loop_causes or self._cut is None:
            return self._loop_causes
        return [
            "the cause was not looked for, since cut= can only be asked for these micro-batches: check that it gives "
            "each of them its own samples, with offsets and ids that begin anew, and that `weight` returns over how "
            "many the loss is a mean"
        ]

    def right_scales(self) -> Array:
        return scales_of(self._weights, self.reduction)

    # --- what is known about the model -----------------------------------------------------------------------

    def notes(self) -> list[str]:
        return [*self._mode_notes, *self._notes, *self._loop_notes]

    def mode(self) -> list[str]:
        if not self._activated:
            return []
        return [
            "the model is in eval mode, so a copy in training mode was compared, where these layers act: "
            f"{', '.join(self._activated)}; if you train with them in eval mode, call model.train() and put them alone "
            "into eval mode"
        ]

    def layer_causes(self) -> list[str]:
        return batch_norm_causes(normalising(self.model), REMEDY)

    def cut_elsewhere(self, is_mean: Callable[[Any, Any, Any], bool]) -> str | None:
        with self.without_hooks():
            self._reset()
            with suppress(Exception):  # the loss may refuse such a batch
                whole, _ = self._pass(self._rows(range(self.batch_size)))
            for sentence, cutting in _other_cuts(self.batch, self._cutting):
                with suppress(Exception):
                    (one, other), _ = cutting(self.batch, -(-cutting.size(self.batch) // 2))
                    first, second = (self._pass(nest.map_tensors(_fresh, half))[0] for half in (one, other))
                    if is_mean(whole, first, second):
                        return sentence
            with suppress(Exception):
                if self._cutting.cut is None:
                    run, part = partial(self.loss, self.model), self._rows(self.parts[0])
                    return cut_along_time(run, self.model, part, self._cutting.batch_axis)
        return None

    def carried_over(self) -> list[str]:
        return self._changed

    @property
    def is_random(self) -> bool:
        return bool(self._other_draws) or (self._replay is not None and not self._replay.is_faithful)

    @property
    def has_hooks(self) -> bool:
        return bool(hooks.dicts_of(self.parameters))

    @contextmanager
    def without_hooks(self) -> Iterator[None]:
        held = [(own, dict(own)) for own in hooks.dicts_of(self.parameters)]
        for own, _ in held:
            own.clear()
        try:
            yield
        finally:
            for own, found in held:
                own.update(found)

    def quiet(self) -> AbstractContextManager[None]:
        return _in_eval(self.model.modules())

    @contextmanager
    def without_dropout(self) -> Iterator[None]:
        """Puts all but BatchNorm into eval mode: attention and recurrent layers have dropout too."""
        self.full()  # shows whether there is dropout
        if self._replay is None:
            yield
            return
        with _in_eval(m for m in self.model.modules() if not isinstance(m, BatchNorm)):
            self.full()
            self._mode_notes = [
                "dropout was switched off for the comparison, since a foreign loop draws masks of its own"
                if self._replay is None
                else "random numbers are drawn in eval mode too, and a foreign loop draws others"
            ]
            yield

    # --- one pass --------------------------------------------------------------------------------------------

    def _rows(self, rows: Rows) -> Any:
        """A copy of these samples, since a loss may change them or remove them from the batch."""

        def taken(tensor: Tensor, axis: int) -> Tensor:
            if isinstance(rows, range) and tensor.layout is torch.strided:
                return tensor.narrow(axis, rows.start, len(rows))
            return tensor.index_select(axis, torch.as_tensor(list(rows), device=tensor.device))

        cut, axis = self._cutting.cut, self._cutting.batch_axis
        if self._cut is not None:
            own = self._cut[range(rows[0], rows[-1] + 1)]
        elif cut == "list":
            own = take(self.batch, rows, axis)
        else:
            own = nest.map_axes(taken, self.batch, axis)
        return nest.map_tensors(_fresh, own)

    def _pass(
        self, batch: Any, term: int | None = None, replay: Replay | None = None
    ) -> tuple[dict[str, Array], float]:
        """The gradient and the loss of a batch."""
        self._reset()
        with replay or nullcontext():  # around the backward pass too: activation checkpointing draws there
            terms = as_terms(self.loss(self.model, batch))
            check_loss(terms, len(self._weights[0]))
            loss = torch.stack([t.reshape(()) for t in terms]).sum() if term is None else terms[term].reshape(())
            self._keep_foreign(loss)
            if loss.requires_grad:
                loss.backward()
        return self._gradient(), float(loss.detach())

    def _keep_foreign(self, loss: Tensor) -> None:
        """Remembers the gradients of parameters that are not the model's: the loss's own, or another model's."""
        own = set(self.parameters)
        for leaf in leaves_of(loss):
            if leaf not in own and leaf not in self._foreign:
                self._foreign[leaf] = leaf.grad

    def give_back(self) -> None:
        """Restores the gradients of parameters that are not the model's."""
        for leaf, gradient in self._foreign.items():
            leaf.grad = gradient

    def _gradient(self) -> dict[str, Array]:
        """A copy of `.grad`, by the parameter's name."""
        return {name: as_array(p.grad) for name, p in self.model.named_parameters() if p.grad is not None}

    def _reset(self) -> None:
        self._restore()
        self.model.zero_grad(set_to_none=True)

    def _restore(self) -> None:
        """Restores parameters, buffers and random state: running statistics change in every pass."""
        with torch.no_grad():
            for tensor, value in self._value_of.items():
                tensor.copy_(value)
        self._random.restore()


def _put_into_training(model: nn.Module, kinds: tuple[Any, ...]) -> list[str]:
    """Puts a model that is in eval mode into training mode, if it has layers of these kinds; returns their names."""
    if model.training:
        return []
    acting = [name for name, m in model.named_modules() if isinstance(m, kinds) and not m.training]
    if acting:
        model.train()
    return acting


def _fresh(tensor: Tensor, requires_grad: bool | None = None) -> Tensor:
    """A copy that is a leaf of the graph."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad if requires_grad is None else requires_grad)


def _other_cuts(batch: Any, cutting: Cutting) -> Iterator[tuple[str, Cutting]]:
    """Other ways to cut the batch, each with the sentence to report if it gives the right gradient."""
    if cutting.cut is not None:
        return
    for axis in other_axes(batch, cutting.batch_axis):
        is_first = axis == 0
        yield (
            f"this looks {'batch-first' if is_first else 'time-major'}: pass batch_axis={axis}; cut along its "
            f"{'first' if is_first else 'second'} axis the batch adds up, and cut along batch_axis="
            f"{cutting.batch_axis} it does not",
            Cutting(axis),
        )
    listed = Cutting(cut="list")
    with suppress(BatchError):
        yield (
            f"the batch is a list of {listed.size(batch)} samples, and each of them was cut along its own axis "
            f'{cutting.batch_axis}: pass cut="list"',
            listed,
        )


def _about_masks(model: nn.Module, is_faithful: bool) -> str:
    names = [name for name, module in model.named_modules() if isinstance(module, Dropout) and module.training]
    where = f"dropout ({', '.join(names)})" if names else "dropout or other random numbers"
    if is_faithful:
        return (
            f"{where}: compared with the same masks; in training each micro-batch draws its own, "
            "which is as good a draw as the full batch's but not the same"
        )
    return f"{where}: the draws could not be cut like the batch, so the masks differ; compare in eval mode"


@contextmanager
def _in_eval(modules: Iterable[nn.Module]) -> Iterator[None]:
    was_training = {module: module.training for module in modules}
    for module in was_training:
        module.training = False
    try:
        yield
    finally:
        for module, training in was_training.items():
            module.training = training
