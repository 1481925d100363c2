"""A window that the user feeds one micro-batch at a time, in a loop of his own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ..core.errors import OptionError, OrderError
from ..core.options import Option, check_callable, check_steps
from ..core.step import Step
from ..core.weight import Terms, Weights, as_terms, check_weight, shares, totals
from ..core.window import steps_at
from . import checks
from . import sums as arithmetic
from .distributed.totals import Agreement, Share
from .passes import Passes
from .precision import is_low
from .sums import Sums
from .weight import check_all, on_host, read, times
from .window import MicroBatch, OpenWindow, values_of


class Feeding(Passes):
    """Keeps the sums of the window that is open, and divides them when it ends."""

    loss = Option(check_callable)
    accumulation_steps = Option(check_steps)
    _open: OpenWindow | None = None

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
        with self._exclusive.hold("micro_batch()"):
            self._check_nonfinite()
            self._refuse_so_far("micro_batch()")
            self._stop_before_beginning("micro-batch")
            num_wanted = steps_at(self.accumulation_steps, self.num_steps)
            if (0 if self._open is None else len(self._open)) + 1 >= num_wanted:
                checks.refuse_held_back(self.optimizer, self.scheduler)
            window = self._window_for(terms)
            self._tell_batch_norm(len(window) + 1)
            micro = MicroBatch(lambda micro, loss: self._feed(micro, window, as_terms(loss), terms))
            try:
                with self._replicas.passing(is_last=False), self._precision.autocast():
                    yield micro
                micro.check_fed()
                self._open = window
            except BaseException as error:
                if micro.has_begun:
                    self._open = None
                    self._replicas.drop()
                    error.add_note(
                        f"bigbatch: the window of {len(window)} micro-batches was dropped, since the gradient of the "
                        "last one may be half added; no parameter was changed"
                    )
                raise
            finally:
                micro.is_over = True
                window.seen = self._seen()  # what a pass does to parameters is the model's own business
            if len(window) >= num_wanted:
                micro.step = self._close(is_ending=False)

    def _refuse_so_far(self, call: str) -> None:
        if self._so_far is not None:
            raise OrderError(
                f"{call} was called after a step that was interrupted with {len(self._so_far.losses)} micro-batches "
                "done: call step() with the same batch to end it, or forget() to drop it"
            )

    def _window_for(self, terms: Terms) -> OpenWindow:
        """The one that is open, or a new one, if it can take a micro-batch with these weights."""
        with self._replicas.telling_before_meeting():
            check_weight(tuple(w for w in terms if not isinstance(w, Tensor)), of="this micro-batch")
            self._replicas.check(self._gradients)
            self._gradients.refuse_multi_grad_hooks()
            if self._open is not None:
                self._open.tally.check(terms)
                self._open.check_unchanged(self._seen())
        reference = self._replicas.meet(terms)
        return self._open or OpenWindow(
            Weights(self.reduction, reference), [Sums() for _ in terms], loss_scale=self._precision.loss_scale()
        )

    def _feed(self, micro: MicroBatch, window: OpenWindow, losses: Terms, weight: Terms) -> None:
        checks.check_loss(losses, len(weight))
        is_any_low = any(map(is_low, losses))
        self._replicas.see_loss(is_low=is_any_low)
        # with a scaler, a large weight would overflow in float16
        is_outside = is_any_low or (self.scaler is not None and not self._replicas.is_sharded)
        window.check_trainable(self._gradients.refuse_foreign())
        micro.has_begun = True
        if self.reduction == "mean" and not self._replicas.is_sharded:
            window.measure_by(weight)
        scale = window.tally.share(weight)
        for t, (loss, sums) in enumerate(zip(losses, window.sums, strict=True)):
            collection = self._gradients.collection(sums)
            try:
                collection.begun()
                if is_outside:
                    self._add_unscaled(loss, scale[t], collection, keep_graph=t < len(losses) - 1)
                else:
                    collection.in_units_of(1.0)
                    self._precision.backward((loss,), scale[t : t + 1], keep_graph=t < len(losses) - 1)
                collection.end()
            finally:
                collection.leave()
        window.tally.add(weight)
        window.losses.append(values_of(losses))
        micro.is_fed = True

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
        while True:
            with self._exclusive.hold("flush()"):
                self._check_nonfinite()
                self._refuse_so_far("flush()")
                step = self._close(is_ending=True)
            if step is None:
                return
            yield step
            if not self._replicas.is_shared:
                return

    def _close(self, *, is_ending: bool) -> Step | None:
        """Makes a step of what this rank has, if anything, and of what the others have; None if nobody has any."""
        with self._replicas.telling():
            if self._open is not None:
                checks.refuse_held_back(self.optimizer, self.scheduler)
                self._gradients.refuse_foreign()
                if is_ending:  # else the last micro-batch has just been
                    self._open.check_unchanged(self._seen())
            window, self._open = self._open, None
            weights = [] if window is None else read(window.tally.weights)
            check_all(weights)
            if window is not None:
                window.check_scale(self._precision.loss_scale())
            self._replicas.check(self._gradients)
        agreed = self._replicas.agree(
            Share(totals(weights), 0, len(weights), is_ending, num_hooks=self._gradients.num_hooks())
        )
        if agreed().is_ending and not agreed().num_micro_batches:
            return None
        try:
            self._replicas.check_met(agreed(), has_window=window is not None)
        except OrderError:
            self._open = window
            raise
        if window is None:
            return self._step(self.loss, [], agreed, None, OpenWindow.of_step(self.reduction, []))
        sums = self._summed(window, weights, agreed())
        by = [shares(weight, agreed().total, self.reduction) for weight in weights]
        losses = self._replicas.sum_losses(window.losses, by, len(agreed().total))
        return self._apply(sums, losses, agreed(), None)

    def _summed(self, window: OpenWindow, weights: list[Terms], agreement: Agreement) -> Sums:
        """The gradient sums of an open window, of all terms and ranks."""
        sums = Sums()
        factors = times(window.tally.rest(agreement.total), self._replicas.divisor)
        for term, factor in zip(window.sums, factors, strict=True):
            arithmetic.scale(term, term.unit * factor)
            arithmetic.add(sums, term)
            term.clear()
        if agreement.has_weight(self.reduction) and self._replicas.is_shared:
            with self._replicas.window(), self._gradients.collecting(sums) as collection:
                self._replicas.complete(collection, is_whole=all(map(self._is_whole, weights)))
            if self._replicas.holds_gradients:  # they were inside of the model until now
                arithmetic.scale(sums, factors[0])
        return sums
