"""The accumulator: cut, accumulate, clip, apply."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from ..core.errors import BatchError, LossError, OptionError, OrderError, StateError
from ..core.step import Step
from ..core.weight import (
    Reduction,
    Tally,
    Terms,
    as_terms,
    check_reduction,
    check_weight,
    from_terms,
    scales,
    totals,
)
from ..core.window import AccumulationSteps, Window, positive, steps_at
from . import checks, gradients, nest
from .gradients import Collection, Gradients, Sums
from .precision import Precision, is_low
from .weight import Weight, check_all, on_host, read, weigh
from .window import MicroBatch, OpenWindow, later, values_of

Loss = Callable[[Any, Any], Any]


class Accumulator:
    """Stands for the body of a training loop, and gives the gradient of the whole batch.

        for batch in loader:
            optimizer.zero_grad()
            loss(model, batch).backward()     # does not fit into memory
            optimizer.step()

    becomes

        accumulator = Accumulator(model, optimizer, loss, micro_batch_size=8)
        for batch in loader:
            step = accumulator.step(batch)

    The batch is cut into micro-batches; each adds its share of the gradient, weighted by what it counts;
    unscaling, the finite check, clipping, the optimizer and the schedule happen once.

    `loss(model, micro_batch)` returns the mean over the micro-batch, `weight(micro_batch)` over how many that
    is a mean: the samples if not given. Both may be tuples of the same length, one entry for each term.
    After a step the parameters hold no gradients. Parameters that the optimizer does not hold are left alone.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss | None = None,
        micro_batch_size: int | None = None,
        *,
        accumulation_steps: AccumulationSteps | None = None,
        weight: Weight | None = None,
        reduction: Reduction = "mean",
        clip_norm: float | None = None,
        clip_value: float | None = None,
        precision: str | None = None,
        scaler: GradScaler | None = None,
        scheduler: Any = None,
        accumulate_dtype: torch.dtype | None = None,
    ) -> None:
        check_reduction(reduction)
        checks.check_callable("loss", loss)
        checks.check_callable("weight", weight)
        checks.check_model(model)
        checks.check_optimizer(model, optimizer)
        checks.check_scheduler(scheduler)
        checks.check_clip("clip_norm", clip_norm)
        checks.check_clip("clip_value", clip_value)
        checks.check_dtype(accumulate_dtype)
        if micro_batch_size is not None:
            micro_batch_size = positive("micro_batch_size", micro_batch_size)
        if accumulation_steps is not None and not callable(accumulation_steps):
            accumulation_steps = positive("accumulation_steps", accumulation_steps)
        self.model = model
        self.optimizer = optimizer
        self.loss = loss
        self.micro_batch_size = micro_batch_size
        self.accumulation_steps = accumulation_steps
        self.weight = weight
        self.reduction: Reduction = reduction
        self.clip_norm = clip_norm
        self.clip_value = clip_value
        self.scheduler = scheduler
        self.num_steps = 0
        """How many windows are done, applied or not."""
        names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        self._gradients = Gradients(optimizer, names, accumulate_dtype)
        self._precision = Precision(precision, scaler, self._gradients.parameters, self._gradients.is_widened)
        self._open: OpenWindow | None = None
        self._in_block = False
        self._batch_norms = checks.batch_norm_modules(model)

    @property
    def scaler(self) -> GradScaler | None:
        """The GradScaler in use: the user's, or ours with precision "fp16"."""
        return self._precision.scaler

    # --- a batch, or a window of micro-batches -----------------------------------------------------------

    def step(self, batch: Any) -> Step:
        """One step of the optimizer on the whole batch: a nest of tensors that is cut, or a `Window`."""
        self._refuse_in_block("step()")
        if self._open is not None:
            raise OrderError(f"a window of {len(self._open)} micro-batches is open: call flush() before step()")
        if self.loss is None:
            raise OptionError("step() needs a loss: pass Accumulator(model, optimizer, loss, …)")
        micro_batches, sizes = self._micro_batches(batch)
        weights = [(size,) for size in sizes] if self.weight is None else weigh(micro_batches, self.weight)
        total = totals(weights)
        scale_of = {weight: scales(weight, total, self.reduction) for weight in set(weights)}
        by = [scale_of[weight] for weight in weights]
        self._tell_batch_norm(len(by))

        sums = Sums()
        losses: list[list[Any]] = []
        counted: list[Terms] = []
        with self._gradients.collecting(sums) as collection:
            for micro_batch, scale in zip(micro_batches, by, strict=True):
                if any(scale):  # else it counts nothing, and its mean over nothing may be 0/0
                    losses.append(self._accumulate(self.loss, micro_batch, scale, collection))
                    counted.append(scale)
        gradients.scale(gradients.values(sums), sums.unit)
        return self._apply(sums, losses, counted, total, len(by), max(sizes, default=None))

    def _accumulate(self, loss: Loss, micro_batch: Any, scale: Terms, collection: Collection) -> list[Any]:
        """Adds the gradient of one micro-batch; returns its losses and lets go of everything else."""
        with self._precision.autocast():
            terms = as_terms(loss(self.model, micro_batch))
        checks.check_loss(terms, len(scale))
        collection.check()
        with self._precision.backward_pass():
            if any(map(is_low, terms)):
                for t, term in enumerate(terms):
                    self._add_unscaled(term, scale[t], collection, keep_graph=t < len(terms) - 1)
            else:
                collection.in_units_of(1.0)
                self._precision.backward(terms, scale)
                collection.added()
        return values_of(terms)

    def _add_unscaled(self, term: Tensor, scale: Any, collection: Collection, *, keep_graph: bool) -> None:
        """Adds a term's gradient as it is: its weight goes into the measure of the sums, where nothing is rounded."""
        if isinstance(scale, Tensor) or scale:
            collection.in_units_of(scale)
            self._precision.backward((term,), (1.0,), keep_graph=keep_graph)
            collection.added()

    def _micro_batches(self, batch: Any) -> tuple[Sequence[Any], list[int]]:
        """The micro-batches, and their sizes where those are known or needed."""
        if not isinstance(batch, Window):
            if self.micro_batch_size is None:
                raise OptionError("step() does not know where to cut the batch: pass micro_batch_size=…, or a Window")
            return nest.cut(batch, self.micro_batch_size)
        if not batch:
            raise BatchError("the window has 0 micro-batches: leave empty windows out of the stream")
        if self.weight is not None:
            return batch, []
        return batch, [nest.batch_size(m, f"micro_batch[{k}]") for k, m in enumerate(batch)]

    # --- one micro-batch at a time -----------------------------------------------------------------------

    @contextmanager
    def micro_batch(self, weight: Any = None) -> Iterator[MicroBatch]:
        """One micro-batch of a loop that the user has; at the window's end the step is made.

            for x, y in loader:
                with accumulator.micro_batch(weight=len(y)) as micro:
                    micro.backward(criterion(model(x), y))
            accumulator.flush()                     # the last, shorter window

        `weight` says over how many the loss is a mean; a tuple where the loss has several terms, each of
        which then takes a backward pass and a set of gradient sums of its own. `micro.step` is the `Step` if
        this micro-batch was its window's last, else None.
        """
        if self.accumulation_steps is None:
            raise OptionError("micro_batch() does not know how long a window is: pass accumulation_steps=…")
        if weight is None and self.reduction == "mean":
            raise OptionError("micro_batch() needs weight=…: over how many samples or tokens the loss is a mean")
        terms = on_host(as_terms(1 if weight is None else weight))
        check_weight(tuple(w for w in terms if not isinstance(w, Tensor)), of="this micro-batch")
        self._refuse_in_block("micro_batch()")
        window = self._open or OpenWindow(
            Tally(self.reduction), [Sums() for _ in terms], loss_scale=self._precision.loss_scale()
        )
        window.tally.check(terms)
        micro = MicroBatch(lambda micro, loss: self._feed(micro, window, as_terms(loss), terms))
        self._in_block = True
        try:
            with self._precision.autocast():
                yield micro
        except BaseException as error:
            if micro.has_begun:
                self._open = None
                error.add_note(
                    f"bigbatch: the window of {len(window)} micro-batches was dropped, since the gradient of the last "
                    "one may be half added; no parameter was changed"
                )
            raise
        finally:
            self._in_block = False
        if not micro.has_begun:
            raise OrderError("micro.backward(loss) was not called in this micro-batch: call it once in the block")
        self._open = window
        self._tell_batch_norm(len(window))
        if len(window) >= steps_at(self.accumulation_steps, self.num_steps):
            micro.step = self.flush()

    def _feed(self, micro: MicroBatch, window: OpenWindow, losses: Terms, weight: Terms) -> None:
        checks.check_loss(losses, len(weight))
        scale = window.tally.scale(weight)
        # with a scaler, a large weight would overflow in float16
        is_outside = self.scaler is not None or any(map(is_low, losses))
        with self._precision.backward_pass():
            for t, (loss, sums) in enumerate(zip(losses, window.sums, strict=True)):
                keep_graph = t < len(losses) - 1
                with self._gradients.collecting(sums) as collection:
                    micro.has_begun = True
                    if is_outside:
                        self._add_unscaled(loss, scale[t], collection, keep_graph=keep_graph)
                    else:
                        collection.in_units_of(1.0)
                        self._precision.backward((loss,), scale[t : t + 1], keep_graph=keep_graph)
                        collection.added()
        window.tally.add(weight)
        window.losses.append(values_of(losses))

    def flush(self) -> Step | None:
        """Makes the step of the window that is open, however short; None if none is."""
        self._refuse_in_block("flush()")
        window, self._open = self._open, None
        if window is None:
            return None
        weights = read(window.tally.weights)
        check_all(weights)
        window.check_scale(self._precision.loss_scale())
        total = totals(weights)
        sums = Sums()
        for term, factor in zip(window.sums, window.tally.factors(total), strict=True):
            gradients.scale(gradients.values(term), term.unit * factor)
            gradients.add(sums, term)
            term.clear()
        by = [scales(weight, total, self.reduction) for weight in weights]
        return self._apply(sums, window.losses, by, total, len(weights), None)

    def _refuse_in_block(self, call: str) -> None:
        if self._in_block:
            raise OrderError(f"{call} was called inside of a micro_batch() block: call it after the block")

    # --- what all ways share -----------------------------------------------------------------------------

    def _apply(
        self,
        sums: Sums,
        losses: Sequence[Sequence[Any]],
        by: list[Terms],
        total: Terms,
        num_micro_batches: int,
        micro_batch_size: int | None,
    ) -> Step:
        """All that belongs to a step, once: unscale, check, clip, apply, schedule."""
        has_weight = self.reduction == "sum" or any(total)
        terms = later(losses, by) if has_weight else tuple(0.0 for _ in total)
        norm = self._finish(sums) if has_weight else 0.0
        is_applied = has_weight and math.isfinite(norm)
        if is_applied and self.scheduler is not None:
            self.scheduler.step()
        self.num_steps += 1
        return Step(
            terms=terms,
            weight=from_terms(total),
            grad_norm=norm,
            num_micro_batches=num_micro_batches,
            micro_batch_size=micro_batch_size,
            is_applied=is_applied,
            reduction=self.reduction,
        )

    def _finish(self, sums: Sums) -> float:
        """Brings the finished gradient to the parameters if it is finite; returns its norm."""
        if not sums:
            raise LossError(
                "the loss reached none of the optimizer's parameters: "
                "compute it with the model whose parameters the optimizer holds"
            )
        try:
            self._precision.unscale(self.optimizer, sums)
            tensors = gradients.values(sums)
            norm = gradients.norm(tensors)
            if math.isfinite(norm):
                gradients.clip(tensors, norm, self.clip_norm, self.clip_value)
                with self._gradients.handed_over(sums):
                    self._precision.step(self.optimizer)
            elif self.scaler is None:  # with a scaler an overflow now and then is how it finds its scale
                checks.tell_not_finite(self._gradients.first_not_finite(sums), self.num_steps + 1)
            self._precision.update()
        except BaseException:
            self._precision.forget(self.optimizer)
            raise
        finally:
            gradients.clear(self._gradients.parameters)
        return norm

    def _tell_batch_norm(self, num_micro_batches: int) -> None:
        if num_micro_batches > 1 and self._batch_norms and checks.tell_batch_norm(self.model):
            self._batch_norms = []  # once is enough

    # --- saving ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that the accumulator knows, in the middle of a window too: gradients, weights, scaler.

        The model, the optimizer and the scheduler are the user's and are saved beside it, as always.
        """
        return {
            "num_steps": self.num_steps,
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "window": None if self._open is None else self._open.state_dict(self._gradients.parameters),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up what `state_dict` gave, in this process or another."""
        if missing := {"num_steps", "scaler", "window"} - set(state):
            raise StateError(f"the state has no {', '.join(sorted(missing))}: pass what Accumulator.state_dict gave")
        if (state["scaler"] is None) != (self.scaler is None):
            has, wants = ("no", "a") if state["scaler"] is None else ("a", "no")
            raise StateError(
                f"the state has {has} GradScaler but this accumulator {wants}: use the precision it was saved with"
            )
        window = state["window"]
        opened = None if window is None else OpenWindow.load(window, self._gradients.parameters, self.reduction)
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        self._open = opened
        self.num_steps = state["num_steps"]
