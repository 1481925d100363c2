"""Captured passes give the same numbers, or an error that says why not."""

import random
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bigbatch import BigBatchWarning, CaptureError, OptionError, Window
from bigbatch.torch import Accumulator
from tests.problems import Problem, problems

from .test_gpu import Batch, count, data, loss, make_model, pytestmark  # noqa: F401
from .training import Run, adamw, assert_same_update, flat, update_error, warm_up


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


def captured(model: nn.Module, loss: Any = loss, size: int = 8, optimizer: Any = None, **options: Any) -> Accumulator:
    options = {"capture": True, **options}
    return Accumulator(model, optimizer or sgd(model), loss, size, **options)


def num_replays(accumulator: Accumulator) -> int:
    assert accumulator._captured is not None
    return accumulator._captured.num_replays


def same(ours: nn.Module, theirs: nn.Module, tolerance: float = 0.0) -> None:
    a, b = flat(ours), flat(theirs)
    assert torch.isfinite(b).all()
    assert float((a - b).norm() / b.norm()) <= tolerance


def side_by_side(
    make: Callable[[], nn.Module] = make_model,
    loss: Any = loss,
    steps: int = 4,
    tolerance: float = 0.0,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    batches: Callable[[int], Any] = lambda step: data(53 - step % 2),
    between: Callable[[nn.Module, int], None] = lambda model, step: None,
    **options: Any,
) -> tuple[Accumulator, Accumulator]:
    """Trains twice from the same start with the same random numbers, eagerly and captured."""
    made = []
    for capture in (False, True):
        model = make()
        accumulator = captured(model, loss, 8, optimizer(model), capture=capture, **options)
        torch.manual_seed(3)
        losses = []
        for step in range(steps):
            between(model, step)
            losses.append(accumulator.step(batches(step)).loss)
        made.append((accumulator, losses))
    (eager, eager_losses), (ours, our_losses) = made
    same(ours.model, eager.model, tolerance)
    assert our_losses == pytest.approx(eager_losses, rel=max(tolerance, 1e-12), nan_ok=True)
    assert num_replays(ours) > 0
    return eager, ours


@pytest.mark.parametrize("way", ["batch", "window"])
@pytest.mark.parametrize("problem", problems(), ids=lambda problem: problem.name)
def test_five_epochs_equal_the_full_batch(problem: Problem, way: str) -> None:
    full = Run(problem, epochs=5, device="cuda").full()
    ours = Run(problem, epochs=5, device="cuda", capture=True).accumulated(way)
    assert_same_update(ours, full, 1e-11)
    assert ours.losses == pytest.approx(full.losses, rel=1e-11)
    assert num_replays(ours._made) > 0


@pytest.mark.parametrize("problem", problems(), ids=lambda problem: problem.name)
def test_adamw_with_warm_up_and_clipping(problem: Problem) -> None:
    options = {"epochs": 5, "clip_norm": 0.5, "make_scheduler": warm_up, "device": "cuda"}
    full = Run(problem, adamw, **options).full()
    ours = Run(problem, adamw, capture=True, **options).accumulated("batch")
    assert_same_update(ours, full, 1e-9)
    assert num_replays(ours._made) > 0


@pytest.mark.parametrize("problem", problems(), ids=lambda problem: problem.name)
def test_negative_control_the_naive_loop(problem: Problem) -> None:
    error = update_error(Run(problem, device="cuda").naive(), Run(problem, device="cuda").full())
    assert (error > 1e-2) == problem.is_uneven


@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
def test_mixed_precision_matches_the_eager_pass(precision: str | None) -> None:
    side_by_side(precision=precision)


def test_dropout_draws_the_masks_of_the_eager_pass() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 128), nn.Dropout(0.5), nn.GELU(), nn.Linear(128, 10)).cuda()

    side_by_side(make)
    accumulator = captured(make(), optimizer=None)
    batch = data(48)
    for _ in range(3):
        accumulator.step(batch)
    before = num_replays(accumulator)
    for group in accumulator.optimizer.param_groups:
        group["lr"] = 0.0
    losses = {accumulator.step(batch).loss for _ in range(4)}
    assert len(losses) == 4
    assert num_replays(accumulator) == before + 4 * 6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_wider_than_their_parameters(dtype: torch.dtype) -> None:
    wide = {"accumulate_dtype": torch.float64} if dtype == torch.float32 else {}
    side_by_side(lambda: make_model(dtype), batches=lambda step: data(53, dtype), tolerance=1e-7, **wide)


def test_a_loss_in_low_precision() -> None:
    def low(model: nn.Module, batch: Batch) -> Tensor:
        return loss(model, batch).bfloat16()

    side_by_side(loss=low, weight=count)


OPTIMIZERS = {
    "sgd": lambda m: sgd(m),
    "momentum": lambda m: sgd(m, momentum=0.9, weight_decay=0.1),
    "adamw, foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, capturable=True),
    "adamw, fused": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, capturable=True, fused=True),
    "adamw, fused, not marked": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True),
    "adam, fused, not marked": lambda m: torch.optim.Adam(m.parameters(), lr=1e-2, amsgrad=True, fused=True),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-2, capturable=True),
}


MARKED = ("adamw, foreach", "adamw, fused", "rmsprop")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_optimizer_is_captured_too(name: str) -> None:
    _, ours = side_by_side(optimizer=OPTIMIZERS[name], steps=8, clip_norm=0.1)
    assert ours._optimizers._captured[0]._graph is not None
    assert bool(ours.optimizer.param_groups[0].get("capturable")) == (name in MARKED)


def halves(first: Any, second: Any) -> Callable[[nn.Module], Any]:
    """One kind of optimizer for the weights and one for the biases."""

    def optimizers(model: nn.Module) -> Any:
        weights, biases = ([p for p in model.parameters() if (p.ndim == 2) == kind] for kind in (True, False))
        return [first(weights), second(biases)]

    return optimizers


def muon(held: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Muon(held, lr=1e-2)


def captured_adamw(held: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(held, lr=1e-2, capturable=True)


def plain_sgd(held: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(held, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("kinds", "recorded"),
    [((captured_adamw, plain_sgd), (True, True)), ((muon, captured_adamw), (False, True))],
    ids=["adamw and sgd", "muon and adamw"],
)
def test_each_of_two_optimizers_is_captured_if_it_can_be(kinds: Any, recorded: tuple[bool, bool]) -> None:
    _, ours = side_by_side(optimizer=halves(*kinds), steps=8, clip_norm=0.1)
    assert tuple(one._graph is not None for one in ours._optimizers._captured) == recorded


def test_an_overflow_holds_two_captured_optimizers_back() -> None:
    def batches(step: int) -> Batch:
        x, y = data(48)
        if step == 4:
            x[9] = 1e6
        return x, y

    eager, ours = side_by_side(optimizer=halves(captured_adamw, plain_sgd), batches=batches, steps=7, precision="fp16")
    assert ours.scaler.get_scale() == eager.scaler.get_scale() < 65536


def test_a_captured_gradient_that_was_left_is_not_overwritten() -> None:
    """Recorded passes add to the same memory in each window."""
    left: list[list[list[Any]]] = []
    for capture in (False, True):
        model = make_model(torch.float64)
        accumulator = captured(model, optimizer=torch.optim.LBFGS(model.parameters()), capture=capture)
        left.append([])
        for step in range(5):
            model.zero_grad()
            accumulator.backward(data(53 - step % 2, torch.float64))
            left[-1].append([p.grad for p in model.parameters()])
    assert num_replays(accumulator) > 0
    for eager, ours in zip(*left, strict=True):
        for a, b in zip(eager, ours, strict=True):
            assert float((a - b).norm()) <= 1e-12 * float(a.norm())


@pytest.mark.parametrize("place", ["cuda", "cpu", None])
def test_a_schedule_moves_a_captured_optimizer(place: str | None) -> None:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        lr = 1e-2 if place is None else torch.tensor(1e-2, device=place)
        return torch.optim.AdamW(model.parameters(), lr=lr, capturable=True)

    made = []
    for capture in (False, True):
        model = make_model()
        own = optimizer(model)
        schedule = torch.optim.lr_scheduler.LambdaLR(own, lambda step: 1 / (step + 1))
        accumulator = captured(model, optimizer=own, scheduler=schedule, capture=capture)
        for _ in range(6):
            accumulator.step(data())
        made.append(accumulator)
    same(made[1].model, made[0].model, 1e-6)
    assert (made[1]._optimizers._captured[0]._graph is not None) == (place == "cuda")


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad])
def test_uncapturable_optimizer_runs_eagerly(kind: Any) -> None:
    _, ours = side_by_side(optimizer=lambda m: kind(m.parameters(), lr=1e-2), steps=6)
    assert ours._optimizers._captured[0]._graph is None


def test_restored_optimizer_is_recorded_again() -> None:
    def again(model: nn.Module, step: int) -> None:
        if step == 6:
            own = optimizers[-1]
            own.load_state_dict(own.state_dict())

    optimizers: list[torch.optim.Optimizer] = []

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        optimizers.append(torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=True))
        return optimizers[-1]

    side_by_side(optimizer=optimizer, steps=10, between=again)


def test_an_overflow_skips_the_step_and_the_next_is_clean() -> None:
    def batches(step: int) -> Batch:
        x, y = data(48)
        if step == 4:
            x[9] = 1e6
        return x, y

    eager, ours = side_by_side(batches=batches, steps=7, precision="fp16")
    assert ours.scaler.get_scale() == eager.scaler.get_scale() < 65536


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(64, 10), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def test_parameters_without_a_gradient_keep_none() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return Branches().cuda()

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5)

    _, ours = side_by_side(make, optimizer=optimizer, steps=6)
    before = make()
    assert torch.equal(ours.model.unused.weight, before.unused.weight)
    assert not torch.equal(ours.model.used.weight, before.used.weight)
    assert all(p.grad is None for p in ours.model.parameters())


@pytest.mark.filterwarnings("ignore:.*BatchNorm")
def test_running_statistics_change_once_per_pass() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Linear(32, 10)).cuda()

    eager, ours = side_by_side(make, tolerance=1e-6)
    for a, b in zip(ours.model.buffers(), eager.model.buffers(), strict=True):
        torch.testing.assert_close(a, b)


def test_buffers_of_the_loss_change_once_per_pass() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("centre", torch.zeros(10, device="cuda"))
            self.num = torch.zeros((), device="cuda")

        def forward(self, model: nn.Module, batch: Batch) -> Tensor:
            output = model(batch[0])
            self.centre.mul_(0.9).add_(output.detach().mean(0))
            self.num += 1
            return F.cross_entropy(output - self.centre, batch[1])

    made = []
    for capture in (False, True):
        criterion = Centred()
        accumulator = captured(make_model(), criterion, capture=capture)
        for _ in range(4):
            accumulator.step(data(53))
        made.append((accumulator, criterion))
    same(made[1][0].model, made[0][0].model, 1e-6)
    torch.testing.assert_close(made[1][1].centre, made[0][1].centre)
    assert made[1][1].num == made[0][1].num == 4 * 7
    assert num_replays(made[1][0]) > 0


def test_loss_that_needs_the_gradient_of_its_input() -> None:
    def penalised(model: nn.Module, batch: Batch) -> Tensor:
        output = model(batch[0].requires_grad_())
        (slope,) = torch.autograd.grad(output.sum(), batch[0], create_graph=True)
        return F.cross_entropy(output, batch[1]) + slope.square().mean()

    side_by_side(loss=penalised, tolerance=1e-6)


def test_micro_batches_without_tensors() -> None:
    x, y = data(8)
    side_by_side(
        loss=lambda model, batch: loss(model, (x, y)) * batch["factor"],
        batches=lambda step: Window([{"factor": 2.0}] * 3),
        weight=lambda batch: 8,
        tolerance=1e-6,
    )


def test_gradients_that_share_memory() -> None:
    class Offsets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(64)), nn.Parameter(torch.zeros(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return (self.a.view(8, 8) + self.b.view(8, 8)).flatten() @ x.mean(0)

    side_by_side(lambda: Offsets().cuda(), loss=lambda model, batch: model(batch[0]), tolerance=1e-6)


# --- what changes between windows ------------------------------------------------------------------------


def drop_out(model: nn.Module, step: int) -> None:
    model[1].p = 0.1 * step if step > 3 else 0.5


def freeze(model: nn.Module, step: int) -> None:
    model[0].requires_grad_(step != 5)


def evaluate(model: nn.Module, step: int) -> None:
    model.train(step < 5)


def move(model: nn.Module, step: int) -> None:
    if step == 5:
        for p in model.parameters():
            p.data = p.data.clone()


def add_hook(model: nn.Module, step: int) -> None:
    if step == 5:
        model[0].register_forward_hook(lambda module, args, output: output * 2)


def add_hooks_of_parameters(model: nn.Module, step: int) -> None:
    """They are not recorded: the accumulator runs them once per step."""
    if step == 5:
        for p in model.parameters():
            p.register_hook(lambda g: g.clamp(-0.01, 0.01))
            p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad.tanh()))


@pytest.mark.parametrize("change", [drop_out, freeze, evaluate, move, add_hook, add_hooks_of_parameters])
def test_changes_between_windows_are_detected(change: Callable[[nn.Module, int], None]) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 128), nn.Dropout(0.5), nn.GELU(), nn.Linear(128, 10)).cuda()

    side_by_side(make, steps=10, between=change)


def test_changed_closure_value_is_detected() -> None:
    factor = 1.0

    def scaled(model: nn.Module, batch: Batch) -> Tensor:
        return factor * loss(model, batch)

    def change(model: nn.Module, step: int) -> None:
        nonlocal factor
        factor = 1.0 if step < 5 else 3.0

    side_by_side(loss=scaled, steps=10, between=change)


def test_changes_before_every_window_warn() -> None:
    factor = 1.0

    def scaled(model: nn.Module, batch: Batch) -> Tensor:
        return factor * loss(model, batch)

    accumulator = captured(make_model(), scaled)
    with pytest.warns(BigBatchWarning, match="has changed before each of 8 windows"):
        for _ in range(10):
            factor *= 0.9
            accumulator.step(data())


def test_changed_plain_value_in_the_batch_is_detected() -> None:
    def of(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        return batch["factor"] * F.cross_entropy(model(batch["x"]), batch["y"])

    def batches(step: int) -> dict[str, Any]:
        x, y = data(48)
        return {"x": x, "y": y, "factor": 1.0 if step % 2 else 2.0, "scale": torch.tensor(float(step))}

    side_by_side(loss=of, batches=batches, steps=8)


def test_0_dim_tensor_in_the_batch_is_read_each_time() -> None:
    def of(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        return batch["factor"] * F.cross_entropy(model(batch["x"]), batch["y"])

    def batches(step: int) -> dict[str, Any]:
        x, y = data(48)
        return {"x": x, "y": y, "factor": torch.tensor(1.0 + step, device="cuda" if step else "cpu")}

    side_by_side(loss=of, batches=batches, steps=8, tolerance=1e-6)


# --- what cannot be captured -----------------------------------------------------------------------------


def reads_the_loss(model: nn.Module, batch: Batch) -> Tensor:
    found = loss(model, batch)
    return found * 2 if found.item() > 1e9 else found  # this line


def drops_samples(model: nn.Module, batch: Batch) -> Tensor:
    keep = batch[1] > 2
    return F.cross_entropy(model(batch[0][keep]), batch[1][keep])  # this line


def synchronizes(model: nn.Module, batch: Batch) -> Tensor:
    torch.cuda.synchronize()  # this line
    return loss(model, batch)


UNCAPTURABLE = [reads_the_loss, drops_samples, synchronizes]


@pytest.mark.parametrize("bad", UNCAPTURABLE)
def test_error_names_the_line_and_changes_nothing(bad: Any) -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.Dropout(0.3), nn.Linear(128, 10)).cuda()
    accumulator = captured(model, bad)
    before = flat(model)
    with pytest.raises(CaptureError) as caught:
        for _ in range(3):
            accumulator.step(data(16))
    found = re.search(r"test_gpu_capture\.py:(\d+)", str(caught.value))
    assert found, str(caught.value)
    line = Path(__file__).read_text().splitlines()[int(found[1]) - 1]
    assert "# this line" in line
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(flat(model), before) or accumulator.num_steps == 1
    # and everything still works: dropout, memory, another capture
    other = captured(model, loss)
    for _ in range(4):
        assert other.step(data(48)).is_applied
    assert num_replays(other) > 0


@pytest.mark.parametrize("bad", UNCAPTURABLE)
def test_auto_continues_eagerly(bad: Any) -> None:
    full = make_model(torch.float64)
    ours = make_model(torch.float64)
    accumulator = captured(ours, bad, capture="auto", weight=None if bad is not drops_samples else kept)
    optimizer = sgd(full)
    with pytest.warns(BigBatchWarning, match="capture is off from here on"):
        for step in range(5):
            batch = data(53 - step, torch.float64)
            accumulator.step(batch)
            optimizer.zero_grad()
            bad(full, batch).backward()
            optimizer.step()
    same(ours, full, 1e-12)


def kept(batch: Batch) -> Tensor:
    return (batch[1] > 2).sum()


def test_random_numbers_of_the_host_are_refused() -> None:
    def torch_s(model: nn.Module, batch: Batch) -> Tensor:
        return loss(model, batch) * float(torch.rand(()))

    def python_s(model: nn.Module, batch: Batch) -> Tensor:
        return loss(model, batch) * random.random()

    for drawing in (torch_s, python_s):
        accumulator = captured(make_model(), drawing)
        with pytest.raises(CaptureError, match="random numbers on the host"):
            accumulator.step(data(48))


def test_a_sparse_gradient_is_refused() -> None:
    model = nn.EmbeddingBag(10, 4, sparse=True, mode="sum").cuda()
    accumulator = captured(model, lambda m, b: m(b).square().mean())
    with pytest.raises(CaptureError, match=r"1 of 1 gradients .* are sparse"):
        accumulator.step(torch.randint(0, 10, (48, 3), device="cuda"))


def test_gradients_outside_of_the_optimizer_are_refused() -> None:
    model = Branches().cuda()
    accumulator = captured(model, lambda m, b: loss(m, b) + m.unused(b[0]).mean(), optimizer=sgd(model.used))
    with pytest.raises(CaptureError, match="2 tensors get gradients but are not among the 2"):
        accumulator.step(data(48))


def test_unsupported_value_in_the_batch_is_refused() -> None:
    accumulator = captured(make_model(), lambda m, b: loss(m, (b["x"], b["y"])))
    x, y = data(48)
    with pytest.raises(CaptureError, match=r"micro_batch\['note'\] is a object"):
        accumulator.step({"x": x, "y": y, "note": object()})


def test_hidden_dependence_of_the_loss_is_detected() -> None:
    calls = iter(range(10**6))

    def hidden(model: nn.Module, batch: Batch) -> Tensor:
        return loss(model, batch) * (1 + next(calls))

    accumulator = captured(make_model(), hidden)
    with pytest.raises(CaptureError, match=r"the first replay is .* away from the eager pass"):
        accumulator.step(data(48))


class Counts(nn.Module):
    """Depends a little on the number of calls, which only Python knows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.num_calls = nn.Linear(64, 10), 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return self.layer(x) * (1 + 1e-4 * self.num_calls)


class Replaces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.register_buffer("average", torch.zeros(10))

    def forward(self, x: Tensor) -> Tensor:
        output = self.layer(x)
        self.average = 0.9 * self.average + 0.1 * output.detach().mean(0)
        return output - self.average


@pytest.mark.parametrize("kind", [Counts, Replaces])
def test_a_model_that_changes_in_every_pass_is_not_captured(kind: Any) -> None:
    made = []
    for capture in (False, True):
        torch.manual_seed(0)
        made.append(captured(kind().cuda(), capture=capture))
    eager, ours = made
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(10):
            assert eager.step(data(53)).loss == ours.step(data(53)).loss
    same(ours.model, eager.model)
    assert num_replays(ours) == 0
    if kind is Counts:  # a new tensor may have the address of the old one, so a change is visible only within a window
        assert any("has changed before each of 8 windows" in str(warning.message) for warning in told)


def test_parameters_that_a_pass_moves_are_refused() -> None:
    model = Branches().cuda()
    model.unused.requires_grad_(False)

    def follows(model: nn.Module, batch: Batch) -> Tensor:
        with torch.no_grad():
            model.unused.weight.lerp_(model.used.weight, 0.1)
        return loss(model, batch) + model.unused(batch[0]).mean()

    accumulator = captured(model, follows)
    with pytest.raises(CaptureError, match="the loss changes 1 parameters that are not trained"):
        accumulator.step(data(53))


def test_error_that_only_capture_raises_is_reported() -> None:
    """Reentrant checkpoints do not support `torch.autograd.grad`."""

    def checkpointed(model: nn.Module, batch: Batch) -> Tensor:
        output = checkpoint(model, batch[0].requires_grad_(), use_reentrant=True, preserve_rng_state=False)
        return F.cross_entropy(output, batch[1])

    with pytest.raises(CaptureError, match="the loss reached 0 parameters and 4 before"):
        captured(make_model(), checkpointed).step(data(48))
    ours, eager = make_model(), make_model()
    accumulator = captured(ours, checkpointed, capture="auto")
    with pytest.warns(BigBatchWarning, match="capture is off from here on"):
        accumulator.step(data(48))
    captured(eager, capture=False).step(data(48))
    same(ours, eager, 1e-6)


def test_many_shapes_warn() -> None:
    accumulator = captured(make_model(), size=64)
    with pytest.warns(BigBatchWarning, match="more than 32 shapes"):
        for size in range(1, 40):
            accumulator.step(data(size))


def test_micro_batch_is_refused() -> None:
    accumulator = captured(make_model(), accumulation_steps=2)
    with pytest.raises(OptionError, match="your own loop"), accumulator.micro_batch(weight=4):
        pass


def test_keeping_the_loss_does_not_prevent_capture() -> None:
    model = make_model()
    kept = loss(model, data(8))
    for _ in range(3):
        accumulator = captured(model)
        accumulator.step(data(48))
        assert num_replays(accumulator) > 0
    assert kept.requires_grad


# --- with others -----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_with_torch_compile() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 128), nn.Dropout(0.5), nn.GELU(), nn.Linear(128, 10)).cuda()

    compiled = torch.compile(loss)
    side_by_side(make, loss=compiled, batches=lambda step: data(53), steps=5)
    plain, ours = make(), make()
    plain.eval(), ours.eval()
    eager = captured(plain, capture=False)
    accumulator = captured(torch.compile(ours))
    for _ in range(5):
        eager.step(data(53)), accumulator.step(data(53))
    same(ours, plain, 1e-5)
    assert num_replays(accumulator) > 0


def test_two_accumulators_take_turns() -> None:
    models = [make_model(torch.float64) for _ in range(4)]
    ours = [captured(model, size=size) for model, size in zip(models, (8, 5), strict=False)]
    eager = [captured(model, size=8, capture=False) for model in models[2:]]
    for _ in range(5):
        for accumulator in (*ours, *eager):
            accumulator.step(data(53, torch.float64))
    same(models[0], models[2], 1e-12)
    same(models[1], models[3], 1e-12)


def test_memory_is_flat_and_that_of_a_micro_batch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.GELU()))).cuda()
    micro_batch = torch.randn(4096, 256, device="cuda")
    accumulator = captured(model, lambda m, x: m(x).square().mean())

    def peak(num: int) -> int:
        torch.cuda.reset_peak_memory_stats()
        accumulator.step(Window([micro_batch] * num))
        return torch.cuda.max_memory_reserved()

    peak(4)
    # the allocator reserves blocks of 2 MiB and more; one tensor kept per micro-batch would be 62 * 4 MiB
    assert peak(64) <= peak(2) + 2 * micro_batch.nbytes


def test_host_does_not_wait_within_a_captured_window() -> None:
    def waits(num: int) -> int:
        accumulator = captured(make_model(), size=4, weight=count)
        batch = data(4 * num)
        for _ in range(4):
            accumulator.step(batch)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                accumulator.step(batch)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return sum("synchronizing" in str(warning.message) for warning in caught)

    assert waits(3) == waits(32) <= 4
