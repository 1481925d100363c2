"""Batches whose samples are not along the leading axis: time-major ones, and those whose tensors differ."""

import copy
import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import BatchError, BigBatchWarning, OptionError, Window, windows
from bigbatch.torch import Accumulator, train_with_accumulation, verify
from bigbatch.torch.batch import axes, batch_size, cut, is_empty, suggested_axes, tensors

from .training import flat, sgd

T, N, WIDTH, CLASSES = 9, 7, 6, 5
LENGTHS = torch.tensor([9, 2, 5, 1, 9, 3, 7])
SIZES = [1, 2, 3, N - 1, N]
pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")  # of nn.Transformer


class Recurrent(nn.Module):
    """Labels each time step of ragged sequences; time comes first everywhere."""

    def __init__(self, *, batch_first: bool = False) -> None:
        super().__init__()
        self.mix, self.head = nn.LSTM(WIDTH, WIDTH, batch_first=batch_first), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.head(self.mix(x * mask[..., None])[0])


class Translation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Transformer(WIDTH, 2, 1, 1, 8, dropout=0.0)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        padding = ~mask.T  # samples first, as nn.Transformer wants it for this argument alone
        return self.head(self.mix(x, x, src_key_padding_mask=padding, tgt_key_padding_mask=padding))


MODELS = {"LSTM": Recurrent, "Transformer": Translation}
every_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def made(make: type[nn.Module], **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = make(**options).double()
    for p in model.parameters():
        nn.init.normal_(p, std=0.5)
    return model


def ragged(num_steps: int = T) -> dict[str, Tensor]:
    torch.manual_seed(1)
    mask = torch.arange(num_steps)[:, None] < LENGTHS
    x, y = torch.randn(num_steps, N, WIDTH, dtype=torch.float64), torch.randint(CLASSES, (num_steps, N))
    return {"x": x, "y": y.where(mask, -100), "mask": mask}


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"], batch["mask"]).flatten(0, 1), batch["y"].view(-1))  # view: contiguous


def num_tokens(batch: Any) -> Tensor:
    return (batch["y"] != -100).sum()


def full_update(model: nn.Module, loss: Any, batch: Any) -> Tensor:
    full, before = copy.deepcopy(model), flat(model)
    loss(full, batch).backward()
    sgd(full).step()
    return flat(full) - before


def error(model: nn.Module, loss: Any, batch: Any, micro_batch_size: int, **options: Any) -> float:
    """How far the update is from that of the full batch."""
    expected, before = full_update(model, loss, batch), flat(model)
    assert Accumulator(model, sgd(model), loss, micro_batch_size, **options).step(batch).is_applied
    return float((flat(model) - before - expected).norm() / expected.norm())


@every_model
@pytest.mark.parametrize("micro_batch_size", SIZES)
def test_time_major_is_exact(make: type[nn.Module], micro_batch_size: int) -> None:
    options = {"batch_axis": 1, "weight": num_tokens}
    assert error(made(make), loss, ragged(), micro_batch_size, **options) <= 1e-12


@every_model
@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, T - 1])
def test_time_major_cut_on_axis_0_is_wrong(make: type[nn.Module], micro_batch_size: int) -> None:
    """The negative control: step() refuses to cut there, and micro-batches cut there by hand are not exact."""
    with pytest.raises(BatchError, match=r"the batch is cut along time: .*; pass batch_axis=1, or"):
        error(made(make), loss, ragged(), micro_batch_size, weight=num_tokens)
    model = made(make)
    expected, before = full_update(model, loss, ragged()), flat(model)
    Accumulator(model, sgd(model), loss, weight=num_tokens).step(Window(cut(ragged(), micro_batch_size)[0]))
    assert not (flat(model) - before - expected).norm() <= 1e-3 * expected.norm()


@pytest.mark.parametrize("num_steps", [1, 3, 7])
def test_as_many_time_steps_as_samples(num_steps: int) -> None:
    """The time axis is by coincidence as long as a micro-batch, or as the batch."""
    options = {"batch_axis": 1, "weight": num_tokens}
    for micro_batch_size in (1, 3):
        assert error(made(Recurrent), loss, ragged(num_steps), micro_batch_size, **options) <= 1e-12


@pytest.mark.parametrize(
    "batch_axis",
    [
        1,
        -2,
        {"x": 1, "y": 1, "mask": 1},
        {"x": -2, "y": -1, "mask": -1},
        np.int64(1),
        dict.fromkeys("xy", np.int8(1)) | {"mask": 1},
    ],
)
def test_an_axis_can_be_said_in_several_ways(batch_axis: Any) -> None:
    def turned(model: nn.Module, batch: Any) -> Tensor:
        if batch_axis != -2:
            return loss(model, batch)
        return loss(model, {"x": batch["x"], "mask": batch["mask"][..., 0], "y": batch["y"][..., 0].contiguous()})

    batch = ragged()
    if batch_axis == -2:
        batch = {"x": batch["x"], "y": batch["y"][..., None], "mask": batch["mask"][..., None]}
    weight = {"batch_axis": batch_axis, "weight": num_tokens}
    assert error(made(Recurrent), turned, batch, 3, **weight) <= 1e-12


class Parts(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Data:
    x: Any
    y: Any


def mixed_loss(model: nn.Module, batch: Any) -> Tensor:
    """One label for each sequence, and a prompt that all share."""
    x, y, prompt = batch
    return F.cross_entropy(model(x + prompt[:, None], x.new_ones(x.shape[:2], dtype=torch.bool))[-1], y)


def mixed_batch() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(2)
    return ragged()["x"], torch.randint(CLASSES, (N,)), torch.randn(T, WIDTH, dtype=torch.float64)


@pytest.mark.parametrize("micro_batch_size", SIZES)
def test_axes_that_differ(micro_batch_size: int) -> None:
    model = made(Recurrent)
    assert error(model, mixed_loss, mixed_batch(), micro_batch_size, batch_axis=(1, 0, None)) <= 1e-12


X, Y = torch.arange(T * N).reshape(T, N), torch.arange(N)


@pytest.mark.parametrize(
    ("batch", "batch_axis"),
    [
        ((X, Y), (1, 0)),
        ([X, Y], (1, 0)),
        ([X, Y], [1, 0]),
        ({"x": X, "y": Y}, {"x": 1}),
        ({"x": X, "y": Y}, {"x": -1, "y": -1}),
        ({"in": (X, X), "y": {"a": Y, "b": Y}}, {"in": 1, "y": 0}),
        ({"in": (X, Y.float()), "y": Y}, {"in": (1, 0)}),
        (Parts(X, Y), (1, 0)),
        (Parts(X, Y), {"x": 1}),
        (Data(X, Y), {"x": 1}),
        ((X, X, torch.tensor(3.0), "name"), 1),
        ((X, Y, torch.ones(3)), (1, 0, None)),
        ((X, [torch.ones(3)] * 4), (1, None)),
    ],
)
def test_cuts_like_slices_by_hand(batch: Any, batch_axis: Any) -> None:
    for micro_batch_size in SIZES:
        micro_batches, sizes = cut(batch, micro_batch_size, batch_axis)
        assert sum(sizes) == N == batch_size(batch, batch_axis=batch_axis)
        start = 0
        for micro_batch, size in zip(micro_batches, sizes, strict=True):
            assert type(micro_batch) is type(batch)
            for part, tensor in zip(tensors(micro_batch), tensors(batch), strict=True):
                if tensor.shape == X.shape:
                    assert torch.equal(part, tensor[:, start : start + size])
                    assert part.is_contiguous()
                else:
                    assert torch.equal(part, tensor[start : start + size] if tensor.shape == Y.shape else tensor)
            start += size


def test_gradients_reach_the_batch_and_sparse_tensors_are_cut() -> None:
    x = torch.randn(T, N, requires_grad=True)
    for part, sparse in cut((x, X.to_sparse()), 3, 1)[0]:
        (part**2).sum().backward()
        assert sparse.shape == part.shape
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * x)


@pytest.mark.parametrize(
    ("batch", "batch_axis", "message"),
    [
        ((X, Y), 1, r"batch\[1\] has 1 axis, so none with the number 1: .*for example batch_axis=\(1, 0\), None"),
        ({"x": X, "y": Y}, 1, r"batch\['y'\] has 1 axis, .*batch_axis=\{'x': 1, 'y': 0\}"),
        ((X, Y), -2, r"batch\[1\] has 1 axis, so none with the number -1"),
        ((X, torch.ones(4)), 1, r"batch_axis=\(1, None\)"),
        ((X, X[:, :5]), 1, r"batch\[0\] has 7 samples along axis 1 but batch\[1\] has 5 along axis 1: all tensors of"),
        ((X, Y), 0, r"batch\[0\] has 9 samples but batch\[1\] has 7: .*for example batch_axis=\(1, 0\), None for one"),
        ((X, Y[:5]), 0, r"batch\[0\] has 9 samples but batch\[1\] has 5: .*has the samples, None for one"),
        ((X, Y), (1,), r"batch_axis is a tuple of 1 for batch, which is a tuple of 2"),
        ({"x": X}, (1,), r"batch_axis is a tuple of 1 for batch, which is a dict of 1"),
        ((X, Y), {"x": 1}, r"batch_axis names 'x', but batch has 0, 1"),
        ({"x": X, "y": Y}, {"z": 1}, r"batch_axis names 'z', but batch has 'x', 'y'"),
        (X, (1, 0), r"batch_axis is a tuple for batch, which is a Tensor: pass one number"),
        ((X, Y), (None, None), "no tensor with a batch axis"),
        ((X[:, :0], Y[:0]), (1, 0), r"batch\[0\] has 0 samples"),
    ],
)
def test_axes_that_do_not_fit_are_refused(batch: Any, batch_axis: Any, message: str) -> None:
    with pytest.raises(BatchError, match=message) as caught:
        cut(batch, 3, batch_axis)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("bad", [True, None, 1.0, "1", (1, "0"), {"x": 1.5}, [(True,)]])
def test_what_is_no_axis_is_refused(bad: Any) -> None:
    model = made(Recurrent)
    with pytest.raises(OptionError, match=r"batch_axis is .*: pass a whole number, or for each tensor its own"):
        Accumulator(model, sgd(model), loss, 2, batch_axis=bad)


def test_a_list_is_no_longer_doubtful_if_its_axes_are_said() -> None:
    views = [torch.randn(6, 4) for _ in range(3)]
    with pytest.raises(
        BatchError, match=r'cut="list" in the first case, and tuple\(batch\) in the second \(default_co'
    ):
        cut(views, 2)
    assert cut(views, 2, [0, 0, 0])[1] == [2, 2, 2]
    assert cut(views, 2, 1)[1] == [2, 2]
    with pytest.raises(BatchError, match=r"the batch\['views'\] is a list of 6 items of one shape, \(6, 4\)"):
        cut({"views": views * 2, "y": torch.arange(6)}, 2)
    assert cut({"views": views * 2, "y": torch.arange(6)}, 2, {"views": 0})[1] == [2, 2, 2]


def test_suggestions() -> None:
    batch = {"x": X, "more": (Y, torch.tensor(1.0)), "name": "a"}
    assert suggested_axes(batch, N, first=1) == {"x": 1, "more": 0}
    assert suggested_axes((X, [X, "a"]), N, first=1) == 1
    assert suggested_axes(Parts(X, Y), N) == {"x": 1, "y": 0}
    assert suggested_axes(Data(X, torch.ones(3)), N) == {"x": 1, "y": None}
    assert [axis for *_, axis in axes(batch, {"x": 1})] == [1, 0, None, None]
    assert is_empty((X[:, :0], torch.ones(3)), (1, None))
    assert not is_empty((X, torch.ones(3)), (1, None))


# --- the rest of the accumulator -------------------------------------------------------------------------


def test_windows_count_along_the_axis() -> None:
    """Without `weight`, a micro-batch counts by its number of samples, and not by its number of time steps."""

    def mean(model: nn.Module, batch: Any) -> Tensor:
        return model(batch["x"], batch["mask"])[-1].square().mean()

    micro_batches = cut(ragged(), 3, 1)[0]
    uneven = [{name: tensor[k:] for name, tensor in part.items()} for k, part in enumerate(micro_batches)]
    expected, model = 0, made(Recurrent)
    for part, size in zip(uneven, (3, 3, 1), strict=True):
        expected = expected + size / N * full_update(model, mean, part)
    before = flat(model)
    step = Accumulator(model, sgd(model), mean, batch_axis=1).step(Window(uneven))
    assert step.weight == N
    assert (flat(model) - before - expected).norm() <= 1e-12 * expected.norm()
    with pytest.warns(BigBatchWarning, match="by their leading axis, which is time: .*; pass batch_axis=1"):
        Accumulator(model, sgd(model), mean).step(Window(uneven))


def test_train_with_accumulation() -> None:
    found = []
    for options in ({"micro_batch_size": 2, "batch_axis": 1}, {"micro_batch_size": N, "batch_axis": 1}):
        model = made(Recurrent)
        history = train_with_accumulation(model, [ragged()], sgd(model), loss, epochs=3, weight=num_tokens, **options)
        found.append((flat(model), history.losses))
    (ours, losses), (full, full_losses) = found
    assert (ours - full).norm() <= 1e-12 * full.norm()
    assert losses == pytest.approx(full_losses, rel=1e-12)
    model = made(Recurrent)
    stream = windows(cut(ragged(), 2, 1)[0], 4)
    train_with_accumulation(model, stream.iterable, sgd(model), loss, 4, epochs=3, weight=num_tokens, batch_axis=1)
    assert (flat(model) - full).norm() <= 1e-12 * full.norm()


@pytest.mark.parametrize("micro_batch_size", SIZES)
def test_aux_has_a_row_for_each_sample(micro_batch_size: int) -> None:
    def with_rows(model: nn.Module, batch: Any) -> Any:
        logits = model(batch["x"], batch["mask"])
        return loss(model, batch), {"last": logits[-1], "num": batch["mask"].sum()}

    model = made(Recurrent)
    expected = with_rows(model, ragged())[1]
    options: dict[str, Any] = {"batch_axis": 1, "weight": num_tokens, "has_aux": True}
    step = Accumulator(model, sgd(model), with_rows, micro_batch_size, **options).step(ragged())
    torch.testing.assert_close(step.aux["last"], expected["last"].detach(), rtol=1e-12, atol=1e-12)
    assert step.aux["num"] == LENGTHS.sum()


def test_batch_axis_can_be_changed_between_steps() -> None:
    model = made(Recurrent)
    accumulator = Accumulator(model, sgd(model), loss, 2, weight=num_tokens, batch_axis=1)
    accumulator.batch_axis = {"x": 1, "y": 1, "mask": 1}
    assert accumulator.step(ragged()).num_micro_batches == 4
    assert accumulator.batch_axis == {"x": 1, "y": 1, "mask": 1}


def test_samples_first_with_batch_axis_1_is_refused() -> None:
    """The layer shows it: its time steps are as many as the micro-batch has samples."""
    batch = {name: tensor.transpose(0, 1).contiguous() for name, tensor in ragged().items()}
    model = made(Recurrent, batch_first=True)
    message = (
        r"a micro-batch of 2 samples by batch_axis=1 reaches mix \(LSTM with batch_first=True\) as 2 time steps of 7 "
        "samples; pass batch_axis=0"
    )
    with pytest.raises(BatchError, match=message):
        Accumulator(model, sgd(model), loss, 2, batch_axis=1).step(batch)

    def turned(model: nn.Module, batch: Any) -> Tensor:
        return loss(model, {name: tensor.transpose(0, 1).contiguous() for name, tensor in batch.items()})

    for size in (3, T):  # the model takes samples first, the batch comes time-major, and that is right
        assert error(copy.deepcopy(model), turned, ragged(), size, batch_axis=1, weight=num_tokens) <= 1e-12


# --- verify ----------------------------------------------------------------------------------------------


@every_model
def test_verify_finds_the_axis(make: type[nn.Module]) -> None:
    model = made(make)
    for size in SIZES:
        assert verify(model, ragged(), loss, size, weight=num_tokens, batch_axis=1)
    found = verify(model, ragged(), loss, 3, weight=num_tokens)
    assert not found
    assert "this looks time-major: pass batch_axis=1" in str(found)


class Cumulative(nn.Module):
    """Mixes along one axis without a layer that shows which one."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.first, self.head, self.axis = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES), axis

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x).cumsum(self.axis).tanh())


@pytest.mark.parametrize(
    ("axis", "looks"), [(0, "time-major: pass batch_axis=1"), (1, "batch-first: pass batch_axis=0")]
)
def test_verify_tries_the_other_axis(axis: int, looks: str) -> None:
    def mean(model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])

    torch.manual_seed(3)
    model = Cumulative(axis).double()
    batch = (torch.randn(8, 6, WIDTH).double(), torch.randn(8, 6, CLASSES).double())
    found = verify(model, batch, mean, 2, batch_axis=axis)
    assert not found
    assert f"this looks {looks}" in str(found)
    assert verify(model, batch, mean, 2, batch_axis=1 - axis)
    assert verify(model, batch, mean, 2, batch_axis=(1 - axis, 1 - axis))


def test_verify_suggests_axes_that_differ() -> None:
    """As many time steps as samples, so that axis 0 of all tensors has one size."""

    def last(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch[0])[-1].sum(-1) - batch[1]).square().mean()

    torch.manual_seed(4)
    model, batch = Cumulative(0).double(), (torch.randn(6, 6, WIDTH).double(), torch.randn(6).double())
    found = verify(model, batch, last, 1)  # broadcast
    assert not found
    assert "pass batch_axis=(1, 0)" in str(found)
    assert verify(model, batch, last, 2, batch_axis=(1, 0))


def test_verify_with_dropout() -> None:
    """The masks of the whole batch are cut along the axis of the samples."""
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(0.5), nn.Linear(8, CLASSES)).double()
    batch = (ragged()["x"], torch.randn(T, N, CLASSES).double())
    found = verify(model, batch, lambda model, batch: F.mse_loss(model(batch[0]), batch[1]), 2, batch_axis=1)
    assert found
    assert "compared with the same masks" in str(found)
