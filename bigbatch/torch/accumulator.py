"""The accumulator: cut, accumulate, reduce, clip, apply."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from ..core.errors import BatchError, OptionError, OrderError, StateError
from ..core.step import Step
from ..core.weight import (
    Reduction,
    Tally,
    Terms,
    as_terms,
    check_reduction,
    check_weight,
    scales,
    times,
    totals,
)
from ..core.window import AccumulationSteps, Window, positive, steps_at
from . import checks, gradients, nest
from .agreement import Agreement, Share
from .capture import capture_for
from .captured_optimizer import CapturedOptimizer
from .gradients import Gradients, Sums
from .nonfinite import NonFinite, OnNonFinite
from .passes import Loss, Passes
from .precision import Precision, is_low
from .replicas import Reduce
from .saving import packed, unpacked
from .sharing import replicas_of
from .transfer import Transfer
from .weight import Weight, check_all, on_host, read, weigh
from .window import MicroBatch, OpenWindow, values_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Accumulator(Passes):
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

    A model in DistributedDataParallel or fully_shard is trained by all its ranks together: the batch of a step is what
    all of them pass, and gradients are reduced once a window.
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
        capture: bool | Literal["auto"] = False,
        group: "ProcessGroup | None" = None,
        reduce: Reduce = "window",
        on_nonfinite: OnNonFinite = "skip",
        max_skipped: int = 32,
    ) -> None:
        check_reduction(reduction)
        checks.check_callable("loss", loss)
        checks.check_callable("weight", weight)
        checks.check_optimizer(model, optimizer)
        checks.check_scheduler(scheduler)
        checks.check_clip("clip_norm", clip_norm)
        checks.check_clip("clip_value", clip_value)
        checks.check_dtype(accumulate_dtype)
        if micro_batch_size is not None:
            micro_batch_size = positive("micro_batch_size", micro_batch_size)
        if accumulation_steps is not None and not callable(accumulation_steps):
            accumulation_steps = positive("accumulation_steps", accumulation_steps)
        names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        gradients = Gradients(optimizer, names, accumulate_dtype)
        super().__init__(
            optimizer,
            gradients,
            Precision(precision, scaler, gradients.parameters, gradients.is_widened),
            replicas_of(model, gradients, group, reduce),
            reduction,
            clip_norm,
            clip_value,
            scheduler,
            NonFinite(on_nonfinite, max_skipped),
        )
        self.model = model
        self.loss = loss
        self.micro_batch_size = micro_batch_size
        self.accumulation_steps = accumulation_steps
        self.weight = weight
        self._open: OpenWindow | None = None
        self._in_block = False
        self._batch_norms = checks.batch_norm_modules(model)
        self._transfer = Transfer(gradients.parameters)
        self._capture = capture_for(capture, model, loss, gradients, self._precision, self._replicas)
        if self._capture is not None:
            self._captured_optimizer = CapturedOptimizer(optimizer, self._capture.device, self._capture.pool)

    # --- a batch, or a window of micro-batches -----------------------------------------------------------

    def step(self, batch: Any) -> Step:
        """One step of the optimizer on the whole batch: a nest of tensors that is cut, or a `Window`.

        Where several ranks train the model together, the whole batch is that of all ranks, and every rank calls this;
        one that has no data this time passes None.
        """
        self._refuse_in_block("step()")
        self._check_nonfinite()
        if self._open is not None:
            raise OrderError(f"a window of {len(self._open)} micro-batches is open: call flush() before step()")
        if self.loss is None:
            raise OptionError("step() needs a loss: pass Accumulator(model, optimizer, loss, …)")
        with self._replicas.telling():
            micro_batches, sizes = self._micro_batches(batch)
            weights = [(size,) for size in sizes] if self.weight is None else weigh(micro_batches, self.weight)
            self._replicas.check(self._gradients, weights if self.reduction == "mean" else ())
        passes = [
            (micro_batch, weight)
            for micro_batch, weight in zip(micro_batches, weights, strict=True)
            if self.reduction == "sum" or any(weight)  # what counts nothing is left out: its mean may be 0/0
        ]
        agreed = self._replicas.agree(Share(totals(weights), len(passes), len(weights)))
        self._tell_batch_norm(len(weights))
        return self._step(self.loss, passes, agreed, max(sizes, default=None))

    def _micro_batches(self, batch: Any) -> tuple[Sequence[Any], list[int]]:
        """The micro-batches, and their sizes where those are known or needed."""
        if self._replicas.is_shared and nest.is_empty(batch):
            return [], []
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
        if self._capture is not None and self._capture.is_required:
            raise OptionError(
                'micro_batch() is a loop of yours, which cannot be captured: use step(), or capture="auto"'
            )
        terms = on_host(as_terms(1 if weight is None else weight))
        self._refuse_in_block("micro_batch()")
        self._check_nonfinite()
        with self._replicas.telling_before_meeting():
            check_weight(tuple(w for w in terms if not isinstance(w, Tensor)), of="this micro-batch")
            self._replicas.check(self._gradients)
            if self._open is not None:
                self._open.tally.check(terms)
        reference = self._replicas.meet(terms)
        window = self._open or OpenWindow(
            Tally(self.reduction, reference), [Sums() for _ in terms], loss_scale=self._precision.loss_scale()
        )
        micro = MicroBatch(lambda micro, loss: self._feed(micro, window, as_terms(loss), terms))
        self._in_block = True
        try:
            with self._replicas.passing(is_last=False), self._precision.autocast():
                yield micro
        except BaseException as error:
            if micro.has_begun:
                self._open = None
                self._replicas.drop()
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
            micro.step = self._close(is_ending=False)

    def _feed(self, micro: MicroBatch, window: OpenWindow, losses: Terms, weight: Terms) -> None:
        checks.check_loss(losses, len(weight))
        scale = window.tally.scale(weight)
        is_any_low = any(map(is_low, losses))
        self._replicas.see_loss(is_low=is_any_low)
        # with a scaler, a large weight would overflow in float16
        is_outside = is_any_low or (self.scaler is not None and not self._replicas.is_sharded)
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
        """Makes the step of the window that is open, however short; None if none is.

        Where several ranks train the model together, every rank calls this after its last batch or micro-batch: it
        takes part in the steps of those that still have data, and returns when none has.
        """
        step = None
        for step in self.flushed():  # noqa: B007 - the last one is wanted
            pass
        return step

    def flushed(self) -> Iterator[Step]:
        """The steps that `flush` makes: one at most, but for a rank whose data ended before those of the others."""
        self._refuse_in_block("flush()")
        self._check_nonfinite()
        while (step := self._close(is_ending=True)) is not None:
            yield step
            if not self._replicas.is_shared:
                return

    def _close(self, *, is_ending: bool) -> Step | None:
        """Makes a step of what this rank has, if anything, and of what the others have; None if nobody has any."""
        window, self._open = self._open, None
        with self._replicas.telling():
            weights = [] if window is None else read(window.tally.weights)
            check_all(weights)
            if window is not None:
                window.check_scale(self._precision.loss_scale())
            self._replicas.check(self._gradients)
        agreed = self._replicas.agree(Share(totals(weights), 0, len(weights), is_ending))
        if agreed().is_ending and not agreed().num_micro_batches:
            return None
        try:
            self._replicas.check_met(agreed(), has_window=window is not None)
        except OrderError:
            self._open = window
            raise
        if window is None:
            return self._step(self.loss, [], agreed, None)
        sums = self._summed(window, weights, agreed())
        by = [scales(weight, agreed().total, self.reduction) for weight in weights]
        losses = self._replicas.sum_losses(window.losses, by, len(agreed().total))
        return self._apply(sums, losses, agreed(), None)

    def _summed(self, window: OpenWindow, weights: list[Terms], agreement: Agreement) -> Sums:
        """The gradient sums of an open window, of all terms and ranks."""
        sums = Sums()
        factors = times(window.tally.factors(agreement.total), self._replicas.divisor)
        for term, factor in zip(window.sums, factors, strict=True):
            gradients.scale(term, term.unit * factor)
            gradients.add(sums, term)
            term.clear()
        if agreement.has_weight(self.reduction) and self._replicas.is_shared:
            with self._replicas.window(), self._gradients.collecting(sums) as collection:
                self._replicas.complete(collection, is_whole=all(map(self._is_whole, weights)))
            if self._replicas.holds_gradients:  # they were inside of the model until now
                gradients.scale(sums, factors[0])
        return sums

    def _check_nonfinite(self) -> None:
        """By what is known on all ranks alike: of the last step it may not be."""
        self._nonfinite.check(self.num_steps - 1)
        self._nonfinite.refuse_stopped()

    def _refuse_in_block(self, call: str) -> None:
        if self._in_block:
            raise OrderError(f"{call} was called inside of a micro_batch() block: call it after the block")

    def _tell_batch_norm(self, num_micro_batches: int) -> None:
        if num_micro_batches > 1 and self._batch_norms and checks.tell_batch_norm(self.model):
            self._batch_norms = []  # once is enough

    # --- saving ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that the accumulator knows, in the middle of a window too: gradients, weights, scaler.

        The model, the optimizer and the scheduler are the user's and are saved beside it, as always. Where several
        ranks train the model together, each has a state of its own, for torch.distributed.checkpoint.
        """
        self.settle()
        if self._open is not None:
            self._replicas.check_saving(len(self._open))
        window = None if self._open is None else self._open.state_dict(self._gradients.parameters)
        return {
            "num_steps": self.num_steps,
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "skipped": self._nonfinite.state_dict(),
            **packed(window, self._replicas),
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
        window = unpacked(state, self._replicas)
        opened = None if window is None else OpenWindow.load(window, self._gradients.parameters, self.reduction)
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        self._open = opened
        self.num_steps = state["num_steps"]
        self._nonfinite.load_state_dict(state.get("skipped", {}))
