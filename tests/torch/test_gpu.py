"""Tests that need a GPU: no waiting within a window, memory as the device counts it, real float16."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import BigBatchWarning, Window
from bigbatch.torch import Accumulator, verify

pytestmark = pytest.mark.gpu

Batch = tuple[Tensor, Tensor]


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10)).to("cuda", dtype)


def data(size: int = 53, dtype: torch.dtype = torch.float32) -> Batch:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, 64, generator=generator).to("cuda", dtype)
    return x, torch.randint(0, 10, (size,), generator=generator).cuda()


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def count(batch: Batch) -> Tensor:
    return (batch[1] >= 0).sum()


def feed(accumulator: Accumulator, way: str, batch: Batch) -> None:
    if way == "batch":
        accumulator.step(batch)
    elif way == "window":
        accumulator.step(Window(zip(batch[0].split(4), batch[1].split(4), strict=True)))
    else:
        for part in zip(batch[0].split(4), batch[1].split(4), strict=True):
            with accumulator.micro_batch(weight=count(part)) as micro:
                micro.backward(loss(accumulator.model, part))
        accumulator.flush()


@pytest.mark.parametrize("way", ["batch", "window", "micro_batch"])
def test_the_update_is_that_of_the_full_batch_in_float64(way: str) -> None:
    full = make_model(torch.float64)
    optimizer = torch.optim.SGD(full.parameters(), lr=0.1)
    loss(full, data(dtype=torch.float64)).backward()
    optimizer.step()
    ours = make_model(torch.float64)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    accumulator = Accumulator(ours, optimizer, loss, 4, accumulation_steps=100, weight=count)
    feed(accumulator, way, data(dtype=torch.float64))
    for a, b in zip(ours.parameters(), full.parameters(), strict=True):
        assert (a - b).norm() <= 1e-12 * b.norm()


@pytest.mark.parametrize("way", ["batch", "window", "micro_batch"])
@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
@pytest.mark.filterwarnings("ignore")  # torch warns about each wait; the warnings are counted
def test_number_of_waits_does_not_grow_with_micro_batches(way: str, precision: str | None) -> None:
    def waits(num: int) -> int:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        accumulator = Accumulator(model, optimizer, loss, 4, accumulation_steps=1000, weight=count, precision=precision)
        batch = data(4 * num)
        feed(accumulator, way, batch)
        with torch.cuda.device(0), pytest.warns() as caught:
            torch.cuda.set_sync_debug_mode("warn")
            try:
                feed(accumulator, way, batch)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return sum("synchronizing" in str(warning.message) for warning in caught)

    waits(2)  # the first call waits once more
    assert waits(2) == waits(32) <= 6


def test_an_overflow_on_the_gpu_skips_the_step() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    accumulator = Accumulator(model, optimizer, loss, 4, precision="fp16")
    assert accumulator.step(data()).is_applied
    before = [p.clone() for p in model.parameters()]
    scale = accumulator.scaler.get_scale()
    x, y = data()
    x[9] = 1e6
    assert not accumulator.step((x, y)).is_applied
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    assert accumulator.scaler.get_scale() == scale / 2
    assert accumulator.step(data()).is_applied


def test_peak_memory_is_flat_and_small() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.GELU()))).cuda()
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, x: m(x).square().mean())
    micro_batch = torch.randn(1024, 256, device="cuda")

    def peak(num: int) -> int:
        accumulator.step(Window([micro_batch] * num))
        torch.cuda.reset_peak_memory_stats()
        accumulator.step(Window([micro_batch] * num))
        return torch.cuda.max_memory_allocated()

    assert peak(64) <= 1.02 * peak(2)


def test_low_precision_parameters_accumulate_in_float32() -> None:
    model = make_model(torch.bfloat16)
    accumulator = Accumulator(model, torch.optim.AdamW(model.parameters(), fused=True), accumulation_steps=9)
    for _ in range(2):
        with accumulator.micro_batch(weight=53) as micro:
            micro.backward(loss(model, data(dtype=torch.bfloat16)))
    assert {g.dtype for g in accumulator._window.sums[0].values()} == {torch.float32}
    assert accumulator.flush().is_applied


def test_verify_replays_dropout_and_leaves_the_random_state() -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.Dropout(0.3), nn.Linear(128, 10)).cuda()
    state = torch.cuda.get_rng_state()
    found = verify(model, data(), loss, 16)
    assert found.is_exact, str(found)
    assert torch.equal(torch.cuda.get_rng_state(), state)


# --- a fused optimizer skips a step by itself, so the host need not wait ----------------------------------


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)


@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_host_never_waits(capture: bool, clip_norm: float | None) -> None:
    full, ours = make_model(torch.float64), make_model(torch.float64)
    optimizer = fused(full)
    accumulator = Accumulator(ours, fused(ours), loss, 8, capture=capture, clip_norm=clip_norm)
    batch = data(53, torch.float64)
    norms, steps = [], []
    for number in range(6):
        optimizer.zero_grad()
        loss(full, batch).backward()
        norms.append(float(nn.utils.clip_grad_norm_(full.parameters(), clip_norm or 1e9)))
        optimizer.step()
        try:
            torch.cuda.set_sync_debug_mode("error" if number > 3 else "default")
            steps.append(accumulator.step(batch))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for a, b in zip(ours.parameters(), full.parameters(), strict=True):
        assert (a - b).norm() <= 1e-10 * b.norm()
    assert [step.grad_norm for step in steps] == pytest.approx(norms)
    assert all(step.is_applied for step in steps)


@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize("capturable", [True, False])
def test_device_skips_a_nonfinite_step(capture: bool, capturable: bool) -> None:
    def trained(has_bad: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True, capturable=capturable)
        accumulator = Accumulator(model, optimizer, loss, 8, capture=capture, clip_norm=1.0)
        bad = (torch.full_like(data()[0], torch.inf), data()[1])
        for number in range(8):
            if has_bad and number in (0, 5):
                with pytest.warns(BigBatchWarning, match=f"step {number + 1 + (number > 0)} was skipped: .* 0.weight"):
                    assert not accumulator.step(bad).is_applied
            assert accumulator.step(data()).is_applied
        return model, optimizer

    (ours, optimizer), (clean, _) = trained(True), trained(False)
    for a, b in zip(ours.parameters(), clean.parameters(), strict=True):
        assert torch.equal(a, b)
    assert {float(state["step"]) for state in optimizer.state.values()} == {8.0}


@pytest.mark.parametrize("capture", [True, False])
def test_skipped_step_does_not_enter_the_momentum(capture: bool) -> None:
    bad = (torch.full_like(data()[0], torch.inf), data()[1])
    models = [make_model(), make_model()]
    for model, has_bad in zip(models, (True, False), strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
        accumulator = Accumulator(model, optimizer, loss, 8, capture=capture)
        if has_bad:
            with pytest.warns(BigBatchWarning, match="step 1 was skipped"):
                assert not accumulator.step(bad).is_applied
        for _ in range(4):
            assert accumulator.step(data()).is_applied
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than 2 GPUs: torch.cuda.device_count()")
def test_model_on_another_than_the_current_device() -> None:
    models = [make_model().to(device) for device in ("cuda:0", "cuda:1")]
    steps = []
    for model in models:
        batch = tuple(tensor.to(next(model.parameters()).device) for tensor in data())
        accumulator = Accumulator(model, fused(model), lambda m, b: loss(m, b) * 3, 8)
        steps.append([accumulator.step(batch).grad_norm for _ in range(5)])
    assert steps[1] == pytest.approx(steps[0], rel=1e-4)


@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_two_fused_optimizers_skip_a_step_together_without_the_host(capture: bool) -> None:
    def trained(bad_step: int) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        model = make_model()
        weights, biases = ([p for p in model.parameters() if (p.ndim == 2) == kind] for kind in (True, False))
        optimizers = [
            torch.optim.AdamW(weights, lr=1e-2, fused=True),
            torch.optim.SGD(biases, lr=0.1, momentum=0.9, fused=True),
        ]

        def steep(model: nn.Module, batch: Batch) -> Tensor:
            """A large number in the batch makes the gradient of one bias infinite, and no other."""
            x, y = batch
            slope = (x[:, 0] - 1e5).relu().max() * 1e38
            return loss(model, (x.clamp(max=1e4), y)) + slope * model[2].bias[0]

        accumulator = Accumulator(model, optimizers, steep, 8, capture=capture)
        good, bad = data(), data()
        bad[0][9, 0] = 1e6
        steps = []
        for number in range(8):
            if number == bad_step:
                assert not accumulator.step(bad).is_applied
            try:
                torch.cuda.set_sync_debug_mode("error" if number > 5 else "default")
                steps.append(accumulator.step(good))
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert all(step.is_applied for step in steps)
        return model, optimizers

    with pytest.warns(BigBatchWarning, match=r"step 5 was skipped: the gradient of 2\.bias is not finite"):
        ours, optimizers = trained(bad_step=4)
    clean, _ = trained(bad_step=-1)
    for a, b in zip(ours.parameters(), clean.parameters(), strict=True):
        assert torch.equal(a, b)
    assert {float(state["step"]) for state in optimizers[0].state.values()} == {8.0}


def test_a_gradient_without_a_step_is_that_of_the_full_batch_in_float64() -> None:
    full, ours = make_model(torch.float64), make_model(torch.float64)
    batch = data(dtype=torch.float64)
    accumulator = Accumulator(ours, fused(ours), loss, 8)
    accumulator.step((batch[0] * torch.inf, batch[1]))  # which is not known to be skipped yet
    loss(full, batch).backward()
    with pytest.warns(BigBatchWarning, match="step 1 was skipped"):
        step = accumulator.backward(batch)
    for a, b in zip(ours.parameters(), full.parameters(), strict=True):
        assert (a.grad - b.grad).norm() <= 1e-12 * b.grad.norm()
    assert not step.is_applied
    ours.zero_grad()
    with pytest.warns(BigBatchWarning, match=r"backward\(\) left no gradient in \.grad"):
        accumulator.backward((batch[0] * torch.inf, batch[1]))
    assert all(p.grad is None for p in ours.parameters())


def test_skipped_step_is_reported_with_the_next_one() -> None:
    model = make_model()
    accumulator = Accumulator(model, fused(model), loss, 8)
    accumulator.step((torch.full_like(data()[0], torch.inf), data()[1]))
    with pytest.warns(BigBatchWarning, match="step 1 was skipped"):
        accumulator.step(data())
    accumulator.step((torch.full_like(data()[0], torch.inf), data()[1]))
    with pytest.warns(BigBatchWarning, match="step 3 was skipped"):
        accumulator.state_dict()
