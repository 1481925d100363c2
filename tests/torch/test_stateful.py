"""Any order of calls gives a right result or an error of bigbatch, and the next good step is exact.

A state machine calls one accumulator in random order: steps on batches and windows, micro-batches one at a time,
interruptions, saving and loading, bad input of all kinds. A plain model trains on the full batches in float64. After
every call both have the same parameters. BIGBATCH_EXAMPLES is the number of sequences that are tried.
"""

import copy
import os
import warnings
from contextlib import suppress
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor, nn

from bigbatch import (
    BigBatchError,
    BigBatchWarning,
    GradientError,
    Interrupted,
    NonFiniteError,
    OrderError,
    Step,
    Window,
)
from bigbatch.core.weight import as_terms
from bigbatch.torch import Accumulator
from bigbatch.torch.backward import Backward
from tests.examples import examples

LIMIT = 1e-9
MAX_SKIPPED = 2
Part = tuple[Tensor, Tensor, Tensor]

seeds = st.integers(0, 10**6)
sizes = st.lists(st.integers(1, 5), min_size=1, max_size=4)
zeros = st.sampled_from(["none", "some", "all"])


def make_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def make_part(size: int, seed: int, zeros: str, is_bad: bool = False) -> Part:
    """Samples, targets, and the weight of each sample."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(size, 2, generator=generator, dtype=torch.float64)
    weight = torch.rand(size, generator=generator, dtype=torch.float64) + 0.1
    if zeros == "all":
        weight.zero_()
    elif zeros == "some":
        weight[torch.rand(size, generator=generator) < 0.5] = 0
    return x * torch.nan if is_bad else x, y, weight


def joined(parts: list[Part]) -> Part:
    x, y, weight = map(torch.cat, zip(*parts, strict=True))
    return x, y, weight


class Reference:
    """A plain model and its optimizer, trained on full batches."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.model = make_model()
        self.optimizer = sgd(self.model)

    def loss(self, parts: list[Part]) -> Tensor | None:
        """The loss of the whole batch; None if its weight is zero."""
        is_sum = self.options["reduction"] == "sum"
        if self.options["num_terms"] == 1 and not is_sum:  # a mean over nothing is left out, whatever its value
            parts = [part for part in parts if part[2].sum()]
        if not parts:
            return None
        x, y, weight = joined(parts)
        out = self.model(x)
        terms = [(F.mse_loss(out, y, reduction="none").mean(1) * weight).sum()]
        if not is_sum:
            terms[0] = terms[0] / weight.sum() if weight.sum() else terms[0] * 0
        if self.options["num_terms"] == 2:
            terms.append(out.square().mean(1).sum() if is_sum else out.square().mean())
        return sum(terms[1:], terms[0])

    def gradients(self, loss: Tensor) -> bool:
        """Leaves the clipped gradients of the loss; returns whether they are finite."""
        self.optimizer.zero_grad()
        loss.backward()
        return all(bool(p.grad.isfinite().all()) for p in self.model.parameters())

    def step(self) -> None:
        if self.options["clip_norm"] is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.options["clip_norm"])
        self.optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


class FailsInBackward(torch.autograd.Function):
    """Raises in the backward pass, as if memory ran out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ZeroDivisionError


class Story(RuleBasedStateMachine):
    """One accumulator, its reference, and the expected state of both."""

    kind: ClassVar[type[Accumulator]] = Accumulator

    @initialize(
        reduction=st.sampled_from(["mean", "sum"]),
        num_terms=st.sampled_from([1, 2]),
        clip_norm=st.sampled_from([None, 0.05]),
        on_nonfinite=st.sampled_from(["skip", "raise", "stop"]),
        micro_batch_size=st.integers(1, 5),
        accumulation_steps=st.integers(1, 4),
    )
    def begin(self, **options: Any) -> None:
        self.options = options
        self.reference = Reference(options)
        self.model = make_model()
        self.optimizer = sgd(self.model)
        self.accumulator = self.new()
        self.fed: list[Part] = []
        self.interrupted: list[Part] = []
        self.is_asked = False
        self.num_skipped = 0
        self.num_steps = 0
        self.interrupt_in = 0
        self.raise_in = 0

    def new(self) -> Accumulator:
        names = ("reduction", "clip_norm", "on_nonfinite", "accumulation_steps")
        return self.kind(
            self.model,
            self.optimizer,
            self.loss,
            self.options["micro_batch_size"],
            weight=self.weight,
            max_skipped=MAX_SKIPPED,
            **{name: self.options[name] for name in names},
        )

    def weight(self, part: Part) -> Any:
        return part[2] if self.options["num_terms"] == 1 else (part[2], torch.ones(len(part[1])))

    def loss(self, model: nn.Module, part: Part) -> Any:
        self.interrupt_in -= 1
        if self.interrupt_in == 0:
            self.accumulator.interrupt()
            self.is_asked = True
        self.raise_in -= 1
        if self.raise_in == 0:
            raise ZeroDivisionError("the loss's own")
        x, y, weight = part
        out = model(x)
        is_sum = self.options["reduction"] == "sum"
        first = (F.mse_loss(out, y, reduction="none").mean(1) * weight).sum() / (1 if is_sum else weight.sum())
        if self.options["num_terms"] == 1:
            return first
        return first, out.square().mean(1).sum() if is_sum else out.square().mean()

    # --- expected results ------------------------------------------------------------------------

    def expect(self, parts: list[Part], make: Any) -> None:
        """Asserts that the step of `make` on these parts is that of the reference on all of them."""
        loss = self.reference.loss(parts)
        is_finite = loss is not None and self.reference.gradients(loss)
        on_nonfinite = self.options["on_nonfinite"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BigBatchWarning)
            if loss is not None and not is_finite:
                if on_nonfinite == "raise":
                    with pytest.raises(NonFiniteError):
                        make()
                    return
                self.num_skipped += 1
                self.num_steps += 1
                if on_nonfinite == "skip" and self.num_skipped >= MAX_SKIPPED:
                    with pytest.raises(NonFiniteError, match=f"{self.num_skipped} steps were skipped"):
                        make()
                    return
                step = make()
                assert not step.is_applied
                assert self.accumulator.is_stopped is (on_nonfinite == "stop")
                return
            step = make()
        assert isinstance(step, Step)
        assert step.is_applied is is_finite
        self.num_steps += 1
        if loss is not None:
            self.num_skipped = 0
            self.reference.step()
            assert step.loss == pytest.approx(loss.item(), rel=LIMIT)

    def refused(self, call: Any) -> bool:
        """Whether only a call that ends this state is allowed now; if so, asserts that others are refused."""
        if self.accumulator.is_stopped:
            with pytest.raises(OrderError, match="stopped"):
                call()
            return True
        if self.is_asked:
            self.is_asked = False
            with pytest.raises((Interrupted, OrderError)):
                call()
            self.is_asked = self.accumulator.is_interrupted  # a wrong order of calls is reported first
            return True
        return False

    # --- good calls --------------------------------------------------------------------------------------

    def batch(self, sizes: list[int], seed: int, zeros: str, is_bad: bool) -> list[Part]:
        return [make_part(size, seed + number, zeros, is_bad) for number, size in enumerate(sizes)]

    def data_of(self, parts: list[Part], is_window: bool) -> tuple[Any, list[Part]]:
        """The argument of step(), and the parts that it consists of."""
        if is_window:
            return Window(parts), parts
        whole = joined(parts)
        cut = [leaf.split(self.options["micro_batch_size"]) for leaf in whole]
        return whole, list(zip(*cut, strict=True))

    def num_passes(self, parts: list[Part]) -> int:
        is_mean_of_one = self.options["num_terms"] == 1 and self.options["reduction"] == "mean"
        return sum(bool(part[2].sum()) for part in parts) if is_mean_of_one else len(parts)

    @rule(sizes=sizes, seed=seeds, zeros=zeros, is_bad=st.integers(0, 5).map(lambda n: n == 0), is_window=st.booleans())
    def step(self, sizes: list[int], seed: int, zeros: str, is_bad: bool, is_window: bool) -> None:
        data, parts = self.data_of(self.batch(sizes, seed, zeros, is_bad), is_window)
        if self.refused(lambda: self.accumulator.step(data)):
            return
        if self.fed:
            with pytest.raises(OrderError, match="is open"):
                self.accumulator.step(data)
        elif not self.interrupted:
            self.expect(parts, lambda: self.accumulator.step(data))

    @rule(sizes=sizes, seed=seeds, zeros=zeros, is_window=st.booleans(), after=st.integers(1, 6))
    def step_interrupted(self, sizes: list[int], seed: int, zeros: str, is_window: bool, after: int) -> None:
        if self.fed or self.interrupted or self.is_asked or self.accumulator.is_stopped:
            return
        data, parts = self.data_of(self.batch(sizes, seed, zeros, is_bad=False), is_window)
        self.interrupt_in = after
        if after < self.num_passes(parts):
            with pytest.raises(Interrupted, match=f"after {after} of"):
                self.accumulator.step(data)
            self.interrupted, self.is_asked = parts, False
        else:
            self.expect(parts, lambda: self.accumulator.step(data))
            assert self.accumulator.is_interrupted is self.is_asked
        self.interrupt_in = 0

    @precondition(lambda self: self.interrupted)
    @rule()
    def go_on(self) -> None:
        parts = self.interrupted
        if not self.refused(lambda: self.accumulator.step(Window(parts))):
            self.interrupted = []
            self.expect(parts, lambda: self.accumulator.step(Window(parts)))

    @rule(size=st.integers(1, 5), seed=seeds, zeros=zeros, is_bad=st.integers(0, 7).map(lambda n: n == 0))
    def feed(self, size: int, seed: int, zeros: str, is_bad: bool) -> None:
        part = make_part(size, seed, zeros, is_bad)

        def call() -> Step | None:
            with self.accumulator.micro_batch(weight=self.weight(part)) as micro:
                micro.backward(self.loss(self.model, part))
            return micro.step

        if self.refused(call):
            return
        if self.interrupted:
            with pytest.raises(OrderError, match="interrupted"):
                call()
            return
        self.fed.append(part)
        if len(self.fed) < self.options["accumulation_steps"]:
            assert call() is None
        else:
            fed, self.fed = self.fed, []
            self.expect(fed, call)

    @rule()
    def flush(self) -> None:
        if self.accumulator.is_stopped or self.interrupted:
            with pytest.raises(OrderError):
                self.accumulator.flush()
        elif self.fed:
            fed, self.fed = self.fed, []
            self.expect(fed, self.accumulator.flush)
        else:
            assert self.accumulator.flush() is None

    @rule()
    def interrupt(self) -> None:
        self.accumulator.interrupt()
        self.is_asked = True

    @rule()
    def forget(self) -> None:
        self.accumulator.forget()
        self.fed, self.interrupted = [], []

    @rule()
    def save_and_load(self) -> None:
        state, model, optimizer = (o.state_dict() for o in (self.accumulator, self.model, self.optimizer))
        self.model = make_model()
        self.model.load_state_dict(model)
        self.optimizer = sgd(self.model)
        self.optimizer.load_state_dict(optimizer)
        self.accumulator = self.new()
        self.accumulator.load_state_dict(state)
        self.is_asked = False

    @rule()
    def copy(self) -> None:
        """Continues with a copy, which has the same loss but its own model."""
        with_others = {id(self): self, id(self.kind): self.kind}
        self.accumulator = copy.deepcopy(self.accumulator, with_others)
        self.model, self.optimizer = self.accumulator.model, self.accumulator.optimizer

    # --- bad calls ---------------------------------------------------------------------------------------

    @rule(
        what=st.sampled_from(
            ["empty", "mismatched", "text", "no parts", "negative", "nan", "vector", "float", "graph"]
        ),
        size=st.integers(2, 6),
        seed=seeds,
    )
    def bad_step(self, what: str, size: int, seed: int) -> None:
        if self.interrupted:
            size = sum(len(part[1]) for part in self.interrupted) + 20  # another number of micro-batches
        x, y, weight = make_part(size, seed, "none")
        batch = {
            "empty": (x[:0], y[:0], weight[:0]),
            "mismatched": (x, y[1:], weight),
            "text": "text",
            "no parts": Window([]),
            "negative": (x, y, -weight),
            "nan": (x, y, weight * torch.nan),
        }.get(what, (x, y, weight))
        changed = {
            "vector": lambda model, part: model(part[0]).sum(1).repeat(2),
            "float": lambda model, part: 1.5,
            "graph": lambda model, part: model(part[0]).detach().sum(),
        }
        self.accumulator.loss = changed.get(what, self.loss)
        with pytest.raises(BigBatchError):
            self.accumulator.step(batch)
        self.is_asked &= self.accumulator.is_interrupted
        self.accumulator.loss = self.loss

    @rule(sizes=sizes, seed=seeds, after=st.integers(1, 4))
    def loss_raises(self, sizes: list[int], seed: int, after: int) -> None:
        parts = self.interrupted or self.batch(sizes, seed, "none", is_bad=False)
        if self.fed or self.is_asked or self.accumulator.is_stopped:
            return
        state = self.accumulator.state_dict()["window"]
        left = len(parts) if state is None else self.num_passes(parts) - len(state["losses"])
        self.raise_in = min(after, left)
        with pytest.raises(ZeroDivisionError):
            self.accumulator.step(Window(parts))
        self.interrupted, self.raise_in = [], 0

    @rule(
        where=st.sampled_from(
            ["before", "after", "weight", "no backward", "twice", "vector", "caught", "frozen", "late"]
        ),
        seed=seeds,
    )
    def bad_feed(self, where: str, seed: int) -> None:
        x, y, weight = part = make_part(3, seed, "none")
        must_refuse = self.accumulator.is_stopped or bool(self.interrupted) or self.is_asked
        with pytest.raises((BigBatchError, ZeroDivisionError)):
            weights = self.weight((x, y, -weight if where == "weight" else weight))
            with self.accumulator.micro_batch(weight=weights) as micro:
                if where == "before":
                    raise ZeroDivisionError
                if where == "vector":
                    micro.backward(self.model(x).sum(1))
                if where == "caught":  # the user raises it in the block
                    with suppress(ZeroDivisionError):
                        micro.backward(tuple(map(FailsInBackward.apply, as_terms(self.loss(self.model, part)))))
                if where == "frozen":
                    self.model[0].requires_grad_(False)
                if where not in ("no backward", "caught", "late"):
                    micro.backward(self.loss(self.model, part))
                if where == "twice":
                    micro.backward(self.loss(self.model, part))
                if where in ("after", "frozen"):
                    raise ZeroDivisionError
                if where == "late":
                    late = micro
        self.model[0].requires_grad_(True)
        if where == "late" and not must_refuse:
            with pytest.raises(BigBatchError):
                late.backward(self.loss(self.model, part))
        self.is_asked &= self.accumulator.is_interrupted
        is_whole = where == "frozen" and self.fed  # refused before it was added
        if where in ("after", "twice", "caught", "frozen") and not must_refuse and not is_whole:
            self.fed = []  # half added, so dropped

    @rule(what=st.sampled_from([{}, {"num_steps": 1}, None]))
    def bad_state(self, what: Any) -> None:
        with pytest.raises(BigBatchError):
            self.accumulator.load_state_dict(what)

    # --- always ------------------------------------------------------------------------------------------

    @invariant()
    def both_are_the_same(self) -> None:
        if not hasattr(self, "accumulator"):
            return
        for ours, full in zip(self.model.parameters(), self.reference.model.parameters(), strict=True):
            assert ours.grad is None
            assert float((ours - full).detach().norm()) <= LIMIT * float(full.detach().norm())
        assert self.accumulator.num_steps == self.num_steps
        window = self.accumulator.state_dict()["window"]
        assert (window is not None) is bool(self.fed or self.interrupted)
        assert window is None or len(window["weights"]) == len(self.fed or self.interrupted)


def told(kind: type[Accumulator], num: int, phases: tuple[Phase, ...] = tuple(Phase)) -> None:
    """Runs this many random sequences of calls on this kind of accumulator."""
    story = type("Story", (Story,), {"kind": kind})
    run_state_machine_as_test(
        story,
        settings=settings(
            max_examples=num,
            stateful_step_count=14,
            derandomize="BIGBATCH_EXAMPLES" not in os.environ,  # a long run has new sequences each time
            database=None,
            deadline=None,
            report_multiple_bugs=False,
            phases=phases,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_any_order_of_calls_is_right_or_refused() -> None:
    told(Accumulator, examples(100))


class MeanOfMeans(Accumulator):
    """Divides by the number of micro-batches."""

    def __init__(self, *args: Any, **options: Any) -> None:
        weight = options.pop("weight")
        super().__init__(*args, **options, weight=lambda part: tuple(w.sum().sign() for w in as_terms(weight(part))))


class Forgetful(Accumulator):
    """Loses the open window when a state is loaded."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({**state, "window": None} if state else state)


class StartsAnew(Accumulator):
    """Does the micro-batches of an interrupted step twice."""

    def _accumulate(self, cut: Any, window: Any, get_totals: Any) -> Any:
        window.losses.clear()
        return super()._accumulate(cut, window, get_totals)


class UnawareBackward(Backward):
    """Takes a micro-batch whose backward pass failed for one that was added."""

    def feed(self, window: Any, weight: Any, micro: Any, losses: Any) -> None:
        try:
            super().feed(window, weight, micro, losses)
        finally:
            micro.is_fed = micro.has_begun


class Unaware(Accumulator):
    """Continues a window whose backward pass failed."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._eager.__class__ = UnawareBackward


class Hasty(Accumulator):
    """Applies gradients that are not finite."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._update._place_not_finite = lambda *_: (None, False)


@pytest.mark.parametrize("broken", [MeanOfMeans, Forgetful, StartsAnew, Unaware, Hasty])
def test_negative_control_broken_accumulators_are_caught(broken: type[Accumulator]) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception, BigBatchWarning, GradientError)):
        told(broken, 1000, (Phase.generate,))
