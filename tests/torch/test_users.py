"""Two calls at once: threads, accumulators on one model, forks. Each is refused or exact, never silently wrong."""

import copy
import os
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bigbatch import BigBatchWarning, GradientError, OrderError
from bigbatch.torch import Accumulator

from .test_accumulator import assert_exact_step, loss, make, make_batch, make_model, snapshot


def parts() -> list[Any]:
    return list(zip(*(leaf.split(4) for leaf in make_batch()), strict=True))


def feed(accumulator: Accumulator, part: Any) -> Any:
    with accumulator.micro_batch(weight=len(part[1])) as micro:
        micro.backward(loss(accumulator.model, part))
    return micro.step


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def full_step(model: nn.Module) -> list[Tensor]:
    """The parameters after one plain step on the whole batch."""
    model = copy.deepcopy(model)
    optimizer = sgd(model)
    loss(model, make_batch()).backward()
    optimizer.step()
    return [p.detach() for p in model.parameters()]


def assert_close(model: nn.Module, expected: list[Tensor]) -> None:
    for ours, full in zip(model.parameters(), expected, strict=True):
        assert torch.allclose(ours, full, rtol=1e-12, atol=1e-15)


@contextmanager
def step_under_way(accumulator: Accumulator) -> Iterator[None]:
    """Inside this block, another thread is in the middle of a step."""
    is_inside, may_go_on = threading.Event(), threading.Event()

    def waiting(model: nn.Module, batch: Any) -> Tensor:
        is_inside.set()
        assert may_go_on.wait(30)
        return loss(model, batch)

    accumulator.loss = waiting
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(accumulator.step, make_batch())
        try:
            assert is_inside.wait(30)
            yield
        finally:
            may_go_on.set()
        assert done.result().is_applied
    accumulator.loss = loss


CALLS: dict[str, Callable[[Accumulator], Any]] = {
    "step": lambda accumulator: accumulator.step(make_batch()),
    "micro_batch": lambda accumulator: feed(accumulator, parts()[0]),
    "flush": lambda accumulator: accumulator.flush(),
    "state_dict": lambda accumulator: accumulator.state_dict(),
    "load_state_dict": lambda accumulator: accumulator.load_state_dict({}),
    "forget": lambda accumulator: accumulator.forget(),
}


# --- threads ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", CALLS)
def test_the_second_of_two_threads_is_refused_and_the_first_is_exact(call: str) -> None:
    accumulator = make(accumulation_steps=3)
    expected = full_step(accumulator.model)
    with (
        step_under_way(accumulator),
        pytest.raises(OrderError, match=rf"^{call}\(\) was called while another thread is in a step"),
    ):
        CALLS[call](accumulator)
    assert_close(accumulator.model, expected)
    assert accumulator.num_steps == 1
    assert_exact_step(accumulator)


def test_steps_of_admitted_threads_are_exact() -> None:
    accumulator = make(1)
    outcomes: list[bool] = []

    def work() -> None:
        for _ in range(20):
            try:
                outcomes.append(accumulator.step(make_batch()).is_applied)
            except OrderError:
                outcomes.append(False)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    reference = make(1)
    for _ in range(sum(outcomes)):
        reference.step(make_batch())
    assert accumulator.num_steps == sum(outcomes) > 0
    for ours, other in zip(snapshot(accumulator), snapshot(reference), strict=True):
        assert torch.equal(ours, other)


def test_two_accumulators_that_share_only_some_parameters() -> None:
    model = make_model()
    head = Accumulator(model, torch.optim.SGD(model[2].parameters(), lr=0.1), loss, 4)
    body = Accumulator(model, torch.optim.SGD(model[0].parameters(), lr=0.1), loss, 4)
    whole = Accumulator(model, sgd(model), loss, 4)
    expected = full_step(model)
    head.loss = lambda model, batch: loss(model[2], (model[:2](batch[0]).detach(), batch[1]))
    with step_under_way(body):
        assert head.step(make_batch()).is_applied  # they share no parameter
        assert_close(model[2], expected[2:])
        expected = full_step(model)  # body has not started its first pass
        with pytest.raises(OrderError, match="another thread"):
            whole.step(make_batch())
    assert_close(model[0], expected[:2])
    model.zero_grad()  # body leaves the head's gradients alone
    assert_exact_step(whole)
    with step_under_way(whole):
        for other in (head, body):
            with pytest.raises(OrderError, match="another thread"):
                other.step(make_batch())
    assert_exact_step(whole)


def test_gradients_that_another_step_leaves_during_a_step_are_refused() -> None:
    model = make_model()
    head = Accumulator(model, torch.optim.SGD(model[2].parameters(), lr=0.1), loss, 4)
    body = Accumulator(model, torch.optim.SGD(model[0].parameters(), lr=0.1), loss, 4)

    def meanwhile(model: nn.Module, batch: Any) -> Tensor:
        head.step(make_batch())  # leaves gradients on all of the model
        return loss(model, batch)

    before = [p.detach().clone() for p in model[0].parameters()]
    body.loss = meanwhile
    with pytest.raises(GradientError, match="changed by the loss in the middle of a window, or by another thread"):
        body.step(make_batch())
    for now, then in zip(model[0].parameters(), before, strict=True):
        assert torch.equal(now, then)
        assert now.grad is None


def test_parameters_added_during_a_step() -> None:
    model = make_model()
    accumulator = Accumulator(model, torch.optim.SGD(model[0].parameters(), lr=0.1), loss, 4)
    with step_under_way(accumulator):
        accumulator.optimizer.add_param_group({"params": list(model[2].parameters())})
        for _ in range(2):
            with pytest.raises(OrderError, match="another thread"):
                accumulator.step(make_batch())
    model.zero_grad()
    assert_exact_step(accumulator)


def test_parameters_added_later_are_locked_too() -> None:
    model = make_model()
    growing = Accumulator(model, torch.optim.SGD(model[0].parameters(), lr=0.1), loss, 4)
    other = Accumulator(model, torch.optim.SGD(model[2].parameters(), lr=0.1), loss, 4)
    growing.optimizer.add_param_group({"params": list(model[2].parameters())})
    with step_under_way(growing), pytest.raises(OrderError, match="another thread"):
        other.step(make_batch())


def test_step_inside_the_loss_is_refused() -> None:
    accumulator = make()

    def nested(model: nn.Module, batch: Any) -> Tensor:
        accumulator.step(batch)
        return loss(model, batch)

    accumulator.loss = nested
    with pytest.raises(OrderError, match=r"step\(\) was called inside .* another step of the same parameters"):
        accumulator.step(make_batch())
    assert_exact_step(accumulator)


def test_error_releases_the_lock() -> None:
    accumulator = make(loss=lambda *_: 1 / 0, accumulation_steps=3)
    with pytest.raises(ZeroDivisionError):
        accumulator.step(make_batch())
    with pytest.raises(ZeroDivisionError), accumulator.micro_batch(weight=3):
        raise ZeroDivisionError
    assert_exact_step(accumulator)


def test_copy_trains_its_own_parameters() -> None:
    accumulator = make()
    for other in (copy.deepcopy(accumulator), pickle.loads(pickle.dumps(accumulator))):
        with step_under_way(accumulator):
            assert_exact_step(other)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda accumulator: pickle.loads(pickle.dumps(accumulator))])
def test_copy_continues_its_own_window(copied: Callable[[Accumulator], Accumulator]) -> None:
    accumulator = make(accumulation_steps=3)
    expected = full_step(accumulator.model)
    feed(accumulator, parts()[0])
    for each in (copied(accumulator), accumulator):
        for part in parts()[1:]:
            feed(each, part)
        assert_close(each.model, expected)


# --- changes in the middle of a window --------------------------------------------------------------


def by_another_accumulator(accumulator: Accumulator) -> None:
    Accumulator(accumulator.model, sgd(accumulator.model), loss, 4).step(make_batch())


def by_a_fused_one(accumulator: Accumulator) -> None:
    optimizer = torch.optim.SGD(accumulator.model.parameters(), lr=0.1, fused=True)
    Accumulator(accumulator.model, optimizer, loss, 4).step(make_batch())


def by_hand(accumulator: Accumulator) -> None:
    loss(accumulator.model, make_batch()).backward()
    accumulator.optimizer.step()
    accumulator.optimizer.zero_grad()


def by_loading(accumulator: Accumulator) -> None:
    accumulator.model.load_state_dict({k: v * 2 for k, v in accumulator.model.state_dict().items()})


def by_data(accumulator: Accumulator) -> None:
    accumulator.model[2].bias.data = torch.ones(3, dtype=torch.float64)


CHANGES = [by_another_accumulator, by_a_fused_one, by_hand, by_loading, by_data]


@pytest.mark.parametrize("call", ["micro_batch", "flush"])
@pytest.mark.parametrize("change", CHANGES)
def test_parameters_changed_in_the_middle_of_a_window_are_detected(change: Any, call: str) -> None:
    accumulator = make(accumulation_steps=3)
    feed(accumulator, parts()[0])
    change(accumulator)
    before = snapshot(accumulator)
    for _ in range(2):  # the window is kept
        with pytest.raises(OrderError, match="changed in the middle of a window of 1 micro-batches"):
            CALLS[call](accumulator)
    for now, then in zip(snapshot(accumulator), before, strict=True):
        assert torch.equal(now, then)
    accumulator.forget()
    assert accumulator.flush() is None
    assert_exact_step(accumulator)


def test_fused_optimizer_stepped_by_hand_is_detected() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    accumulator = Accumulator(model, optimizer, loss, 4, accumulation_steps=3)
    accumulator.step(make_batch())
    feed(accumulator, parts()[0])
    by_hand(accumulator)
    with pytest.raises(OrderError, match="changed in the middle"):
        feed(accumulator, parts()[1])


def one_more() -> nn.Parameter:
    return nn.Parameter(torch.zeros(2, dtype=torch.float64))


GROUPS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "a group is added": lambda optimizer: optimizer.add_param_group({"params": [one_more()]}),
    "one is appended": lambda optimizer: optimizer.param_groups[0]["params"].append(one_more()),
    "one is put in front": lambda optimizer: optimizer.param_groups[0]["params"].insert(0, one_more()),
}


@pytest.mark.parametrize("where", ["between blocks", "in a block", "before flush", "after loading"])
@pytest.mark.parametrize("how", GROUPS)
def test_parameters_added_in_the_middle_of_a_window_are_named_as_the_cause(how: str, where: str) -> None:
    accumulator = make(accumulation_steps=3)
    feed(accumulator, parts()[0])
    if where == "after loading":
        accumulator.load_state_dict(accumulator.state_dict())
    refused = pytest.raises(OrderError, match="holds 5 parameters but held 4 after the first 1 micro-batches")
    if where == "in a block":
        with refused, accumulator.micro_batch(weight=4) as micro:
            GROUPS[how](accumulator.optimizer)
            micro.backward(loss(accumulator.model, parts()[1]))
    else:
        GROUPS[how](accumulator.optimizer)
        with refused:
            if where == "before flush":
                accumulator.flush()
            else:
                feed(accumulator, parts()[1])
    accumulator.forget()
    for part in parts():  # from the next window on they take part
        feed(accumulator, part)
    accumulator.forget()


def test_parameters_removed_in_the_middle_of_a_window_are_named_as_the_cause() -> None:
    accumulator = make(accumulation_steps=3)
    feed(accumulator, parts()[0])
    accumulator.optimizer.param_groups[0]["params"].pop()
    with pytest.raises(OrderError, match="holds 3 parameters but held 4"):
        feed(accumulator, parts()[1])


def test_an_appended_parameter_is_locked_for_other_accumulators_too() -> None:
    model = make_model()
    body = Accumulator(model, torch.optim.SGD(model[0].parameters(), lr=0.1), loss, 4)
    head = Accumulator(model, torch.optim.SGD(model[2].parameters(), lr=0.1), loss, 4)
    body.optimizer.param_groups[0]["params"].append(model[2].bias)
    with step_under_way(body), pytest.raises(OrderError, match="another thread"):
        head.step(make_batch())


@pytest.mark.parametrize("is_loaded", [False, True])
def test_parameter_frozen_in_the_middle_of_a_window_is_detected(is_loaded: bool) -> None:
    accumulator = make(accumulation_steps=3)
    expected = full_step(accumulator.model)
    feed(accumulator, parts()[0])
    if is_loaded:
        accumulator.load_state_dict(accumulator.state_dict())
    for is_trainable in (False, True):
        accumulator.model[0].requires_grad_(is_trainable)
        if not is_trainable:
            with pytest.raises(OrderError, match="2 of 4 parameters were frozen or unfrozen in the middle of a window"):
                feed(accumulator, parts()[1])
    for part in parts()[1:]:
        feed(accumulator, part)
    assert_close(accumulator.model, expected)


def test_parameter_may_be_frozen_outside_the_blocks() -> None:
    accumulator = make(accumulation_steps=9)
    expected = full_step(accumulator.model)
    for part in parts():
        with accumulator.micro_batch(weight=len(part[1])) as micro:
            accumulator.model[0].requires_grad_(True)
            micro.backward(loss(accumulator.model, part))
        accumulator.model[0].requires_grad_(False)
    accumulator.flush()
    assert_close(accumulator.model, expected)


def test_two_accumulators_one_after_the_other_are_exact() -> None:
    model = make_model()
    first, second = (Accumulator(model, sgd(model), loss, 4, accumulation_steps=3) for _ in range(2))
    for accumulator in (first, second, first):
        expected = full_step(model)
        for part in parts():
            step = feed(accumulator, part)
        assert step.is_applied
        assert_close(model, expected)
        assert_exact_step(second)


def test_two_open_windows_on_one_model_end_with_one_step() -> None:
    model = make_model()
    first, second = (Accumulator(model, sgd(model), loss, 4, accumulation_steps=3) for _ in range(2))
    expected = full_step(model)
    for part in parts():
        for accumulator in (first, second)[: 1 + (part is not parts()[-1])]:
            if len(part[1]) == 4 or accumulator is first:
                feed(accumulator, part)
    assert_close(model, expected)
    with pytest.raises(OrderError, match="changed in the middle of a window of 2"):
        second.flush()


@pytest.mark.parametrize("order", ["accumulator first", "model first"])
def test_states_may_be_loaded_in_any_order_in_the_middle_of_a_window(order: str) -> None:
    accumulator, undisturbed = make(accumulation_steps=3), make(accumulation_steps=3)
    feed(accumulator, parts()[0])
    state, model = accumulator.state_dict(), copy.deepcopy(accumulator.model.state_dict())
    by_another_accumulator(accumulator)
    loads = [lambda: accumulator.load_state_dict(state), lambda: accumulator.model.load_state_dict(model)]
    for load in loads if order == "accumulator first" else reversed(loads):
        load()
    for part in parts()[1:]:
        feed(accumulator, part)
    for part in parts():
        feed(undisturbed, part)
    for now, then in zip(snapshot(accumulator), snapshot(undisturbed), strict=True):
        assert torch.equal(now, then)


class Constrained(nn.Linear):
    """Limits its weight in each forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, 2, 0, 0.5)
        return super().forward(x)


def test_forward_pass_may_change_its_own_parameters() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Constrained(5, 3)).double()
    accumulator = Accumulator(model, sgd(model), accumulation_steps=3)
    expected = full_step(model)
    for part in parts():
        feed(accumulator, part)
    assert_close(model, expected)


def test_forget_drops_only_the_window() -> None:
    accumulator = make(accumulation_steps=9)
    accumulator.forget()
    feed(accumulator, parts()[0])
    accumulator.forget()
    assert accumulator.state_dict()["window"] is None
    assert_exact_step(accumulator)


# --- forks -----------------------------------------------------------------------------------------------


def in_child(work: Callable[[], Any], path: Path) -> Any:
    """Runs `work` in a forked process and returns its result; it must not hang."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns about forks with threads
        child = os.fork()
    if not child:
        try:
            torch.set_num_threads(1)
            torch.save(work(), path)
        finally:
            os._exit(0)
    return left_by(child, path)


def left_by(child: int, path: Path) -> Any:
    waiter = threading.Thread(target=os.waitpid, args=(child, 0), daemon=True)
    waiter.start()
    waiter.join(60)
    if waiter.is_alive():
        os.kill(child, 9)
    assert not waiter.is_alive(), "the child hangs"
    return torch.load(path, weights_only=True)


def test_open_window_continues_on_both_sides_of_a_fork(tmp_path: Path) -> None:
    accumulator = make(accumulation_steps=3)
    expected = full_step(accumulator.model)

    def rest() -> list[Tensor]:
        for part in parts()[1:]:
            feed(accumulator, part)
        return snapshot(accumulator)

    feed(accumulator, parts()[0])
    of_child = in_child(rest, tmp_path / "child")
    for ours, childs in zip(rest(), of_child, strict=True):
        assert torch.equal(ours, childs)
    assert_close(accumulator.model, expected)


def test_fork_during_the_step_of_another_thread_is_refused_in_the_child(tmp_path: Path) -> None:
    accumulator = make(accumulation_steps=3)

    def attempts() -> list[str]:
        found = []
        for call in ("step", "micro_batch", "flush", "state_dict"):
            with pytest.raises(OrderError) as caught:
                CALLS[call](accumulator)
            found.append(str(caught.value))
        return found

    with step_under_way(accumulator):
        messages = in_child(attempts, tmp_path / "child")
    assert len(messages) == 4
    for message in messages:
        assert "while another thread is in a step of the same parameters" in message
    assert_exact_step(accumulator)


def test_fork_inside_the_loss_continues_on_both_sides(tmp_path: Path) -> None:
    accumulator = make()
    expected = full_step(accumulator.model)
    children: list[int] = []

    def forking(model: nn.Module, batch: Any) -> Tensor:
        if not children:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                children.append(os.fork())
            if children == [0]:
                torch.set_num_threads(1)  # the threads of OpenMP do not survive a fork
        return loss(model, batch)

    accumulator.loss = forking
    try:
        accumulator.step(make_batch())
        if children == [0]:
            torch.save(snapshot(accumulator), tmp_path / "child")
    finally:
        if children == [0]:
            os._exit(0)
    of_child = left_by(children[0], tmp_path / "child")
    assert_close(accumulator.model, expected)
    assert_close(accumulator.model, of_child)


class Numbers(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 11

    def __getitem__(self, number: int) -> Any:
        return make_batch()[0][number], make_batch()[1][number]


def test_data_loader_workers_that_fork_in_the_middle_of_a_window() -> None:
    accumulator = make(accumulation_steps=3)
    expected = full_step(accumulator.model)
    feed(accumulator, parts()[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        loader = torch.utils.data.DataLoader(Numbers(), 4, num_workers=1, multiprocessing_context="fork")
        for number, part in enumerate(loader):
            if number:
                feed(accumulator, part)
    assert_close(accumulator.model, expected)


def test_skipped_step_of_another_accumulator_changes_nothing() -> None:
    accumulator = make(accumulation_steps=3)
    expected = full_step(accumulator.model)
    other = Accumulator(accumulator.model, sgd(accumulator.model), loss, 4)
    x, y = make_batch()
    for number, part in enumerate(parts()):
        if number:
            with pytest.warns(BigBatchWarning, match="skipped"):
                other.step((x * torch.nan, y))
        feed(accumulator, part)
    assert_close(accumulator.model, expected)
