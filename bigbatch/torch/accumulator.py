"""The accumulator: cut, accumulate, reduce, clip, apply."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Never

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from ..core.auxiliary import check_aux
from ..core.batch import one_batch
from ..core.errors import BatchError, Interrupted, OptionError, StateError
from ..core.nonfinite import NonFinite, OnNonFinite
from ..core.options import (
    Fixed,
    Option,
    OptionOf,
    check_callable,
    check_known,
    check_loss,
    check_size,
    check_steps,
    described,
)
from ..core.step import Step
from ..core.verify.result import Verification
from ..core.weight import Reduction, Terms, Weights, as_terms, check_reduction, check_weight, has_weight, totals
from ..core.window import AccumulationSteps, Window, steps_at
from . import checks
from .auxiliary import BatchAux, WindowAux
from .backward import Backward, Loss
from .batch import BatchAxis
from .batch_norm import BatchNorms, Mode
from .capture.capture import capture_for
from .cutting import Cutting
from .distributed.detect import ranks_of
from .distributed.ranks import Reduce
from .distributed.totals import GetTotals, LocalCounts, Totals
from .gradients import GradientBuffer, Gradients
from .optimizers import Optimizers
from .precision import Precision
from .state import SavedState, packed
from .sums import Sums
from .time_major import TimeAxis
from .transfer import transfer_for
from .update import Losses, Update
from .window import Cut, MicroBatch, PartialWindow, Weight, fetch_weights, on_host, shares_of_step

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_NOTHING: AbstractContextManager[None] = nullcontext()
"""What a step in one process enters in place of `self._ranks.…()`: there, it never calls into `distributed/`."""


def _check_no_window(accumulator: "Accumulator", name: str) -> None:
    """Raises OptionError if an option that decides what a micro-batch is would change in the middle of a window."""
    if (window := accumulator._window) is not None:
        when = "a step is interrupted" if window.is_of_step else "a window is open"
        raise OptionError(f"{name} was changed while {when}: change it between windows, or call forget()")


class Accumulator:
    """Trains on batches that do not fit into memory, with exactly the gradient of the whole batch.

        for batch in loader:
            optimizer.zero_grad()
            loss(model, batch).backward()     # does not fit into memory
            optimizer.step()

    becomes

        accumulator = Accumulator(model, optimizer, loss, micro_batch_size=8)
        for batch in loader:
            step = accumulator.step(batch)

    The batch is cut into micro-batches. Each adds its share of the gradient, by its weight. Unscaling, the finite
    check, clipping, the optimizer and the schedule happen once, on the gradient of the whole batch. After a step the
    parameters hold no gradients. Parameters that the optimizer does not hold are left alone.

    A model in DistributedDataParallel or fully_shard is trained by all its ranks together: the batch of a step is what
    all of them pass, and gradients are reduced once a window.

    Options such as `accumulator.clip_norm = 0.5` can be changed at any time (`batch_norm`, `batch_axis`, `cut` and
    `num_samples` between windows); they are checked, and used from the next step on. The model, the optimizer,
    `reduction`, `precision`, `scaler`, `accumulate_dtype`, `capture`, `group`, `reduce`, `has_aux` and `aux` are fixed.

    Args:
        model: The model, already on its device. It may be wrapped in DistributedDataParallel, fully_shard or
            torch.compile.
        optimizer: An optimizer that holds the model's parameters, or a list of several, each with its own part of
            them: Muon for matrices and AdamW for the rest. All of them step, or none does.
        loss: `loss(model, micro_batch)` returns the mean over the micro-batch, as a scalar tensor, or a mapping with
            "loss", such as the output of a Hugging Face model. It may return a tuple of terms, each a mean over a count
            of its own. Leave it out if you compute losses yourself, in `micro_batch()`.
        micro_batch_size: How many samples a micro-batch has, for `step(batch)`.
        batch_axis: The axis of the samples: 1 for time-major batches. A nest like the batch, such as `(1, 0)` or
            `{"x": 1, "prompt": None}`, where tensors differ: None for what is passed whole; keys left out have axis 0.
        cut: `cut(batch, sizes)` returns the micro-batches, with these numbers of samples, of a packed, graph or
            vision-language batch. "list" for a list of samples, or a tuple or dict of lists. None cuts along the axis.
        num_samples: `num_samples(batch)` returns how many samples a batch or micro-batch has, where its tensors do not
            show it, for `cut` and for windows.
        accumulation_steps: How many micro-batches a window has, for `micro_batch()`: a number, or a function of the
            step number.
        weight: `weight(micro_batch)` returns how many items the loss averages over: the number of samples if left
            out; the number of tokens in a language model. A tuple if the loss has several terms.
        reduction: "mean", or "sum" to add losses up undivided.
        clip_norm: Scales the gradient of the batch down to this norm, as `clip_grad_norm_` does. None for no limit.
        clip_value: Clamps each value of that gradient, after `clip_norm`. None for no limit.
        precision: "bf16" or "fp16" computes the loss under autocast, "fp16" with a GradScaler. None leaves it as it is.
        scaler: Your own GradScaler.
        scheduler: A learning rate scheduler, or a list of several, stepped once for each step that is applied.
        accumulate_dtype: Gradients add up in at least this dtype; float32 if None.
        capture: True records micro-batches as CUDA graphs and replays them; "auto" does so where it is possible.
        group: The process group of the ranks; that of the model if None.
        reduce: With fully_shard: "window" reduces gradients once a window, "micro_batch" each time, with less memory.
        on_nonfinite: If the gradient is not finite, "skip" the step, "raise" NonFiniteError, or "stop" training.
        max_skipped: Raise NonFiniteError after this many skipped steps in a row; None for never.
        has_aux: Whether the loss returns the pair `(loss, aux)`, or a mapping whose items beside "loss" are aux. That
            of the whole batch is then in `step.aux`, and its numbers are in `step.metrics`.
        aux: How aux is combined over micro-batches: "mean" (weighted like the first term of the loss), "sum",
            "concatenate", a function of the list of values and the list of weights, or a nest of these. "auto" takes
            the mean of floating-point numbers, the sum of integers, and concatenates what has a row for each sample.
        batch_norm: Running statistics of BatchNorm layers in training mode: "batch" updates them once per step, with
            mean and variance of the whole batch; "micro_batch" with every micro-batch; "frozen" uses them in place of
            the micro-batch's own statistics and leaves them as they are, which is exact.
    """

    model, optimizer, reduction = Fixed(), Fixed(), Fixed()
    precision, accumulate_dtype = Fixed(), Fixed()
    capture, group, reduce = Fixed(), Fixed(), Fixed()
    has_aux, aux = Fixed(), Fixed()
    scaler = Fixed('The GradScaler in use: yours, or ours with precision "fp16".')
    loss, weight = Option(check_loss), Option(check_callable)
    micro_batch_size = Option(check_size)
    accumulation_steps = Option(check_steps)
    batch_axis, cut = OptionOf("_cutting", _check_no_window), OptionOf("_cutting", _check_no_window)
    num_samples = OptionOf("_cutting", _check_no_window)
    clip_norm, clip_value, scheduler = OptionOf("_update"), OptionOf("_update"), OptionOf("_update")
    on_nonfinite, max_skipped = OptionOf("_nonfinite"), OptionOf("_nonfinite")
    batch_norm = OptionOf("_batch_norms", _check_no_window)

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        loss: Loss | None = None,
        micro_batch_size: int | None = None,
        *,
        batch_axis: BatchAxis = 0,
        cut: Literal["list"] | Callable[[Any, list[int]], Sequence[Any]] | None = None,
        num_samples: Callable[[Any], int] | None = None,
        accumulation_steps: AccumulationSteps | None = None,
        weight: Weight | None = None,
        reduction: Reduction = "mean",
        clip_norm: float | None = None,
        clip_value: float | None = None,
        precision: str | None = None,
        scaler: GradScaler | None = None,
        scheduler: Any = None,
        accumulate_dtype: torch.dtype | None = None,
        capture: bool | Literal["auto"] = False,
        group: "ProcessGroup | None" = None,
        reduce: Reduce = "window",
        on_nonfinite: OnNonFinite = "skip",
        max_skipped: int | None = 32,
        has_aux: bool = False,
        aux: Any = "auto",
        batch_norm: Mode = "batch",
        **unknown: Never,
    ) -> None:
        check_known(unknown, Accumulator)
        check_reduction(reduction)
        checks.check_model(model)
        optimizers = self._optimizers = Optimizers(model, optimizer)
        checks.check_dtype(accumulate_dtype)
        self.model, self.optimizer, self.loss, self.weight = model, optimizers.given, loss, weight
        self.micro_batch_size, self.accumulation_steps = micro_batch_size, accumulation_steps
        self._cutting = Cutting(batch_axis, cut, num_samples)
        self.reduction, self.precision, self.accumulate_dtype = reduction, precision, accumulate_dtype
        self.capture, self.group, self.reduce = capture, group, reduce
        self.has_aux, self.aux = has_aux, check_aux("aux", aux, has_aux=has_aux)
        self._gradients = Gradients(optimizers, {p: name for name, p in model.named_parameters()}, accumulate_dtype)
        self._exclusive = self._gradients.exclusive
        parameters = self._gradients.parameters()
        self._precision = Precision(precision, scaler, parameters, self._gradients.is_widened)
        self.scaler = self._precision.scaler
        self._ranks = ranks_of(model, self._gradients, group, reduce)
        self._batch_norms = BatchNorms(model, batch_norm, self._ranks)
        self._nonfinite = NonFinite(on_nonfinite, max_skipped)
        self._update = Update(optimizers, self._gradients, self._precision, self._ranks, self._nonfinite, reduction)
        self.clip_norm, self.clip_value, self.scheduler = clip_norm, clip_value, scheduler
        self._transfer = transfer_for(parameters)
        self._time_axis = TimeAxis(model, can_run_twice=not self._ranks.is_distributed)
        self._eager = Backward(
            model,
            self._gradients,
            self._precision,
            self._ranks,
            self._transfer,
            self._time_axis,
            self._batch_norms,
            has_aux=has_aux,
        )
        self._captured = capture_for(capture, model, loss, self._gradients, self._eager, self._ranks)
        if self._captured is not None:
            optimizers.capture(self._captured.device, self._captured.pool)
        self._backward = self._captured or self._eager
        self._has_seen_labels = False
        self._window: PartialWindow | None = None
        """The open window of `micro_batch()`, or what an interrupted `step()` has done."""
        self.is_interrupted = False
        """Whether `interrupt` was called, and no step has stopped because of it yet."""

    def __repr__(self) -> str:
        """The options that are not at their default, and the number of steps."""
        return f"{described(self)} after {self.num_steps} step{'s' * (self.num_steps != 1)}"

    @property
    def num_steps(self) -> int:
        """How many steps were made, applied or not."""
        return self._update.num_steps

    @property
    def is_stopped(self) -> bool:
        """Whether a step was skipped with `on_nonfinite="stop"`, so that no further one is made."""
        return self._nonfinite.is_stopped

    # --- a batch, or a window of micro-batches -----------------------------------------------------------

    def step(self, batch: Any, *more: Never) -> Step:
        """Makes one step of the optimizer on the whole batch.

        If several ranks train the model together, the whole batch is that of all ranks, and every rank calls this; one
        that has no data this time passes None.

        Args:
            batch: A nest of tensors, which is cut along its leading axis or as `batch_axis` and `cut` say, or a
                `Window` of micro-batches.
        """
        if more:
            raise BatchError(one_batch("step", 1 + len(more)))
        return self._run("step()", batch, self._update)  # unscale, check, clip, optimizer, schedule

    def backward(self, batch: Any, *more: Never) -> Step:
        """Leaves the gradient of the whole batch in .grad, as `loss(model, batch).backward()` would, and steps nothing.

            def closure():                          # LBFGS computes the loss several times in one step
                optimizer.zero_grad()
                return accumulator.backward(batch).loss

            optimizer.step(closure)

        The gradient is finished as that of a step: reduced over ranks, unscaled, seen by hooks, clipped by `clip_norm`
        and `clip_value`. Go on with it as you like, and call `zero_grad()` before the next call. With a GradScaler, go
        on with `scaler.step(optimizer)` and `scaler.update()`.

        The `Step` that is returned is not applied, and not counted. If the gradient is not finite, .grad stays None and
        `on_nonfinite` applies. `interrupt` does not stop it.

        Args:
            batch: What `step` takes.
        """
        if more:
            raise BatchError(one_batch("backward", 1 + len(more)))
        return self._run("backward()", batch, self._leave_in_grad)  # unscale, check, clip

    def _run(self, call: str, batch: Any, finish: Callable[..., Step]) -> Step:
        """Accumulates the gradient of the whole batch, and does with it what `finish` does."""
        with self._exclusive.hold(call):
            cut, window, counts = self._cut_and_weigh(batch, call)  # micro-batches with weights, and progress so far
            get_totals = self._ranks.agree(counts)  # starts to add up the total weight W; get_totals() waits for it
            num_done = len(window.losses)
            try:
                with self._batch_norms.window(is_new=not num_done) if self._batch_norms.has_layers else _NOTHING:
                    sums, losses = self._accumulate(cut, window, get_totals)  # each forward, backward; reduced once
                    aux = self._combined_aux(window, cut.pass_weights, get_totals(), cut.num_skipped)
                if self._batch_norms.has_layers and self._is_counted(get_totals()):
                    self._batch_norms.finish()  # updates running statistics
                step = finish(sums, losses, get_totals(), cut.largest_micro_batch)
                return step if aux is None else aux.onto(step)
            except Exception as error:
                cut.explain(error, num_done)
                raise

    def _leave_in_grad(self, sums: Sums, *of_batch: Any) -> Step:
        if self._captured is not None:
            self._unshare(sums)
        return self._update.without_step(sums, *of_batch)

    def _accumulate(self, cut: Cut, window: PartialWindow, get_totals: GetTotals) -> tuple[Sums, Losses]:
        """Adds up the gradient of the whole batch over all micro-batches and ranks; returns it and the losses.

        A rank that has no data, or fewer micro-batches than others, takes part in what the others do.
        """
        (sums,), losses = window.sums, window.losses
        is_distributed, passes = self._ranks.is_distributed, cut.passes
        arriving = self._arriving(cut, len(losses), get_totals)
        get_shares = shares_of_step(get_totals, self.reduction)  # w / W
        with self._ranks.window() if is_distributed else _NOTHING, GradientBuffer(self._gradients, sums) as buffer:
            for number, micro_batch in enumerate(arriving, len(losses)):
                weight = passes[number][1]
                with self._passing(number, cut, get_totals) if is_distributed else _NOTHING:
                    values, aux = self._backward(self.loss, micro_batch, weight, get_shares, buffer)
                losses.append(values)
                if window.aux is not None:
                    window.aux.add(aux, cut.num_samples(number, self._cutting))
                if self.is_interrupted and number + 1 < len(passes) and not is_distributed and window.is_of_step:
                    break
            # with fully_shard, all ranks make equally many passes, since each gathers parameters
            num_passes = max(get_totals().num_passes) if self._ranks.is_sharded else 0
            for number in range(len(passes), num_passes):
                with self._ranks.passing(is_last=number == num_passes - 1):
                    self._eager.run_spare(self.loss, buffer)
            if is_distributed:
                self._reduce(buffer, get_totals(), has_all_terms=cut.has_all_terms(*cut.pass_weights))
        if len(losses) < len(passes):
            raise self._interruption(window, len(passes))
        sums.multiply(sums.unit)
        return sums, self._ranks.sum_losses(losses, cut.pass_weights, get_totals().total, self.reduction)

    def _cut_and_weigh(self, batch: Any, call: str) -> tuple[Cut, PartialWindow, LocalCounts]:
        """Checks, cuts and weighs the batch. An error is raised on all ranks, and changes nothing."""
        is_step = call == "step()"
        self._check_before(call, "batch" if is_step else "")
        if self.loss is None:
            raise OptionError(f"{call} needs a loss: pass Accumulator(model, optimizer, loss, …)")
        window = self._window
        has_norms = self._batch_norms.has_layers and bool(self._batch_norms.normalising())
        with self._ranks.raise_on_all_ranks() if self._ranks.is_distributed else _NOTHING:
            if is_step:
                self._update.check_not_held_back()
            self._gradients.check_empty()
            num_hooks = self._gradients.check_hooks()
            if self._ranks.is_distributed and self._cutting.is_empty(batch):
                cut = Cut(reduction=self.reduction)
            else:
                how = self._cutting, self.micro_batch_size, self.weight, self.reduction
                runs_all = self.has_aux and not self._ranks.is_sharded  # there, all ranks make equally many passes
                cut = Cut.of(batch, *how, has_norms=has_norms, runs_all=runs_all, call=call)
            if self._ranks.is_distributed:
                self._ranks.check(self._gradients, cut.weights if self.reduction == "mean" else ())
            if window is None:
                window = PartialWindow.of_step(cut, self._new_aux(), is_of_step=is_step)
            else:
                window.check_same(cut.weights)
                window.check_unchanged(self._gradients.versions())
                window.check_trainable(self._gradients.parameters())
        self._window = None
        is_counted = self.weight is None and self.reduction == "mean"
        if not self._has_seen_labels and cut.micro_batches:
            self._has_seen_labels = True  # only the first batch is looked at, since that waits for the device
            if is_counted:
                checks.warn_of_uncounted_labels(batch if cut.is_cut else cut.micro_batches[0])
        if has_norms:
            self._batch_norms.warn(len(cut.weights))
        if self._time_axis.has_layers:
            self._time_axis.begin(cut.micro_batches, self._cutting, is_cut=cut.is_cut, is_counted=is_counted)
        if self.scaler is not None:
            window.check_scale(self._precision.loss_scale())
        return cut, window, cut.counts(num_hooks)

    def _arriving(self, cut: Cut, num_done: int, get_totals: GetTotals) -> Iterable[Any]:
        """The micro-batches that are left to do, on the model's device."""
        micro_batches = [micro_batch for micro_batch, _ in cut.passes[num_done:]]
        if self._captured is not None:
            self._captured.begin(self.loss)
        if self._ranks.is_distributed:
            self._ranks.begin(micro_batches, get_totals)
        return micro_batches if self._transfer is None else self._transfer.arriving(micro_batches)

    def _passing(self, number: int, cut: Cut, get_totals: GetTotals) -> AbstractContextManager[None]:
        """Around one micro-batch of a model that ranks train together: the last one reduces, if it can."""
        is_captured = self._captured is not None and self._captured.is_on
        has_all_terms = cut.has_all_terms(cut.pass_weights[number])
        num_passes = len(cut.passes)
        is_last = not is_captured and self._ranks.is_last(number, num_passes, get_totals, has_all_terms=has_all_terms)
        return self._ranks.passing(is_last=is_last)

    def _reduce(self, buffer: GradientBuffer, totals: Totals, *, has_all_terms: bool) -> None:
        """Makes the sums those of all ranks."""
        if self._is_counted(totals):
            buffer.load()
            self._ranks.complete(buffer, has_all_terms=has_all_terms)

    def _is_counted(self, totals: Totals) -> bool:
        """Whether the window has any weight. If not, it changes nothing."""
        return has_weight(totals.total, totals.num_micro_batches, self.reduction)

    def _check_before(self, call: str, what: str) -> None:
        """Raises before anything begins: errors of earlier steps, calls in a wrong order, an interruption."""
        self._nonfinite.check(self._update.num_steps - 1)  # some ranks may not know yet how the last step ended
        self._nonfinite.check_not_stopped()
        is_backward = call == "backward()"
        if self._window is not None and (is_backward or self._window.is_of_step != (call == "step()")):
            raise self._window.refuse(call)
        if self._optimizers.with_closure is not None and not is_backward:
            raise self._optimizers.refuse(call)
        if what and self.is_interrupted and not self._ranks.is_distributed:
            self.is_interrupted = False
            raise Interrupted(
                f"step {self.num_steps + 1} was interrupted before this {what}: save state_dict(), and pass the same "
                f"{what} to go on"
            )

    # --- one micro-batch at a time -----------------------------------------------------------------------

    @contextmanager
    def micro_batch(self, weight: Any = None) -> Iterator[MicroBatch]:
        """One micro-batch of your own loop; the last one of a window makes the step.

            for x, y in loader:
                with accumulator.micro_batch(weight=len(y)) as micro:
                    micro.backward(criterion(model(x), y))
            accumulator.flush()                     # the last, shorter window

        stands for

            for number, (x, y) in enumerate(loader, 1):
                (criterion(model(x), y) * len(y) / total).backward()    # if the total were known
                if number % accumulation_steps == 0:
                    optimizer.step()
                    optimizer.zero_grad()

        `micro.step` is the `Step` if this micro-batch was its window's last, else None. `micro.skip()` leaves a
        micro-batch out.

        Args:
            weight: Over how many samples or tokens the loss is a mean. A tuple if the loss has several terms, each of
                which then takes a backward pass and a set of gradient sums of its own.
        """
        if self.accumulation_steps is None:
            raise OptionError("micro_batch() does not know how long a window is: pass accumulation_steps=…")
        if weight is None and self.reduction == "mean":
            raise OptionError("micro_batch() needs weight=…: over how many samples or tokens the loss is a mean")
        if self._captured is not None and self._captured.is_required:
            raise OptionError('micro_batch() is your own loop, which cannot be captured: use step(), or capture="auto"')
        terms = on_host(as_terms(1 if weight is None else weight))
        with self._exclusive.hold("micro_batch()"):
            self._check_before("micro_batch()", "micro-batch")
            num_wanted = steps_at(self.accumulation_steps, self._update.num_steps)
            num = 1 if self._window is None else len(self._window.losses) + 1
            if num >= num_wanted:
                self._update.check_not_held_back()
            window = self._open(terms, num_wanted)
            if self._batch_norms.has_layers:
                self._batch_norms.warn(num)
            feed, can_skip = partial(self._eager.feed, window, terms), not self._ranks.is_sharded
            micro = MicroBatch(feed, can_skip=can_skip, is_weighted=weight is not None)
            try:
                with (
                    self._ranks.passing(is_last=False) if self._ranks.is_distributed else _NOTHING,
                    self._batch_norms.passing(is_first=num == 1) if self._batch_norms.has_layers else _NOTHING,
                    self._precision.autocast() if self._precision.dtype else _NOTHING,
                ):
                    yield micro
                micro.check_fed()
                if self._batch_norms.has_layers and micro.is_fed:
                    self._batch_norms.pool()  # layers that ran after the backward pass
                self._window = window if len(window) else None  # none was begun by a block that was skipped
            except BaseException as error:
                window.seen = self._gradients.versions()
                if micro.has_begun:
                    self._window = None
                    self._ranks.drop()
                    error.add_note(
                        f"bigbatch: the window of {len(window)} micro-batches was dropped, since the gradient of the "
                        "last one may be half added; no parameter was changed"
                    )
                raise
            finally:
                micro.is_over = True
            if len(window.losses) >= num_wanted:
                micro.step = self._close(is_ending=False)
            else:
                window.seen = self._gradients.versions()  # only the loss may change parameters in a window

    def _open(self, terms: Terms, num_wanted: int) -> PartialWindow:
        """The window that is open, or a new one, if it can take a micro-batch with these weights."""
        window = self._window
        with self._ranks.raise_on_all_ranks() if self._ranks.is_sharded else _NOTHING:  # others wait in sync_ranks
            check_weight(tuple([w for w in terms if not isinstance(w, Tensor)]), of="this micro-batch")
            if self._ranks.is_distributed:
                self._ranks.check(self._gradients)
            if window is None:
                self._gradients.check_hooks()
            else:
                window.weights.check(terms)
                window.check_unchanged(self._gradients.versions())
        reference = self._ranks.sync_ranks(terms) if self._ranks.is_distributed else ()
        if window is None:
            scale = None if self.scaler is None else self._precision.loss_scale()
            weights = Weights(self.reduction, reference, torch.where, num_wanted)
            window = PartialWindow(weights, [Sums() for _ in terms], aux=self._new_aux(), loss_scale=scale)
        return window

    def flush(self) -> Step | None:
        """Makes the step of the window that is open, however short; None if none is.

        If several ranks train the model together, every rank calls this after its last batch or micro-batch: it takes
        part in the steps of those that still have data, and returns when none has.
        """
        step = None
        for step in self.flushed():  # noqa: B007 - the last one is wanted
            pass
        return step

    def flushed(self) -> Iterator[Step]:
        """The steps that `flush` makes: one at most, unless this rank's data ended before that of others."""
        while True:
            with self._exclusive.hold("flush()"):
                self._check_before("flush()", "")
                step = self._close(is_ending=True)
            if step is None:
                return
            yield step
            if not self._ranks.is_distributed:
                return

    def _close(self, *, is_ending: bool) -> Step | None:
        """Makes the step of the windows that are open on all ranks; None if no rank has one."""
        window = self._window
        with self._ranks.raise_on_all_ranks() if self._ranks.is_distributed else _NOTHING:
            if window is not None:
                marks = self._gradients.versions()
                if is_ending:  # else the last micro-batch has just been
                    self._update.check_not_held_back()
                    window.check_unchanged(marks)
                window.seen = marks
                self._gradients.check_empty()
            num_hooks = self._gradients.check_hooks()
            self._window = None
            weights = [] if window is None else fetch_weights(window.weights.weights)
            if window is not None and self.scaler is not None:
                window.check_scale(self._precision.loss_scale())
            if self._ranks.is_distributed:
                self._ranks.check(self._gradients)
        get_totals = self._ranks.agree(LocalCounts(totals(weights), 0, len(weights), is_ending, num_hooks=num_hooks))
        all_ranks = get_totals()
        if all_ranks.is_ending and not all_ranks.num_micro_batches:
            return None
        self._window = window  # it stays open if this rank ends it too early
        has_window = window is not None
        self._ranks.check_in_sync(all_ranks, has_window=has_window)
        self._window = None
        if window is None:
            cut = Cut(reduction=self.reduction)
            window = PartialWindow.of_step(cut, self._new_aux())
            sums, losses = self._accumulate(cut, window, get_totals)
        else:
            sums = window.summed(all_ranks.total, self._ranks.divisor)
            if self._ranks.is_distributed:
                has_all_terms = self.reduction == "sum" or all(map(all, weights))
                with self._ranks.window(), GradientBuffer(self._gradients, sums) as buffer:
                    self._reduce(buffer, all_ranks, has_all_terms=has_all_terms)
                if self._ranks.keeps_whole_gradients:  # they were inside of the model until now
                    sums.multiply(window.weights.rest(all_ranks.total)[0] * self._ranks.divisor)
            losses = self._ranks.sum_losses(window.losses, weights, all_ranks.total, self.reduction)
        aux = self._combined_aux(window, weights, all_ranks)
        if self._batch_norms.has_layers:
            self._batch_norms.close(has_window=has_window, is_counted=self._is_counted(all_ranks))
        step = self._update(sums, losses, all_ranks)
        return step if aux is None else aux.onto(step)

    @property
    def num_fed(self) -> int:
        """How many micro-batches `micro_batch()` has added to the window that is open."""
        return 0 if self._window is None or self._window.is_of_step else len(self._window)

    def _new_aux(self) -> WindowAux | None:
        return WindowAux(self.aux, is_deferred=self._ranks.is_distributed) if self.has_aux else None

    def _combined_aux(
        self, window: PartialWindow, weights: Sequence[Terms], totals: Totals, num_skipped: int = 0
    ) -> BatchAux | None:
        """What the loss returned beside its value, for the batch of all ranks; None without `has_aux`."""
        if window.aux is None:
            return None
        return window.aux.combined(weights, totals.total, self._ranks, num_skipped)

    # --- verification ------------------------------------------------------------------------------------

    def verify(self, batch: Any, *, tolerance: float | None = None, dtype: torch.dtype | None = None) -> Verification:
        """Compares the accumulated gradient of a batch with that of the full batch, and names the cause if they differ.

            print(accumulator.verify(batch))

        stands for

            print(verify(accumulator.model, batch, accumulator.loss, accumulator.micro_batch_size, …))

        with all options that the accumulator and `verify` share. It works on a copy of the model, and changes nothing.

        Args:
            batch: A batch that fits into memory as a whole, or a `Window` of micro-batches.
            tolerance: The largest relative error that counts as exact, as for `verify`.
            dtype: torch.float64 or torch.float32, as for `verify`.
        """
        from .verify.verify import verify  # which needs this class

        if self.loss is None:
            raise OptionError("verify() needs a loss: pass Accumulator(model, optimizer, loss, …)")
        if self.micro_batch_size is None and not isinstance(batch, Window):
            raise OptionError("verify() does not know where to cut the batch: set micro_batch_size, or pass a Window")
        own, wanted = (inspect.signature(function).parameters for function in (Accumulator, verify))
        options = {name: getattr(self, name) for name in wanted if name in own and name != "unknown"}
        return verify(batch=batch, tolerance=tolerance, dtype=dtype, **options)

    # --- interruption ------------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Asks the step that is running to stop after its micro-batch; signal handlers and other threads may call it.

        The step raises `Interrupted`, and what it has done is kept: `step` with the same batch continues from there,
        bit for bit as if nothing had happened, in this process or in one that loads `state_dict`. If no step is
        running, the next one raises before it begins. If several ranks train the model together, steps are finished,
        and `is_interrupted` stays True for the caller to see.
        """
        self.is_interrupted = True

    def _interruption(self, window: PartialWindow, num_passes: int) -> Interrupted:
        """Keeps what is done of the step, and returns the exception that says how to continue."""
        if self._captured is not None:
            self._unshare(window.sums[0])
        window.loss_scale, window.seen = self._precision.loss_scale(), self._gradients.versions()
        window.check_trainable(self._gradients.parameters())
        self._window = window
        self.is_interrupted = False
        return Interrupted(
            f"step {self.num_steps + 1} was interrupted after {len(window.losses)} of {num_passes} micro-batches: "
            "save state_dict(), and call step() with the same batch to go on"
        )

    @staticmethod
    def _unshare(sums: Sums) -> None:
        """Gives sums memory of their own: recorded passes add to memory that the next window uses again."""
        sums.update({p: g.clone() for p, g in sums.items()})

    def forget(self) -> None:
        """Drops the window that is open or was interrupted, if there is one; the next one starts clean.

        If several ranks train the model together, every rank calls this.
        """
        with self._exclusive.hold("forget()"):
            if self.num_fed:
                self._ranks.drop()
            self._window = None

    def settle(self) -> None:
        """Waits until it is known whether the last step was applied."""
        self._update.settle()

    # --- saving ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that the accumulator knows, in the middle of a window too: gradients, weights, scaler.

        You save the model, the optimizer and the scheduler beside it, as always. If several ranks train the model
        together, each has a state of its own, for torch.distributed.checkpoint.
        """
        with self._exclusive.hold("state_dict()"):
            self.settle()
            if self.num_fed and self._ranks.keeps_whole_gradients:
                raise StateError(
                    f"the gradients of {self.num_fed} micro-batches are inside of the model until the window ends: "
                    'save after a step, or pass reduce="micro_batch"'
                )
            if self._window is not None:
                self._window.batch_norm = self._batch_norms.state()
                self._window.batch_norm_mode = self._batch_norms.batch_norm
            return {
                "num_steps": self.num_steps,
                "scaler": None if self.scaler is None else self.scaler.state_dict(),
                "skipped": self._nonfinite.state_dict(),
                **packed(self._window, self._gradients.parameters(), self._ranks),
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a saved state, in this process or another. If it does not fit, nothing is changed.

        Args:
            state: What `state_dict` returned.
        """
        with self._exclusive.hold("load_state_dict()"):
            saved = SavedState.read(state, self.scaler, self._ranks, self._gradients, self.reduction, self._new_aux())
            if saved.window is not None:
                self._batch_norms.load(saved.window.batch_norm, saved.window.batch_norm_mode)
            if self.scaler is not None:
                self.scaler.load_state_dict(saved.scaler)
            self._window = saved.window
            self._update.num_steps = saved.num_steps
            self._nonfinite.load_state_dict(saved.skipped)
