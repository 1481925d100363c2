"""`recalibrate` gives BatchNorm layers the statistics of all data, whatever the sizes of its batches."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bigbatch import BatchError, BigBatchWarning, OptionError
from bigbatch.torch import recalibrate


class Net(nn.Module):
    """BatchNorm first, in a branch, shared and deep, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.BatchNorm2d(3, momentum=None)
        self.conv, self.second = nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4)
        self.short, self.third = nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4)
        self.shared = nn.BatchNorm1d(16)
        self.head = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5))
        self.unused = nn.BatchNorm1d(2)
        self.register_buffer("num_passes", torch.zeros(()))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        self.num_passes += 1
        x = self.first(x)
        x = (self.third(self.short(x)) + self.second(self.conv(x)).tanh()).flatten(1)
        x = self.shared(x).tanh()
        result: Tensor = self.head(self.shared(x))
        return result


def data(size: int = 23) -> Tensor:
    torch.manual_seed(1)
    drift = torch.linspace(0, 5, size, dtype=torch.float64).reshape(-1, 1, 1, 1)
    return torch.randn(size, 3, 3, 3, dtype=torch.float64) * (1 + drift) + drift


def running(model: nn.Module) -> dict[str, Tensor]:
    return {name: b.clone() for name, b in model.named_buffers() if "running" in name}


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert float((ours[name] - theirs[name]).abs().max()) <= tolerance, name


def by_definition(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Layer by layer in the order in which they run, from the inputs of the whole data in eval mode."""
    model.eval()
    for layer in (model.first, model.third, model.second, model.shared):
        inputs: list[Tensor] = []
        handle = layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach()))  # noqa: B023
        model(x)
        handle.remove()
        values = torch.cat(inputs).transpose(0, 1).flatten(1)
        layer.running_mean.copy_(values.mean(1))
        layer.running_var.copy_(values.var(1))
    return running(model)


@pytest.mark.parametrize("size", [1, 2, 3, 22, 23])
def test_population_statistics_whatever_the_cut(size: int) -> None:
    x, model = data(), Net()
    recalibrate(model, x.split(size))
    assert_close(running(model), by_definition(Net(), x))
    values = x.transpose(0, 1).flatten(1)
    assert (model.first.running_mean - values.mean(1)).abs().max() <= 1e-10
    assert (model.first.running_var - values.var(1)).abs().max() <= 1e-10


def test_negative_control_a_cumulative_average_depends_on_the_cut() -> None:
    """What torch.optim.swa_utils.update_bn does."""
    found = []
    for size in (2, 23):
        model = nn.Sequential(nn.BatchNorm2d(3, momentum=None)).double()
        torch.optim.swa_utils.update_bn(data().split(size), model)
        found.append(running(model)["0.running_var"])
    assert (found[0] - found[1]).abs().max() > 0.1


def test_each_layer_is_normalised_in_evaluation() -> None:
    """With these statistics, the output of every layer has mean 0 and variance 1 over the data."""
    x, model = data(), Net()
    recalibrate(model, x.split(5))
    outputs: dict[str, Tensor] = {}
    for name in ("first", "second", "third"):
        layer = getattr(model, name)
        layer.register_forward_hook(lambda _, args, output, name=name: outputs.update({name: output}))
    model.eval()(x)
    for name in outputs:
        values = outputs[name].transpose(0, 1).flatten(1)
        torch.testing.assert_close(values.mean(1), torch.zeros_like(values[:, 0]), rtol=0, atol=1e-10)
        torch.testing.assert_close(values.var(1), torch.ones_like(values[:, 0]), rtol=1e-3, atol=0)  # eps


def test_nothing_else_changes() -> None:
    model = Net()
    model.conv.eval()
    model.num_passes += 3
    before = {name: t.clone() for name, t in model.state_dict().items() if "running" not in name}
    modes = [module.training for module in model.modules()]
    states = torch.get_rng_state(), random.getstate()

    def forward(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        random.random()
        assert not torch.is_grad_enabled()
        assert not model.training
        result: Tensor = model(batch["x"] + 0 * torch.rand(()))
        return result

    x = data()
    loader = torch.utils.data.DataLoader([{"x": row} for row in x], batch_size=4, shuffle=True)
    assert recalibrate(model, loader, forward) is None
    assert_close(running(model), by_definition(Net(), x))
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    for name, value in before.items():
        assert torch.equal(model.state_dict()[name], value), name
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_augmentations_are_the_same_in_every_pass() -> None:
    class Noisy:
        def __iter__(self) -> Iterator[Tensor]:
            return (part + torch.randn(part.shape, dtype=part.dtype) for part in data().split(5))

    model = Net()
    torch.manual_seed(5)
    recalibrate(model, Noisy())
    torch.manual_seed(5)
    assert_close(running(model), by_definition(Net(), torch.cat(list(Noisy()))))


def test_an_error_leaves_the_statistics_as_they_were() -> None:
    model = Net()
    before = running(model)
    calls = 0

    def failing(model: nn.Module, batch: Tensor) -> Any:
        nonlocal calls
        calls += 1
        if calls == 8:
            raise RuntimeError("on purpose")
        return model(batch)

    with pytest.raises(RuntimeError, match="on purpose"):
        recalibrate(model, data().split(5), failing)
    assert_close(running(model), before, 0)
    spoiled = data()
    spoiled[3] = torch.nan
    with pytest.raises(BatchError, match="what reaches the layer first is not finite"):
        recalibrate(model, spoiled.split(5))
    assert_close(running(model), before, 0)
    assert model.training
    assert model.num_passes == 0


def test_a_compiled_model() -> None:
    x, model = data(), Net()
    compiled: Any = torch.compile(model, backend="eager")
    recalibrate(compiled, x.split(7))
    assert_close(running(model), by_definition(Net(), x))
    in_place = Net()
    in_place.compile(backend="eager")
    recalibrate(in_place, x.split(7))
    assert_close(running(in_place), running(model))


def test_one_layer_takes_one_pass() -> None:
    x, model = data(), nn.Sequential(nn.BatchNorm2d(3)).double()
    recalibrate(model, iter(x.split(4)))
    assert (model[0].running_mean - x.transpose(0, 1).flatten(1).mean(1)).abs().max() <= 1e-10


def test_bad_input() -> None:
    model = Net()
    with pytest.raises(OptionError, match="tuple_iterator, which can be read once, but 5 BatchNorm layers take a pass"):
        recalibrate(model, iter(data().split(4)))
    with pytest.raises(OptionError, match="no BatchNorm layer with running statistics"):
        recalibrate(nn.Linear(2, 2), [])
    with pytest.raises(OptionError, match="forward is 3: pass a function"):
        recalibrate(model, data().split(4), 3)  # type: ignore[arg-type]
    with pytest.raises(BatchError, match=r"a batch is a list, and .* pass forward=lambda model, batch"):
        recalibrate(model, [[data(), 3]])
    with pytest.raises(BatchError, match="no BatchNorm layer has run: pass at least one batch"):
        recalibrate(model, [])
    with pytest.raises(BatchError, match="the layer 0 has seen 1 values per channel"):
        recalibrate(nn.Sequential(nn.BatchNorm1d(2)), [torch.ones(1, 2)])
    untracked = nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False), nn.BatchNorm2d(3)).double()
    with pytest.warns(BigBatchWarning, match=r"1 of 2 BatchNorm layers \(0 first\) have no running statistics"):
        recalibrate(untracked, data().split(4))
