"""A step that is interrupted between micro-batches continues bit for bit, in this process or another."""

import copy
import io
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bigbatch
from bigbatch import BigBatchWarning, Interrupted, OrderError, Step, Window
from bigbatch.torch import Accumulator

from .test_state import assert_bitwise_equal

KINDS = ("float32", "float64", "bf16", "fp16", "terms", "sum", "dropout", "bfloat16 parameters", "sparse")
ROOT = Path(__file__).parents[2]
NUM_MICRO_BATCHES = 6


class Run:
    """A model with an optimizer and an accumulator that is interrupted after a given number of micro-batches."""

    def __init__(self, kind: str, **options: Any) -> None:
        self.kind = kind
        dtype = {"float64": torch.float64, "bfloat16 parameters": torch.bfloat16}.get(kind, torch.float32)
        torch.manual_seed(7)
        self.model = nn.Sequential(
            nn.Embedding(9, 6, sparse=kind == "sparse"), nn.Flatten(), nn.Dropout(0.5 * (kind == "dropout"))
        )
        self.model.append(nn.Linear(18, 3))
        self.model.to(dtype)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.3, momentum=0.0 if kind == "sparse" else 0.9)
        if kind in ("bf16", "fp16"):
            options["precision"] = kind
        if kind == "terms":
            options["weight"] = lambda batch: (len(batch[1]), float(batch[0].sum()))
        if kind == "sum":
            options["reduction"] = "sum"
        clip_norm = None if kind == "sparse" else 0.05
        self.accumulator = Accumulator(self.model, self.optimizer, self.loss, 4, clip_norm=clip_norm, **options)
        self.stop_after = 0
        self.num_passes = 0

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.num_passes += 1
        if self.num_passes == self.stop_after:
            self.accumulator.interrupt()
        logits = model(batch[0]).float()
        mean = F.cross_entropy(logits, batch[1], reduction="sum" if self.kind == "sum" else "mean")
        return (mean, logits.square().mean()) if self.kind == "terms" else mean

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "accumulator": self.accumulator.state_dict(),
            "random": torch.get_rng_state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.accumulator.load_state_dict(state["accumulator"])
        torch.set_rng_state(state["random"])


def batch(number: int = 0, size: int = 23) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 9, (size, 3), generator=generator), torch.randint(0, 3, (size,), generator=generator)


def as_window(data: tuple[Tensor, Tensor]) -> Window[Any]:
    return Window(zip(*(leaf.split(4) for leaf in data), strict=True))


def undisturbed(kind: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    run = Run(kind)
    steps = [run.accumulator.step(batch(number)).as_dict() for number in range(3)]
    return run.state(), steps


def interrupted(run: Run, number: int, after: int, done: int = 0) -> None:
    """Interrupts a step; `done` micro-batches were finished before an earlier interruption."""
    run.stop_after = run.num_passes + after
    message = rf"^step {number + 1} was interrupted after {after + done} of 6 micro-batches: save state_dict\(\), and"
    with pytest.raises(Interrupted, match=message):
        run.accumulator.step(batch(number))
    assert not run.accumulator.is_interrupted
    assert all(p.grad is None for p in run.model.parameters())


@pytest.mark.parametrize("after", [1, 3, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_step_continues_bit_for_bit(kind: str, after: int) -> None:
    expected, expected_steps = undisturbed(kind)
    run = Run(kind)
    steps: list[Step] = [run.accumulator.step(batch(0))]
    before = copy.deepcopy(run.model.state_dict())
    interrupted(run, 1, after)
    assert_bitwise_equal(dict(run.model.state_dict()), dict(before))
    steps.append(run.accumulator.step(batch(1)))
    assert run.num_passes == 2 * NUM_MICRO_BATCHES  # none was repeated
    steps.append(run.accumulator.step(batch(2)))
    assert [step.as_dict() for step in steps] == expected_steps
    assert_bitwise_equal(run.state(), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_new_accumulator_continues_bit_for_bit(kind: str) -> None:
    expected, expected_steps = undisturbed(kind)
    run = Run(kind)
    run.accumulator.step(batch(0))
    interrupted(run, 1, 2)
    saved = io.BytesIO()
    torch.save(run.state(), saved)
    saved.seek(0)
    fresh = Run(kind)
    fresh.load(torch.load(saved, weights_only=True))
    interrupted(fresh, 1, 2, done=2)  # a second time
    fresh.load(fresh.state())
    steps = [fresh.accumulator.step(batch(number)) for number in (1, 2)]
    assert [step.as_dict() for step in steps] == expected_steps[1:]
    assert_bitwise_equal(fresh.state(), expected)


PROGRAM = """
import sys
import torch
from tests.torch.test_interruption import Run, batch
kind, path = sys.argv[1:]
run = Run(kind)
run.load(torch.load(path, weights_only=True))
for number in (1, 2):
    run.accumulator.step(batch(number))
torch.save(run.state(), path)
"""


@pytest.mark.parametrize("kind", ["dropout", "fp16"])
def test_another_process_continues_bit_for_bit(kind: str, tmp_path: Path) -> None:
    expected, _ = undisturbed(kind)
    run = Run(kind)
    run.accumulator.step(batch(0))
    interrupted(run, 1, 4)
    torch.save(run.state(), tmp_path / "state")
    subprocess.run([sys.executable, "-c", PROGRAM, kind, str(tmp_path / "state")], check=True, timeout=120, cwd=ROOT)
    assert_bitwise_equal(torch.load(tmp_path / "state", weights_only=True), expected)


def test_negative_control_dropping_finished_micro_batches_differs() -> None:
    expected, _ = undisturbed("float64")
    run = Run("float64")
    run.accumulator.step(batch(0))
    interrupted(run, 1, 2)
    state = run.accumulator.state_dict()
    state["window"]["gradients"][0][1] *= 1 + 1e-12
    run.accumulator.load_state_dict(state)
    for number in (1, 2):
        run.accumulator.step(batch(number))
    with pytest.raises(AssertionError):
        assert_bitwise_equal(run.state(), expected)


def test_window_may_replace_its_batch() -> None:
    run, plain = Run("float64"), Run("float64")
    interrupted(run, 0, 2)
    assert run.accumulator.step(as_window(batch())).is_applied
    plain.accumulator.step(batch())
    assert_bitwise_equal(dict(run.model.state_dict()), dict(plain.model.state_dict()))


def test_micro_batches_with_weight_zero_are_skipped_before_and_after() -> None:
    def weight(part: Any) -> int:
        return len(part[1]) * (int(part[0].sum()) % 3 > 0)

    run, plain = (Run("float64", weight=weight) for _ in range(2))
    run.stop_after = 2
    with pytest.raises(Interrupted, match="after 2 of"):
        run.accumulator.step(batch())
    assert run.accumulator.step(batch()).as_dict() == plain.accumulator.step(batch()).as_dict()
    assert run.num_passes == plain.num_passes < NUM_MICRO_BATCHES
    assert_bitwise_equal(dict(run.model.state_dict()), dict(plain.model.state_dict()))


def test_a_signal_interrupts() -> None:
    run = Run("float64")
    before = signal.signal(signal.SIGUSR1, lambda *_: run.accumulator.interrupt())
    try:
        inner = run.accumulator.loss

        def signalling(model: nn.Module, part: Any) -> Any:
            if run.num_passes == 2:
                signal.raise_signal(signal.SIGUSR1)
            return inner(model, part)

        run.accumulator.loss = signalling
        with pytest.raises(Interrupted, match="after 3 of 6"):
            run.accumulator.step(batch())
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_another_thread_interrupts() -> None:
    run = Run("float64")
    inner = run.accumulator.loss

    def meanwhile(model: nn.Module, part: Any) -> Any:
        if run.num_passes == 3:
            thread = threading.Thread(target=run.accumulator.interrupt)
            thread.start()
            thread.join()
        return inner(model, part)

    run.accumulator.loss = meanwhile
    with pytest.raises(Interrupted, match="after 4 of 6"):
        run.accumulator.step(batch())


def test_interrupt_between_steps_stops_the_next_one_at_its_start() -> None:
    run = Run("float64")
    run.accumulator.interrupt()
    assert run.accumulator.is_interrupted
    with pytest.raises(Interrupted, match="step 1 was interrupted before this batch"):
        run.accumulator.step(batch())
    assert not run.accumulator.is_interrupted
    assert run.num_passes == 0
    assert run.accumulator.step(batch()).is_applied


def test_interrupt_in_the_last_micro_batch_finishes_the_step() -> None:
    run = Run("float64")
    run.stop_after = NUM_MICRO_BATCHES
    assert run.accumulator.step(batch()).is_applied
    assert run.accumulator.is_interrupted
    with pytest.raises(Interrupted, match="step 2 was interrupted before"):
        run.accumulator.step(batch())


def test_own_loop_stops_before_a_micro_batch() -> None:
    run, plain = (Run("float64", accumulation_steps=6) for _ in range(2))
    for each in (run, plain):
        for number, part in enumerate(as_window(batch())):
            if each is run and number == 2:
                run.accumulator.interrupt()
                with pytest.raises(Interrupted, match="before this micro-batch"):
                    run.accumulator.micro_batch(weight=4).__enter__()
                run.accumulator.load_state_dict(run.accumulator.state_dict())
            with each.accumulator.micro_batch(weight=len(part[1])) as micro:
                micro.backward(each.loss(each.model, part))
    assert micro.step is not None
    assert_bitwise_equal(dict(run.model.state_dict()), dict(plain.model.state_dict()))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (batch(size=19), "had 6 micro-batches when the step was interrupted, now it has 5: pass the same batch"),
        (batch(size=22), "micro-batch 6 had the weight 3 when the step was interrupted, now it has 2: pass the same"),
    ],
)
def test_another_batch_is_refused_and_the_same_one_continues(other: Any, message: str) -> None:
    run, plain = Run("float64"), Run("float64")
    interrupted(run, 0, 3)
    with pytest.raises(OrderError, match=message):
        run.accumulator.step(other)
    assert run.accumulator.step(batch()).as_dict() == plain.accumulator.step(batch()).as_dict()


def test_other_calls_are_refused_until_forget() -> None:
    run, plain = (Run("float64", accumulation_steps=2) for _ in range(2))
    interrupted(run, 0, 3)
    with pytest.raises(
        OrderError, match=r"flush\(\) was called after a step that was interrupted with 3 micro-batches"
    ):
        run.accumulator.flush()
    with pytest.raises(OrderError, match=r"micro_batch\(\) was called after a step that was interrupted"):
        run.accumulator.micro_batch(weight=1).__enter__()
    run.accumulator.forget()
    assert run.accumulator.flush() is None
    assert run.accumulator.step(batch(1)).as_dict() == plain.accumulator.step(batch(1)).as_dict()


def test_changed_parameters_are_detected() -> None:
    run = Run("float64")
    interrupted(run, 0, 3)
    with torch.no_grad():
        run.model[3].weight.mul_(2)
    with pytest.raises(OrderError, match="changed in the middle of a window"):
        run.accumulator.step(batch())
    run.accumulator.forget()
    assert run.accumulator.step(batch()).is_applied


def test_frozen_parameters_are_detected() -> None:
    run, plain = Run("float64"), Run("float64")
    interrupted(run, 0, 3)
    run.model[3].requires_grad_(False)
    with pytest.raises(OrderError, match="2 of 3 parameters were frozen or unfrozen in the middle of a window of 6"):
        run.accumulator.step(batch())
    run.model[3].requires_grad_(True)
    assert run.accumulator.step(batch()).as_dict() == plain.accumulator.step(batch()).as_dict()


def test_error_while_continuing_drops_the_step() -> None:
    run, plain = Run("float64"), Run("float64")
    interrupted(run, 0, 3)
    run.accumulator.loss = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError) as caught:
        run.accumulator.step(batch())
    assert "the progress of the interrupted step was dropped" in caught.value.__notes__[0]
    run.accumulator.loss = run.loss
    assert run.accumulator.step(batch()).as_dict() == plain.accumulator.step(batch()).as_dict()


def test_nonfinite_gradient_after_an_interruption_is_not_applied() -> None:
    run = Run("float64")
    run.model[3].register_forward_hook(lambda _, __, out: out * torch.nan if run.num_passes == 5 else out)
    interrupted(run, 0, 3)
    with pytest.warns(BigBatchWarning, match="step 1 was skipped"):
        assert not run.accumulator.step(batch()).is_applied
    run.num_passes = 100
    assert run.accumulator.step(batch()).is_applied


# --- Ctrl-C ----------------------------------------------------------------------------------------------


def is_pressed_at(line: int, call: Callable[[], Any]) -> bool:
    """Presses Ctrl-C before the n-th line of bigbatch in `call`; False if it runs fewer lines."""
    root = str(Path(bigbatch.__file__).parent)
    num_lines = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal num_lines
        if not frame.f_code.co_filename.startswith(root):
            return None
        num_lines += event == "line"
        if num_lines == line:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def feed(run: Run) -> None:
    """Feeds the rest of a window."""
    kept = run.accumulator.state_dict()["window"]
    for part in as_window(batch(size=7))[0 if kept is None else len(kept["weights"]) :]:
        with run.accumulator.micro_batch(weight=len(part[1])) as micro:
            micro.backward(run.loss(run.model, part))
    run.accumulator.flush()


@pytest.mark.parametrize("way", ["step", "resumed", "micro_batch"])
def test_ctrl_c_at_any_line_loses_nothing(way: str) -> None:
    call = feed if way == "micro_batch" else lambda run: run.accumulator.step(batch(size=7))
    expected = Run("float64", accumulation_steps=2)
    before = copy.deepcopy(expected.model.state_dict())
    call(expected)
    for line in range(1, 10_000, 3):
        run = Run("float64", accumulation_steps=2)
        if way == "resumed":
            run.stop_after = 1
            with pytest.raises(Interrupted):
                call(run)
        is_pressed = is_pressed_at(line, partial(call, run))
        run.optimizer.zero_grad()  # Ctrl-C may arrive while gradients are cleared
        if all(torch.equal(value, before[name]) for name, value in run.model.state_dict().items()):
            call(run)
        for name in ("model", "optimizer"):
            assert_bitwise_equal(run.state()[name], expected.state()[name])
        if not is_pressed:
            break
    assert 200 < line < 9_900
