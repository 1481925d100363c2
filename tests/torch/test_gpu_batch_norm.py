"""BatchNorm on a GPU: running statistics of the whole batch by the device's own kernels, eagerly and in CUDA graphs."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bigbatch import Interrupted
from bigbatch.torch import Accumulator, recalibrate

from .training import sgd

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::bigbatch.BigBatchWarning")]
Batch = tuple[Tensor, Tensor]


class Net(nn.Module):
    """BatchNorm first, behind a convolution, and used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.BatchNorm2d(3)
        self.conv, self.second = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, momentum=None)
        self.body, self.shared = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8, momentum=0.3)
        self.again = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.Tanh())
        self.head = nn.Linear(8 * 16, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.conv(self.first(x))).tanh()
        x = self.shared(self.body(self.shared(x))).tanh()
        result: Tensor = self.head(self.run_again(x).flatten(1))
        return result

    def run_again(self, x: Tensor) -> Tensor:
        result: Tensor = self.again(x)
        return result


class Recomputed(Net):
    """Runs one layer again in the backward pass."""

    def run_again(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.again, x, use_reentrant=False, preserve_rng_state=False)
        return result


def make(dtype: torch.dtype = torch.float64) -> nn.Module:
    return Net().to("cuda", dtype)


def data(size: int, dtype: torch.dtype = torch.float64) -> Batch:
    generator = torch.Generator().manual_seed(size)
    drift = torch.linspace(0, 3, size).reshape(-1, 1, 1, 1)
    x = torch.randn(size, 3, 6, 6, generator=generator) * (1 + drift) + drift
    return x.to("cuda", dtype), torch.randn(size, 2, generator=generator).to("cuda", dtype)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def assert_same(ours: nn.Module, theirs: nn.Module, tolerance: float) -> None:
    for (name, a), b in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert bool(torch.isfinite(a).all()), name
        assert float((a.double() - b.double()).norm()) <= tolerance * float(b.double().norm() + 1), name


def statistics_of_first(batches: list[Batch], momentum: float = 0.1) -> tuple[Tensor, Tensor]:
    """What a BatchNorm layer that sees the data first has after full batches, in float64."""
    mean, var = 0.0, 1.0
    for x, _ in batches:
        values = x.double().transpose(0, 1).flatten(1)
        mean = (1 - momentum) * mean + momentum * values.mean(1)
        var = (1 - momentum) * var + momentum * values.var(1)
    return mean, var


def num_replays(accumulator: Accumulator) -> int:
    assert accumulator._captured is not None
    return accumulator._captured.num_replays


@pytest.mark.parametrize("capture", [False, True])
def test_a_first_layer_has_the_statistics_of_the_full_batch(capture: bool) -> None:
    model, batches = make(), [data(size) for size in (53, 52, 53, 20, 53)]
    accumulator = Accumulator(model, sgd(model), loss, 8, capture=capture)
    for batch in batches:
        accumulator.step(batch)
    mean, var = statistics_of_first(batches)
    torch.testing.assert_close(model.first.running_mean, mean, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(model.first.running_var, var, rtol=1e-11, atol=1e-12)
    assert model.first.num_batches_tracked == 5
    assert model.shared.num_batches_tracked == 10  # it runs twice in a pass
    assert not capture or num_replays(accumulator) > 10


@pytest.mark.parametrize(("options", "tolerance"), [({}, 1e-12), ({"precision": "bf16"}, 1e-2)])
@pytest.mark.parametrize("mode", ["batch", "micro_batch", "frozen"])
def test_captured_passes_give_the_statistics_of_eager_ones(
    mode: Any, options: dict[str, Any], tolerance: float
) -> None:
    models = []
    for capture in (False, True):
        model = make(torch.float32 if options else torch.float64)
        if mode == "micro_batch":
            model.second.momentum = 0.2  # torch reads the number of batches on the host if it is None
        accumulator = Accumulator(model, sgd(model), loss, 8, capture=capture, batch_norm=mode, **options)
        for size in (53, 52, 53, 53):
            accumulator.step(data(size, model.head.weight.dtype))
        models.append(model)
        assert not capture or num_replays(accumulator) > 0
    assert_same(models[1], models[0], tolerance)


@pytest.mark.parametrize("capture", [False, "auto"])
def test_layers_that_run_again_in_the_backward_pass(capture: Any) -> None:
    models = []
    for kind in (Net, Recomputed):
        model = kind().double().cuda()
        accumulator = Accumulator(model, sgd(model), loss, 8, capture=capture if kind is Recomputed else False)
        for _ in range(4):
            accumulator.step(data(53))
        models.append(model)
    assert_same(models[1], models[0], 1e-12)


def test_changing_the_option_records_again() -> None:
    models = []
    for capture in (False, True):
        model = make()
        accumulator = Accumulator(model, sgd(model), loss, 8, capture=capture)
        for mode in ("batch", "batch", "frozen", "frozen", "batch", "batch"):
            accumulator.batch_norm = mode
            accumulator.step(data(53))
        models.append(model)
    assert_same(models[1], models[0], 1e-12)
    assert models[1].first.num_batches_tracked == 4


@pytest.mark.parametrize("capture", [False, True])
def test_an_interrupted_step_continues_as_if_nothing_had_happened(capture: bool) -> None:
    models = []
    for is_interrupted in (False, True):
        model = make()
        num_seen = 0

        def weight(batch: Batch) -> int:
            return len(batch[0])

        accumulator = Accumulator(model, sgd(model), loss, 8, weight=weight, capture=capture)
        for _ in range(3):
            accumulator.step(data(53))
        if is_interrupted:
            inner = accumulator._backward
            assert inner is not None

            def interrupting(*args: Any, inner: Any = inner, accumulator: Any = accumulator) -> Any:
                nonlocal num_seen
                num_seen += 1
                if num_seen == 3:
                    accumulator.interrupt()
                return inner(*args)

            accumulator._backward = interrupting  # type: ignore[assignment]
            with pytest.raises(Interrupted):
                accumulator.step(data(53))
            accumulator._backward = inner
            before = copy.deepcopy(model.state_dict())
            model.eval()(data(5)[0])
            model.train()
            accumulator.load_state_dict(copy.deepcopy(accumulator.state_dict()))
            assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
        accumulator.step(data(53))
        models.append(model)
    assert_same(models[1], models[0], 1e-12)  # the backward pass of a convolution adds up in any order


@pytest.mark.parametrize("capture", [False, True])
def test_values_that_are_not_finite_stay_out_of_running_statistics(capture: bool) -> None:
    model = make()
    accumulator = Accumulator(model, sgd(model), loss, 8, capture=capture)
    for number in range(6):
        x, y = data(53)
        if number == 4:
            x[20] = torch.nan
        accumulator.step((x, y))
    assert all(bool(torch.isfinite(t).all()) for t in model.state_dict().values())
    assert model.first.num_batches_tracked == 5
    mean, _ = statistics_of_first([data(53)] * 5)
    torch.testing.assert_close(model.first.running_mean, mean, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_kernels_in_low_precision_and_channels_last(memory_format: Any, precision: Any) -> None:
    model = make(torch.float32).to(memory_format=memory_format)
    x, y = data(53, torch.float32)
    x = x.to(memory_format=memory_format)
    Accumulator(model, sgd(model), loss, 8, precision=precision).step((x, y))
    mean, var = statistics_of_first([(x, y)])
    tolerance = 1e-5 if precision is None else 1e-2
    torch.testing.assert_close(model.first.running_mean.double(), mean, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(model.first.running_var.double(), var, rtol=tolerance, atol=tolerance)


@pytest.mark.filterwarnings("ignore")  # torch warns about each wait
def test_the_host_does_not_wait_for_statistics() -> None:
    def waits(batch_norm: Any) -> int:
        model = make(torch.float32)
        model.second.momentum = 0.2  # or torch's own update waits
        accumulator = Accumulator(model, sgd(model), loss, 8, batch_norm=batch_norm)
        batch = data(53, torch.float32)
        accumulator.step(batch)
        with pytest.warns() as caught:
            torch.cuda.set_sync_debug_mode("warn")
            try:
                accumulator.step(batch)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return sum("synchronizing" in str(warning.message) for warning in caught)

    assert waits("batch") == waits("micro_batch")


def test_recalibrate_brings_batches_to_the_device() -> None:
    x = data(53)[0]
    models = [make(), make()]
    recalibrate(models[0], x.cpu().split(7))
    recalibrate(models[1], x.split(53))
    assert_same(models[0], models[1], 1e-10)
    values = x.transpose(0, 1).flatten(1)
    torch.testing.assert_close(models[0].first.running_var, values.var(1), rtol=1e-10, atol=1e-10)
