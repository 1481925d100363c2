"""Batches whose leading axis is time are refused if a layer reveals it. Batches of samples are never refused."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from bigbatch import BatchError, BigBatchWarning, Window
from bigbatch.torch import Accumulator
from bigbatch.torch.batch import cut
from bigbatch.torch.time_major import cut_along_time, other_axes

from .training import flat, sgd

T, N, F = 11, 6, 4


def make(layer: nn.Module, **parts: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    model = nn.ModuleDict({"mix": layer, "head": nn.Linear(F, 1), **parts}).double()
    for p in model.parameters():
        nn.init.normal_(p, std=0.5)
    return model


def mixed(layer: Any, x: Tensor) -> Tensor:
    if isinstance(layer, nn.MultiheadAttention):
        return layer(query=x, key=x, value=x)[0]  # type: ignore[no-any-return]
    found = layer(x, x) if isinstance(layer, nn.Transformer) else layer(x)
    return found[0] if isinstance(found, tuple) else found


def loss(model: Any, batch: Any) -> Tensor:
    x, y = batch
    return (model["head"](mixed(model["mix"], x)) - y).square().mean()


def transposed(model: Any, batch: Any) -> Tensor:
    x, y = batch
    return loss(model, (x.transpose(0, 1), y.transpose(0, 1)))


def data(*axes: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(*axes, F, dtype=torch.float64), torch.randn(*axes, 1, dtype=torch.float64)


LAYERS = {
    "LSTM": lambda: nn.LSTM(F, F),
    "GRU": lambda: nn.GRU(F, F, num_layers=2),
    "RNN": lambda: nn.RNN(F, F),
    "attention": lambda: nn.MultiheadAttention(F, 2),
    "encoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(F, 2, 8, dropout=0.0), 2, enable_nested_tensor=False
    ),
    "Transformer": lambda: nn.Transformer(F, 2, 1, 1, 8, dropout=0.0),
}
every_layer = pytest.mark.parametrize("make_layer", LAYERS.values(), ids=LAYERS)
pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")  # of nn.Transformer


def assert_exact(model: nn.Module, loss: Any, batch: Any, micro_batch_size: int) -> None:
    full, before = copy.deepcopy(model), flat(model)
    optimizer = sgd(full)
    loss(full, batch).backward()
    optimizer.step()
    Accumulator(model, sgd(model), loss, micro_batch_size).step(batch)
    assert (flat(model) - flat(full)).norm() <= 1e-12 * (flat(full) - before).norm()


@every_layer
@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, 6, 10])
def test_cut_along_time_is_refused_before_anything_changes(make_layer: Any, micro_batch_size: int) -> None:
    model = make(make_layer())
    before = flat(model)
    accumulator = Accumulator(model, sgd(model), loss, micro_batch_size)
    for _ in range(2):
        with pytest.raises(BatchError, match="the batch is cut along time") as caught:
            accumulator.step(data(T, N))
        assert f"a micro-batch of {micro_batch_size} rows reaches mix" in str(caught.value)
        assert f"{micro_batch_size} time steps of {N} samples; pass batch_axis=1, or" in str(caught.value)
    assert torch.equal(flat(model), before)
    assert all(p.grad is None for p in model.parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert accumulator.step(tuple(t[:micro_batch_size] for t in data(T, N))).is_applied  # one micro-batch: not cut


@every_layer
@pytest.mark.parametrize("num_steps", [1, 3, 4, 5])
def test_samples_first_is_exact_whatever_the_lengths(make_layer: Any, num_steps: int) -> None:
    """With 4 time steps, the time axis of the layer is by coincidence as long as a micro-batch."""
    for micro_batch_size in (1, 3, 4):
        assert_exact(make(make_layer()), transposed, data(7, num_steps), micro_batch_size)


@pytest.mark.parametrize("batch_first", [True, False])
def test_two_axes_are_one_sequence(batch_first: bool) -> None:
    model = make(nn.LSTM(F, F, batch_first=batch_first))
    with pytest.raises(BatchError, match=r"4 rows reaches mix .* as 4 time steps of one sequence; give the layer"):
        Accumulator(model, sgd(model), loss, 4).step(data(T))


def test_samples_first_for_a_time_major_layer() -> None:
    """A common mistake: the layer then runs over the samples and couples them."""
    model = make(nn.GRU(F, F))
    with pytest.raises(BatchError, match="or batch_first=True to the layer if the samples are first already"):
        Accumulator(model, sgd(model), loss, 3).step(data(N, T))


def test_sequence_outside_the_batch_may_be_as_long_as_a_micro_batch() -> None:
    """The sequence is a prompt that an LSTM encodes, as in prompt tuning."""
    model: Any = make(nn.LSTM(F, F), prompt=nn.Embedding(4, F))

    def prompted(model: Any, batch: Any) -> Tensor:
        x, y = batch
        prompt = model["mix"](model["prompt"].weight)[0].mean(0)
        other = model["mix"](model["prompt"].weight[:, None])[0].mean((0, 1))
        return (model["head"](x + prompt + other) - y).square().mean()

    assert_exact(model, prompted, data(7), 4)


def test_second_run_leaves_no_trace() -> None:
    """The lengths agree by coincidence, so the first micro-batch runs twice, which changes no state."""
    model: Any = make(nn.LSTM(F, F, 2, dropout=0.5), norm=nn.BatchNorm1d(4, momentum=None))
    twin = copy.deepcopy(model)
    calls = []

    def popping(model: Any, batch: Any) -> Tensor:
        calls.append(len(batch["x"]))
        return transposed(model, (model["norm"](batch.pop("x")), batch.pop("y")))

    x, y = data(8, 4)
    torch.manual_seed(2)
    with pytest.warns(BigBatchWarning, match="BatchNorm"):
        accumulator = Accumulator(model, sgd(model), popping, 4, batch_norm="micro_batch")
        accumulator.step({"x": x, "y": y})
    assert calls == [4, 3, 4]
    torch.manual_seed(2)
    for part in (slice(0, 4), slice(4, 8)):
        (popping(twin, {"x": x[part], "y": y[part]}) / 2).backward()
    sgd(twin).step()
    assert (flat(model) - flat(twin)).norm() <= 1e-12 * flat(twin).norm()
    assert torch.equal(model["norm"].running_mean, twin["norm"].running_mean)
    accumulator.step({"x": x, "y": y})
    assert calls[5:] == [4, 4]  # only the first window runs twice


def test_windows_that_count_time() -> None:
    model = make(nn.LSTM(F, F))
    window = Window([data(T, N), data(T - 2, N - 2)])
    with pytest.warns(BigBatchWarning, match=rf"one of {T} rows reaches mix .* as {T} time steps of {N} samples"):
        Accumulator(model, sgd(model), loss, weight=None).step(window)
    Accumulator(model, sgd(model), loss, weight=lambda batch: batch[0].size(1)).step(window)
    Accumulator(model, sgd(model), loss).step(Window([data(T, N)] * 2))  # the same weight, whatever is counted
    Accumulator(model, sgd(model), transposed).step(window)


def packed(model: Any, batch: Any) -> Tensor:
    x, y, mask = batch
    lengths = mask.sum(0).clamp(min=1).to(torch.int64)
    mixed = model["mix"](pack_padded_sequence(x, lengths, enforce_sorted=False))[0]
    error = (model["head"](pad_packed_sequence(mixed, total_length=len(x))[0]) - y).square().squeeze(-1)
    return (error * mask).sum() / mask.sum()


@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, N - 1])
@pytest.mark.parametrize("is_batch_first", [False, True])
def test_packed_sequences(is_batch_first: bool, micro_batch_size: int) -> None:
    """Packing hides the leading axis. The batch is refused if it was time, and exact if it was the samples."""
    model = make(nn.LSTM(F, F, batch_first=is_batch_first))
    lengths = torch.tensor([T, 2, 1, 5, T, 3])
    mask = (torch.arange(T)[:, None] < lengths).double()
    batch = (*data(T, N), mask)
    with pytest.raises(BatchError, match=rf"reaches mix \(LSTM, packed\) as {micro_batch_size} time steps"):
        Accumulator(model, sgd(model), packed, micro_batch_size, weight=lambda batch: batch[2].sum()).step(batch)
    full = copy.deepcopy(model)
    packed(full, batch).backward()
    sgd(full).step()
    turned = tuple(part.transpose(0, 1) for part in batch)
    Accumulator(
        model,
        sgd(model),
        lambda model, batch: packed(model, tuple(part.transpose(0, 1) for part in batch)),
        micro_batch_size,
        weight=lambda batch: batch[2].sum(),
    ).step(turned)
    assert (flat(model) - flat(full)).norm() <= 1e-12


def test_for_verify() -> None:
    model = make(nn.LSTM(F, F))
    batch = data(T, N)
    rows = tuple(t[:3] for t in batch)
    assert "cut along time" in str(cut_along_time(lambda rows: loss(model, rows), model, rows))
    assert cut_along_time(lambda rows: transposed(model, rows), model, rows) is None
    (axis,) = other_axes(batch, 0)
    assert axis == 1
    columns, _ = cut(batch, 4, axis)
    assert [x.shape for x, _ in columns] == [(T, 4, F), (T, 2, F)]
    accumulator = Accumulator(model, sgd(model), loss, weight=lambda batch: batch[0].size(1))
    full = copy.deepcopy(model)
    loss(full, batch).backward()
    sgd(full).step()
    accumulator.step(Window(columns))
    assert (flat(model) - flat(full)).norm() <= 1e-12
    assert list(other_axes(torch.ones(3), 0)) == []
    assert list(other_axes((torch.ones(3, 4), torch.ones(3, 5)), 0)) == []
    assert list(other_axes((torch.ones(4, 3, 2), torch.ones(3)), (0, None))) == [(1, 0)]
    assert list(other_axes(batch, 1)) == [0]
