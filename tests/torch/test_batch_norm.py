"""BatchNorm in training mode: where the batch is cut, and running statistics, which are those of the whole batch."""

import copy
import io
import pickle
import warnings
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bigbatch import BatchError, BigBatchWarning, Interrupted, OptionError, OrderError, StateError, Window
from bigbatch.torch import Accumulator, verify
from bigbatch.torch.internals import is_in_backward

from .training import flat, sgd

pytestmark = pytest.mark.filterwarnings("ignore::bigbatch.BigBatchWarning")


def make(kind: type = nn.BatchNorm1d, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), kind(3, **options), nn.Linear(3, 2)).double()


def data(size: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(size, 4, dtype=torch.float64), torch.randn(size, 2, dtype=torch.float64)


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def sizes_of(model: nn.Module, size: int, micro_batch_size: int) -> list[int]:
    sizes: list[int] = []

    def noting(model: nn.Module, batch: Any) -> Tensor:
        sizes.append(len(batch[0]))
        return loss(model, batch)

    Accumulator(model, sgd(model), noting, micro_batch_size).step(data(size))
    return sizes


@pytest.mark.parametrize("size", [7, 10, 13, 25])
@pytest.mark.parametrize("options", [{}, {"track_running_stats": False}])
def test_a_remainder_of_one_gets_a_second_sample(size: int, options: dict[str, Any]) -> None:
    model = make(**options)
    by_hand = copy.deepcopy(model)
    sizes = sizes_of(model, size, 3)
    assert sizes == [3] * (size // 3 - 1) + [2, 2]
    optimizer = sgd(by_hand)
    for part in zip(*(t.split(sizes) for t in data(size)), strict=True):
        (loss(by_hand, part) * len(part[0]) / size).backward()
    optimizer.step()
    for p, q in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


def test_batches_are_cut_as_usual_if_one_sample_is_enough() -> None:
    frozen = make()
    frozen[1].eval()
    assert sizes_of(frozen, 7, 3) == [3, 3, 1]
    assert sizes_of(make(nn.LayerNorm), 7, 3) == [3, 3, 1]
    assert sizes_of(make(), 8, 3) == [3, 3, 2]
    model = make()
    model.eval()
    assert sizes_of(model, 7, 3) == [3, 3, 1]
    model.train()
    assert sizes_of(model, 7, 3) == [3, 2, 2]


@pytest.mark.parametrize(("size", "micro_batch_size"), [(7, 3), (9, 4), (13, 4), (8, 3)])
@pytest.mark.parametrize("is_training", [True, False])
def test_verify_cuts_where_step_does(size: int, micro_batch_size: int, is_training: bool) -> None:
    model = make()
    for layer in model:  # a whole model in eval mode is compared in training mode
        layer.train(is_training)
    seen: list[int] = []

    def loop(model: nn.Module, micro_batches: list[Any]) -> None:
        seen[:] = [len(micro_batch[0]) for micro_batch in micro_batches]
        for micro_batch in micro_batches:
            (loss(model, micro_batch) * len(micro_batch[0]) / size).backward()

    assert verify(model, data(size), loss, micro_batch_size).is_exact is not is_training
    verify(model, data(size), loss, micro_batch_size, step=loop)
    assert seen == sizes_of(model, size, micro_batch_size)


def test_error_explains_a_batch_that_leaves_one_sample() -> None:
    for size, micro_batch_size in ((7, 2), (3, 1)):
        model = make()
        before = [p.clone() for p in model.parameters()]
        accumulator = Accumulator(model, sgd(model), loss, micro_batch_size)
        with pytest.raises(BatchError, match=rf"batch of {size} in micro-batches of {micro_batch_size} .*single"):
            accumulator.step(data(size))
        for p, then in zip(model.parameters(), before, strict=True):
            assert torch.equal(p, then)
            assert p.grad is None
        if micro_batch_size > 1:
            assert accumulator.step(data(size - 1)).is_applied


def test_the_error_about_a_single_sample_says_why() -> None:
    def thawing(model: nn.Module, batch: Any) -> Tensor:
        return loss(model.train(), batch)

    model = make()
    model.eval()
    with pytest.raises(BatchError, match=r"of 3 ends with one .*: the layer was put into training mode in the loss"):
        Accumulator(model, sgd(model), thawing, 3).step(data(7))
    model.train()
    with pytest.raises(BatchError, match=r"of 1 has a single sample in each, .* pass a micro_batch_size of 3 or more"):
        Accumulator(model, sgd(model), loss, 1).step(data(7))
    with pytest.raises(BatchError, match="pass a micro_batch_size of 2 or more"):
        Accumulator(model, sgd(model), loss, 1).step(data(2))
    window = Window([*zip(*(t.split(3) for t in data(7)), strict=True)])
    with pytest.raises(BatchError, match="give the last micro-batch of a window 2 samples or more"):
        Accumulator(model, sgd(model), loss).step(window)


def test_a_batch_of_one_fails_as_without_accumulation() -> None:
    model = make()
    with pytest.raises(ValueError, match="more than 1 value per channel") as raised:
        Accumulator(model, sgd(model), loss, 3).step(data(1))
    assert not isinstance(raised.value, BatchError)


def test_images_have_several_values_per_channel() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.LazyLinear(2)).double()
    x, y = torch.randn(3, 3, 4, 4, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)
    model(x)
    assert Accumulator(model, sgd(model), loss, 1).step((x, y)).is_applied


def test_the_warning_comes_once() -> None:
    model = make()
    accumulator = Accumulator(model, sgd(model), loss, 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            accumulator.step(data(7))
    assert [w.category for w in caught] == [BigBatchWarning]


# --- running statistics ---------------------------------------------------------------------------------------


class Net(nn.Module):
    """BatchNorm first, and again behind other layers."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.BatchNorm2d(3, momentum=momentum)
        self.conv = nn.Conv2d(3, 4, 2)
        self.second = nn.BatchNorm2d(4, momentum=None if momentum is None else 0.3)
        self.head = nn.Linear(16, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.head(self.second(self.conv(self.first(x)).tanh()).flatten(1))
        return hidden


def images(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    """The statistics drift, so that those of micro-batches are far apart."""
    torch.manual_seed(1)
    drift = torch.linspace(0, 5, sum(sizes), dtype=torch.float64).reshape(-1, 1, 1, 1)
    x = torch.randn(sum(sizes), 3, 3, 3, dtype=torch.float64) * (1 + drift) + drift
    y = torch.randn(sum(sizes), 2, dtype=torch.float64)
    return list(zip(x.split(sizes), y.split(sizes), strict=True))


def feed(accumulator: Accumulator, batch: tuple[Tensor, Tensor], size: int) -> None:
    """`micro_batch()` instead of `step()`."""
    for part in zip(*(t.split(size) for t in batch), strict=True):
        with accumulator.micro_batch(weight=len(part[0])) as micro:
            micro.backward(loss(accumulator.model, part))
    accumulator.flush()


def train(model: nn.Module, batches: Any, size: int, way: str = "batch", **options: Any) -> Accumulator:
    accumulator = Accumulator(model, sgd(model), loss, size, accumulation_steps=1000, **options)
    for batch in batches:
        if way == "batch":
            accumulator.step(batch)
        elif way == "window":
            accumulator.step(Window([*zip(*(t.split(size) for t in batch), strict=True)]))
        else:
            feed(accumulator, batch, size)
    return accumulator


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def distance(ours: nn.Module, theirs: dict[str, Tensor], *names: str) -> float:
    now = buffers(ours)
    assert now.keys() == theirs.keys()
    return max(float((now[n] - theirs[n]).abs().max()) for n in names or now)


@pytest.mark.parametrize("way", ["batch", "window", "micro_batch"])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("size", [1, 2, 3, 6, 7])
def test_a_first_layer_has_the_statistics_of_the_full_batch(size: int, momentum: float | None, way: str) -> None:
    batches = images(7, 2, 5)
    full = Net(momentum)
    for batch in batches:
        full(batch[0])  # the input of the first layer does not depend on parameters
    model = Net(momentum)
    train(model, batches, size, way)
    names = [f"first.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")]
    assert distance(model, buffers(full), *names) <= 1e-12
    assert model.second.num_batches_tracked == 3


class Recorded:
    """The statistics that BatchNorm layers should have, from the activations of all micro-batches, in float64."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
        self.inputs: dict[nn.Module, list[Tensor]] = {layer: [] for layer in self.layers}
        self.expected = {layer: [layer.running_mean.clone(), layer.running_var.clone()] for layer in self.layers}
        for layer in self.layers:
            layer.register_forward_pre_hook(lambda layer, args: self.inputs[layer].append(args[0].detach()))

    def end_of_step(self) -> None:
        for layer in self.layers:
            x = torch.cat(self.inputs[layer]).transpose(0, 1).flatten(1)
            found = x.mean(1), x.var(1)
            m = 1 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
            self.expected[layer] = [
                (1 - m) * old + m * new for old, new in zip(self.expected[layer], found, strict=True)
            ]
            self.inputs[layer].clear()

    def error(self) -> float:
        pairs = [(layer, self.expected[layer]) for layer in self.layers]
        return max(
            float((own - wanted).abs().max())
            for layer, expected in pairs
            for own, wanted in zip((layer.running_mean, layer.running_var), expected, strict=True)
        )


@pytest.mark.parametrize(("mode", "is_off"), [("batch", False), ("micro_batch", True)])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_three_epochs_equal_the_recorded_activations(mode: Any, is_off: bool, momentum: float | None) -> None:
    """The negative control is the update by every micro-batch, as any other loop makes it."""
    model = Net(momentum)
    recorded = Recorded(model)
    accumulator = Accumulator(model, sgd(model), loss, 3, batch_norm=mode)
    for _ in range(3):
        for batch in images(7, 5):
            accumulator.step(batch)
            recorded.end_of_step()
    assert recorded.error() > 0.1 if is_off else recorded.error() <= 1e-10


def test_negative_control_one_window() -> None:
    (batch,) = images(12)
    full = Net()
    full(batch[0])
    mean, var = ([f"first.running_{what}"] for what in ("mean", "var"))
    naive, ours = Net(), Net()
    train(naive, [batch], 3, batch_norm="micro_batch")
    train(ours, [batch], 3)
    assert distance(naive, buffers(full), *mean) > 0.3
    assert distance(naive, buffers(full), *var) > 1
    assert distance(ours, buffers(full), *mean, *var) <= 1e-12


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.SyncBatchNorm, nn.BatchNorm3d])
def test_other_kinds_of_layers(kind: Any) -> None:
    torch.manual_seed(0)
    shape = {nn.BatchNorm3d: (7, 3, 2, 2, 2)}.get(kind, (7, 3))
    x, y = torch.randn(shape, dtype=torch.float64), torch.randn(7, 1, dtype=torch.float64)
    full = nn.Sequential(kind(3), nn.Flatten(), nn.LazyLinear(1)).double()
    full(x)
    full[0].reset_running_stats()
    model = copy.deepcopy(full)
    full(x)
    train(model, [(x, y)], 3)
    assert distance(model, buffers(full)) <= 1e-12


class Activated(nn.BatchNorm2d):
    """A layer with its own code, as timm has them, which may even read the running statistics."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.running_mean.clone()
        return super().forward(x).tanh()


@pytest.mark.parametrize("how", ["subclass", "forward of the instance"])
def test_a_layer_with_its_own_code(how: str) -> None:
    (batch,) = images(7)
    full, model = Net(), Net()
    full(batch[0])
    before = buffers(model)["first.running_mean"]
    if how == "subclass":
        model.first = Activated(3).double()
    else:  # as accelerate does
        plain = model.first.forward
        model.first.forward = lambda x: plain(x)
    train(model, [batch], 3)
    assert distance(model, buffers(full), "first.running_mean", "first.running_var") <= 1e-12
    assert model.first.num_batches_tracked == 1
    if how == "subclass":
        assert torch.equal(model.first.seen, before)
    else:
        assert "forward" in vars(model.first)


class Twice(nn.Module):
    """One layer that is used twice; with `again`, recomputed in the backward pass."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(4)
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
        self.reentrant = reentrant
        self.double()

    def block(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(self.body(self.norm(x)).tanh())
        return result

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        reentrant = self.reentrant
        hidden = self.block(x) if reentrant is None else checkpoint(self.block, x, use_reentrant=reentrant)
        result: Tensor = self.head(hidden)
        return result


@pytest.mark.parametrize("way", ["batch", "micro_batch"])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_shared_layer_pools_call_by_call_and_recomputation_does_not_count(reentrant: bool | None, way: str) -> None:
    batch, model = data(8), Twice(reentrant)
    inputs: list[Tensor] = []

    def note(_: nn.Module, args: Any) -> None:
        if not is_in_backward():
            inputs.append(args[0].detach())

    model.norm.register_forward_pre_hook(note)
    train(model, [batch], 3, way)
    expected = nn.BatchNorm1d(4).double()
    for call in (0, 1):
        x = torch.cat(inputs[call::2])
        assert len(x) == 8
        expected(x)
    assert distance(model.norm, buffers(expected)) <= 1e-12


def on_real_and_fake(model: nn.Module, batch: Any) -> Tensor:
    """A discriminator's loss: each layer runs twice, on data far apart."""
    return loss(model, batch) + model(batch[0] * 3 - 4).square().mean()


@pytest.mark.parametrize("way", ["batch", "window", "micro_batch"])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("size", [1, 2, 3, 6, 7])
def test_every_call_makes_an_update_as_with_the_full_batch(size: int, momentum: float | None, way: str) -> None:
    batches, full, model = images(7, 2, 5), Net(momentum), Net(momentum)
    for x, _ in batches:
        full(x)
        full(x * 3 - 4)
    accumulator = Accumulator(model, sgd(model), on_real_and_fake, size, accumulation_steps=1000)
    for batch in batches:
        parts = [*zip(*(t.split(size) for t in batch), strict=True)]
        if way == "micro_batch":
            for part in parts:
                with accumulator.micro_batch(weight=len(part[0])) as micro:
                    micro.backward(on_real_and_fake(model, part))
            accumulator.flush()
        else:
            accumulator.step(batch if way == "batch" else Window(parts))
    names = [f"first.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")]
    assert distance(model, buffers(full), *names) <= 1e-12
    assert model.second.num_batches_tracked == 6


def test_a_call_after_the_backward_pass_is_the_second_one() -> None:
    (batch,), model, full = images(6), Net(), Net()
    accumulator = Accumulator(model, sgd(model), accumulation_steps=2)
    for part in zip(*(t.split(3) for t in batch), strict=True):
        with accumulator.micro_batch(weight=3) as micro:
            micro.backward(loss(model, part))
            model(part[0] * 3 - 4)
    full(batch[0])
    full(batch[0] * 3 - 4)
    names = [f"first.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")]
    assert distance(model, buffers(full), *names) <= 1e-12


def test_another_number_of_calls_in_the_next_step() -> None:
    batches, model, full = images(7, 5, 6), Net(), Net()
    accumulator = Accumulator(model, sgd(model), loss, 3)
    for number, batch in enumerate(batches):
        accumulator.loss = on_real_and_fake if number == 1 else loss
        accumulator.step(batch)
        full(batch[0])
        if number == 1:
            full(batch[0] * 3 - 4)
    names = [f"first.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")]
    assert distance(model, buffers(full), *names) <= 1e-12


def test_layers_that_do_not_run_or_are_in_eval_mode_keep_their_statistics() -> None:
    model = Net()
    model.unused = nn.BatchNorm2d(3)
    model.second.eval()
    before = buffers(model)
    train(model, images(7), 3)
    assert distance(model, before, *(name for name in before if not name.startswith("first"))) == 0
    assert distance(model, before, "first.running_mean") > 0


def test_values_that_are_not_finite_stay_out_of_running_statistics() -> None:
    """The step is skipped; a layer whose statistics are finite is updated, as by the forward pass of a full batch."""
    model, full = Net(), Net()
    spoiled, clean = images(7, 5)
    with torch.no_grad():
        model.conv.bias[0] = torch.nan
    before = buffers(model)
    accumulator = train(model, [spoiled], 3)
    full(spoiled[0])
    assert distance(model, buffers(full), *(n for n in before if n.startswith("first"))) <= 1e-12
    assert distance(model, before, *(n for n in before if n.startswith("second"))) == 0
    with torch.no_grad():
        model.conv.bias[0] = 0
    assert accumulator.step(clean).is_applied
    assert all(torch.isfinite(b).all() for b in buffers(model).values())
    assert model.second.num_batches_tracked == 1


# --- nothing leaks ------------------------------------------------------------------------------------------------


def assert_untouched(model: nn.Module, before: dict[str, Tensor], objects: list[int]) -> None:
    assert distance(model, before) == 0
    assert [id(b) for b in model.buffers()] == objects
    for layer in model.modules():
        assert "forward" not in vars(layer)
        assert getattr(layer, "momentum", 0.1) in (0.1, 0.3)
        assert layer.training


def test_between_micro_batches_and_inside_of_the_loss_the_model_is_as_before() -> None:
    model, (batch,) = Net(), images(8)
    before, objects = buffers(model), [id(b) for b in model.buffers()]
    accumulator = Accumulator(model, sgd(model), accumulation_steps=4)
    for number, part in enumerate(zip(*(t.split(2) for t in batch), strict=True)):
        assert_untouched(model, before, objects)
        with accumulator.micro_batch(weight=2) as micro:
            value = loss(model, part)
            assert distance(model, before) == 0
            model.eval()
            model(part[0])  # an evaluation in the middle
            model.train()
            micro.backward(value)
            assert distance(model, before) == 0
        assert (micro.step is not None) == (number == 3)
    full = Net()
    full(batch[0])
    assert distance(model, buffers(full), "first.running_mean", "first.running_var") <= 1e-12


@pytest.mark.parametrize("way", ["batch", "micro_batch"])
def test_an_error_leaves_everything_as_it_was(way: str) -> None:
    model, (batch, other) = Net(), images(8, 6)
    before, objects = buffers(model), [id(b) for b in model.buffers()]
    num_calls = 0

    def failing(model: nn.Module, batch: Any) -> Tensor:
        nonlocal num_calls
        num_calls += 1
        value = loss(model, batch)
        if num_calls == 3:
            raise RuntimeError("on purpose")
        return value

    accumulator = Accumulator(model, sgd(model), failing, 2, accumulation_steps=4)
    with pytest.raises(RuntimeError, match="on purpose"):
        if way == "batch":
            accumulator.step(batch)
        for part in zip(*(t.split(2) for t in batch), strict=True):
            with accumulator.micro_batch(weight=2) as micro:
                micro.backward(failing(model, part))
    assert_untouched(model, before, objects)
    if way == "batch":
        accumulator.step(other)
        full = Net()
        full(other[0])
    else:  # the block that failed does not count, and the window goes on
        for part in zip(*(t.split(2) for t in (batch[0][6:], batch[1][6:])), strict=True):
            with accumulator.micro_batch(weight=2) as micro:
                micro.backward(loss(model, part))
        with accumulator.micro_batch(weight=2) as micro:
            model(other[0][:1])  # as if it had not been
            micro.skip()
        accumulator.flush()
        full = Net()
        full(torch.cat([batch[0][:4], batch[0][6:]]))
    assert distance(model, buffers(full), "first.running_mean", "first.running_var") <= 1e-12


def test_a_window_that_is_forgotten_does_not_count() -> None:
    model, (batch, other) = Net(), images(6, 7)
    accumulator = Accumulator(model, sgd(model), loss, 3, accumulation_steps=4)
    with accumulator.micro_batch(weight=6) as micro:
        micro.backward(loss(model, batch))
    accumulator.forget()
    accumulator.step(other)
    full = Net()
    full(other[0])
    assert distance(model, buffers(full), "first.running_mean", "first.running_var") <= 1e-12


def test_zero_weights_do_not_count() -> None:
    model, (batch,) = Net(), images(7)
    weights = iter([3, 0, 1])
    accumulator = Accumulator(model, sgd(model), loss, 3, weight=lambda _: next(weights))
    accumulator.step(batch)
    full = Net()
    full(torch.cat([batch[0][:3], batch[0][5:]]))  # cut into 3, 2 and 2
    assert distance(model, buffers(full), "first.running_mean", "first.running_var") <= 1e-12
    before = buffers(model)
    accumulator.weight = lambda _: 0
    accumulator.step(batch)
    accumulator.accumulation_steps = 1
    with accumulator.micro_batch(weight=0) as micro:
        micro.backward(loss(model, batch))
    assert distance(model, before) == 0


def test_a_window_without_weight_changes_nothing_although_it_runs_for_aux() -> None:
    model, (batch, other) = Net(), images(7, 5)

    def with_aux(model: nn.Module, batch: Any) -> Any:
        return loss(model, batch), {"size": len(batch[0])}

    accumulator = Accumulator(model, sgd(model), with_aux, 3, weight=lambda _: 0, has_aux=True)
    before = buffers(model)
    assert accumulator.step(batch).aux == {"size": 7}
    assert distance(model, before) == 0
    accumulator.weight = None
    accumulator.step(other)
    full = Net()
    full(other[0])
    assert distance(model, buffers(full), "first.running_mean", "first.running_var") <= 1e-12


@pytest.mark.parametrize("mode", ["batch", "frozen"])
def test_a_layer_that_was_replaced_is_found(mode: Any) -> None:
    (batch, other), model = images(6, 5), Net()
    accumulator = Accumulator(model, sgd(model), loss, 3, accumulation_steps=100, batch_norm=mode)
    for feeding in (False, True):
        torch.manual_seed(2)
        model.first = nn.BatchNorm2d(3, affine=False).double()
        full = copy.deepcopy(model.first)
        if mode == "batch":
            full(other[0])
        if feeding:
            feed(accumulator, other, 2)
        else:
            accumulator.step(other)
        assert distance(model.first, buffers(full)) <= 1e-12
    accumulator.step(batch)


def test_a_lazy_layer_is_told_of_and_pooled_from_the_next_window_on() -> None:
    torch.manual_seed(0)
    x, y = data(6)
    model = nn.Sequential(nn.Linear(4, 2).double(), nn.LazyBatchNorm1d(affine=False, dtype=torch.float64))
    accumulator = Accumulator(model, torch.optim.SGD(model[0].parameters(), lr=0.0), loss, 3)
    with pytest.warns(BigBatchWarning, match=r"1 BatchNorm layer \(1\) updated running statistics with every"):
        accumulator.step((x, y))
    assert model[1].num_batches_tracked == 2
    full = copy.deepcopy(model)
    accumulator.step((x, y))
    full(x)
    assert distance(model, buffers(full)) <= 1e-12


@pytest.mark.parametrize("copies", [copy.deepcopy, torch.optim.swa_utils.AveragedModel])
def test_a_copy_made_in_a_block_is_a_plain_model(copies: Any) -> None:
    model, (batch, other) = Net(), images(7, 5)
    own = model.second.forward
    model.second.forward = own
    accumulator = Accumulator(model, sgd(model), accumulation_steps=1)
    with accumulator.micro_batch(weight=7) as micro:
        value = loss(model, batch)
        twin = copies(model)
        micro.backward(value)
    twin = getattr(twin, "module", twin)
    assert not {"forward", "__deepcopy__"} & vars(twin.first).keys()
    assert "__deepcopy__" not in vars(twin.second)
    twin.second.__dict__.pop("forward")
    assert vars(model.second)["forward"] is own
    before = buffers(model)
    pickle.loads(pickle.dumps(twin))(other[0])
    twin(other[0])
    assert twin.first.num_batches_tracked == 1
    assert distance(model, before) == 0
    assert model.first.num_batches_tracked == 1


def test_copies_of_the_model_in_a_loss_are_left_alone() -> None:
    model, (batch,) = Net(), images(7)

    def copying(model: nn.Module, batch: Any) -> Tensor:
        twin = copy.deepcopy(model)
        with torch.no_grad():
            twin.first.weight.mul_(3)
        assert not torch.equal(twin.first(batch[0]), model.first.eval()(batch[0]))
        model.first.train()
        assert twin.first.num_batches_tracked == 1
        own = {name: b.clone() for name, b in model.named_buffers()}
        torch.func.functional_call(model, own, batch[0])
        assert own["first.num_batches_tracked"] == 1
        return loss(model, batch)

    accumulator = Accumulator(model, sgd(model), copying, 7)
    accumulator.step(batch)
    full = Net()
    full(batch[0])
    assert distance(model, buffers(full), "first.running_mean", "first.num_batches_tracked") <= 1e-12


# --- interruption and saving ---------------------------------------------------------------------------------------


def saved_and_loaded(accumulator: Accumulator, how: str) -> Accumulator:
    if how == "copy":
        return copy.deepcopy(accumulator)
    if how == "pickle":
        return cast(Accumulator, pickle.loads(pickle.dumps(accumulator)))
    if how == "same":
        return accumulator
    file = io.BytesIO()
    torch.save([accumulator.model.state_dict(), accumulator.state_dict()], file)
    file.seek(0)
    of_model, of_accumulator = torch.load(file, weights_only=True)
    model = Net()
    model.load_state_dict(of_model)
    fresh = Accumulator(model, sgd(model), accumulator.loss, 2, accumulation_steps=4)
    fresh.load_state_dict(of_accumulator)
    return fresh


@pytest.mark.parametrize("how", ["same", "state_dict", "copy", "pickle"])
@pytest.mark.parametrize("way", ["batch", "micro_batch"])
def test_a_window_continues_bit_for_bit(way: str, how: str) -> None:
    (batch, later), found = images(8, 6), []
    for is_stopped in (False, True):
        model = Net()
        accumulator = Accumulator(model, sgd(model), loss, 2, accumulation_steps=4)
        if way == "batch":
            if is_stopped:
                accumulator.loss = interrupting = Interrupting(accumulator)
                with pytest.raises(Interrupted):
                    accumulator.step(batch)
                accumulator.loss = interrupting.accumulator = loss
                accumulator = saved_and_loaded(accumulator, how)
            accumulator.step(batch)
        for number, part in enumerate(zip(*(t.split(2) for t in later), strict=True)):
            with accumulator.micro_batch(weight=2) as micro:
                micro.backward(loss(accumulator.model, part))
            if is_stopped and number == 1:
                accumulator = saved_and_loaded(accumulator, how)
        accumulator.flush()
        found.append(accumulator.model.state_dict())
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name


class Interrupting:
    def __init__(self, accumulator: Any) -> None:
        self.accumulator, self.num_calls = accumulator, 0

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        self.num_calls += 1
        if self.num_calls == 3:
            self.accumulator.interrupt()
        return loss(model, batch)


@pytest.mark.parametrize(
    ("saved", "loading"), [("batch", "frozen"), ("micro_batch", "batch"), ("batch", "micro_batch")]
)
def test_a_window_of_another_mode_is_refused(saved: Any, loading: Any) -> None:
    (batch,), model = images(6), Net()
    accumulator = Accumulator(model, sgd(model), accumulation_steps=2, batch_norm=saved)
    with accumulator.micro_batch(weight=6) as micro:
        micro.backward(loss(model, batch))
    state = accumulator.state_dict()
    other = Accumulator(model, sgd(model), accumulation_steps=2, batch_norm=loading)
    with pytest.raises(StateError, match=f"batch_norm='{saved}', this accumulator has '{loading}'"):
        other.load_state_dict(state)
    assert other.num_fed == 0
    del state["window"]["batch_norm_mode"]  # as states were before
    other.load_state_dict(state)
    assert other.num_fed == 1


def test_the_mode_does_not_matter_without_layers_or_between_windows() -> None:
    plain, model = nn.Linear(4, 2).double(), Net()
    accumulator = Accumulator(plain, sgd(plain), accumulation_steps=2)
    with accumulator.micro_batch(weight=6) as micro:
        micro.backward(loss(plain, data(6)))
    Accumulator(plain, sgd(plain), accumulation_steps=2, batch_norm="frozen").load_state_dict(accumulator.state_dict())
    accumulator = train(model, images(6), 3)
    Accumulator(model, sgd(model), loss, 3, batch_norm="frozen").load_state_dict(accumulator.state_dict())


def test_a_window_of_several_calls_continues_where_it_was() -> None:
    (batch,), model, full = images(6), Net(), Net()
    accumulator = Accumulator(model, sgd(model), accumulation_steps=2)
    for number, part in enumerate(zip(*(t.split(3) for t in batch), strict=True)):
        if number:
            state = accumulator.state_dict()
            accumulator = Accumulator(model, sgd(model), accumulation_steps=2)
            accumulator.load_state_dict(state)
        with accumulator.micro_batch(weight=3) as micro:
            micro.backward(on_real_and_fake(model, part))
    full(batch[0])
    full(batch[0] * 3 - 4)
    names = [f"first.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")]
    assert distance(model, buffers(full), *names) <= 1e-12


def test_statistics_of_another_model_are_refused() -> None:
    model = Net()
    accumulator = Accumulator(model, sgd(model), accumulation_steps=4)
    with accumulator.micro_batch(weight=7) as micro:
        micro.backward(loss(model, images(7)[0]))
    state = accumulator.state_dict()
    state["window"]["batch_norm"]["other"] = state["window"]["batch_norm"].pop("first")
    with pytest.raises(StateError, match=r"3 channels for a BatchNorm layer 'other'"):
        accumulator.load_state_dict(state)


# --- the options ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["batch", "window", "micro_batch"])
def test_frozen_is_exact_without_a_warning(way: str) -> None:
    batches = images(7, 4)
    model = Net()
    model(batches[0][0])  # so that there are statistics
    full = copy.deepcopy(model)
    full.first.eval()
    full.second.eval()
    optimizer, before = sgd(full), buffers(full)
    for batch in batches:
        optimizer.zero_grad()
        loss(full, batch).backward()
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, batches, 2, way, batch_norm="frozen")
    assert distance(model, before) == 0
    for p, q in zip(model.parameters(), full.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)
    assert all(module.training for module in model.modules())


def test_verify_with_frozen_layers() -> None:
    model, (batch,) = Net(), images(7)
    assert verify(model, batch, loss, 2, batch_norm="frozen").is_exact
    found = verify(model, batch, loss, 2)
    assert not found.is_exact
    assert any('batch_norm="frozen"' in cause for cause in found.causes)
    accumulator = Accumulator(model, sgd(model), loss, 2, batch_norm="frozen")
    assert accumulator.verify(batch).is_exact
    with pytest.raises(OptionError, match="batch_norm='none' is unknown"):
        verify(model, batch, loss, 2, batch_norm="none")  # type: ignore[arg-type]
    assert sizes_of(make(), 7, 3) == [3, 2, 2]
    sizes: list[int] = []

    def noting(model: nn.Module, batch: Any) -> Tensor:
        sizes.append(len(batch[0]))
        return loss(model, batch)

    train_of = make()
    Accumulator(train_of, sgd(train_of), noting, 3, batch_norm="frozen").step(data(7))
    assert sizes == [3, 3, 1]


def test_a_loss_that_thaws_frozen_layers_is_refused() -> None:
    def thawing(model: nn.Module, batch: Any) -> Tensor:
        return loss(model.train(), batch)

    model, (batch,) = Net(), images(7)
    before = flat(model)
    with pytest.raises(OrderError, match=r"train\(\) was called during a pass, which put 2 of 2 frozen"):
        Accumulator(model, sgd(model), thawing, 3, batch_norm="frozen").step(batch)
    assert torch.equal(flat(model), before)


def test_layers_without_running_statistics_cannot_be_frozen() -> None:
    model = make(track_running_stats=False)
    told = (
        r"1 BatchNorm layer in training mode \(1\) normalises by the micro-batch, so .*: make them with track_running"
    )
    with pytest.warns(BigBatchWarning, match=told):
        Accumulator(model, sgd(model), loss, 3, batch_norm="frozen").step(data(7))


def test_the_warning_is_about_all_layers() -> None:
    model = Net()
    told = r"2 BatchNorm layers in training mode \(first first\) normalise by .*\(running .*: pass batch_norm="
    with pytest.warns(BigBatchWarning, match=told):
        Accumulator(model, sgd(model), loss, 3).step(images(7)[0])


def test_the_option_is_checked_and_changes_between_windows() -> None:
    model, (batch, other) = Net(), images(8, 6)
    with pytest.raises(OptionError, match=r"batch_norm='pooled' is unknown: pass \"batch\", \"micro_batch\" or"):
        Accumulator(model, sgd(model), loss, 2, batch_norm="pooled")  # type: ignore[arg-type]
    accumulator = Accumulator(model, sgd(model), loss, 2, accumulation_steps=4)
    with accumulator.micro_batch(weight=8) as micro:
        micro.backward(loss(model, batch))
    with pytest.raises(OptionError, match="batch_norm was changed while a window is open"):
        accumulator.batch_norm = "frozen"
    accumulator.batch_norm = "batch"
    accumulator.flush()
    accumulator.batch_norm = "frozen"
    before = buffers(model)
    accumulator.step(other)
    assert distance(model, before) == 0
    with pytest.raises(OptionError, match="is unknown"):
        accumulator.batch_norm = None


# --- torch.compile ---------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("what", ["model", "loss", "in place"])
def test_compiled(what: str) -> None:
    torch.compiler.reset()
    (batch, other), model = images(7, 5), Net()
    full = Net()
    full(batch[0])
    full(other[0])
    how: Any = {"backend": "aot_eager", "fullgraph": True}
    trained: nn.Module = torch.compile(model, **how) if what == "model" else model
    if what == "in place":
        model.compile(**how)
    own_loss = torch.compile(loss, **how) if what == "loss" else loss
    accumulator = Accumulator(trained, sgd(model), own_loss, 3)
    accumulator.step(batch)
    accumulator.step(other)
    assert distance(model, buffers(full), "first.running_mean", "first.running_var") <= 1e-12
    trained(batch[0])  # outside of a step, the layers update their statistics as always
    assert model.first.num_batches_tracked == model.second.num_batches_tracked == 3


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_code_that_cannot_be_pooled_is_told_of() -> None:
    torch.compiler.reset()
    model = Net()
    model.first = Activated(3).double()
    accumulator = Accumulator(torch.compile(model, backend="eager"), sgd(model), loss, 3)
    with pytest.warns(BigBatchWarning, match=r"1 BatchNorm layer \(.*first\) updated running statistics with every"):
        accumulator.step(images(7)[0])
    assert model.first.num_batches_tracked == 3
    assert model.second.num_batches_tracked == 1


def test_a_copy_of_an_accumulator_has_layers_of_its_own() -> None:
    model, (batch,) = Net(), images(7)
    accumulator = Accumulator(model, sgd(model), loss, 3)
    accumulator.step(batch)
    before = buffers(model)
    twin = copy.deepcopy(accumulator)
    twin.step(batch)
    assert distance(model, before) == 0
    assert distance(twin.model, before) > 0
