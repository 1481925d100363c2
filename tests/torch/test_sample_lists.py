"""Lists of samples of the same shape: refused where the loss shows it, not where the items are `[x, y]` or views."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from bigbatch import BatchError, BigBatchWarning, Window
from bigbatch.torch import Accumulator

from .training import flat, sgd

NUM, T, FEATURES = 5, 6, 4


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.head = nn.GRU(FEATURES, 5, batch_first=True), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mix(x)[1][0])  # type: ignore[no-any-return]


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm, self.head = nn.Conv1d(FEATURES, 5, 3), nn.BatchNorm1d(5), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.norm(self.mix(F.pad(x.transpose(1, 2), (1, 1))))
        return self.head(F.dropout(mixed, 0.5, self.training).tanh().mean(2))  # type: ignore[no-any-return]


def made(make_model: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make_model().double()


def sequences(num: int = NUM) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(T, FEATURES, dtype=torch.float64) for _ in range(num)]


def stacked(model: nn.Module, batch: Any) -> Tensor:
    return model(torch.stack(tuple(batch))).square().mean()  # type: ignore[no-any-return]


def padded(model: nn.Module, batch: Any) -> Tensor:
    return model(pad_sequence(batch, batch_first=True)).square().mean()  # type: ignore[no-any-return]


def one_by_one(model: nn.Module, batch: Any) -> Tensor:
    return torch.stack([model(x[None]).square().mean() for x in batch]).mean()


def summed(model: nn.Module, batch: Any) -> Tensor:
    return model(torch.stack(tuple(batch))).square().sum()  # type: ignore[no-any-return]


def pairs(model: nn.Module, batch: Any) -> Tensor:
    return torch.stack([(model(x[None]) * y).square().mean() for x, y in batch]).mean()


SAMPLES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "stacked": (sequences(), stacked, {}),
    "padded": (sequences(), padded, {}),
    "one by one": (sequences(), one_by_one, {}),
    "a tuple": (tuple(sequences()), stacked, {}),
    "counted": (sequences(), stacked, {"weight": len}),
    "counted by rows": (sequences(), stacked, {"weight": lambda batch: len(batch[0])}),
    "two": (sequences(2), stacked, {}),
    "sum": (sequences(), summed, {"reduction": "sum"}),
    "pairs": ([(x, x[:, 0]) for x in sequences()], pairs, {}),
    "bf16": (sequences(), stacked, {"precision": "bf16"}),
}


@pytest.mark.filterwarnings("ignore:1 BatchNorm layer")
@pytest.mark.parametrize("make_model", [Recurrent, Convolution])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, T - 1])
@pytest.mark.parametrize("case", SAMPLES)
def test_a_list_of_samples_is_refused(case: str, micro_batch_size: int, make_model: Any) -> None:
    batch, loss, options = SAMPLES[case]
    model = made(make_model)
    if "precision" in options:
        model, batch = model.float(), [x.float() for x in batch]
    before = copy.deepcopy(model.state_dict())
    accumulator = Accumulator(model, sgd(model), loss, micro_batch_size, **options)
    state = torch.get_rng_state()
    for _ in range(2):
        with pytest.raises(BatchError, match=rf"of {len(batch)} items of the same shape.*{T} rows of each.*stack"):
            accumulator.step(batch)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert all(torch.equal(now, before[name]) for name, now in model.state_dict().items())


def parted(model: Any, batch: Any) -> Tensor:
    x, y = batch
    return F.mse_loss(model(x), y)


def triplet(model: Any, batch: Any) -> Tensor:
    return F.triplet_margin_loss(*map(model, batch))


def views(model: Any, batch: Any) -> Tensor:
    return torch.stack([model(view).square().mean() for view in batch]).mean()


def noisy(model: Any, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0] + torch.randn_like(batch[0])), batch[-1])


def rows(num: int) -> list[Tensor]:
    torch.manual_seed(2)
    return [torch.randn(7, FEATURES, dtype=torch.float64) for _ in range(num)]


FIELDS: dict[str, tuple[Any, Any]] = {
    "x and y": (rows(2), parted),
    "a triplet": (rows(3), triplet),
    "views": (rows(4), views),
    "the same tensor": (rows(1) * 2, parted),
}


def autoencoder(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 5), *layers, nn.Tanh(), nn.Linear(5, FEATURES))


@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, 6])
@pytest.mark.parametrize("case", FIELDS)
def test_a_list_of_tensors_with_all_samples_in_each_is_exact(case: str, micro_batch_size: int) -> None:
    batch, loss = FIELDS[case]
    model = made(autoencoder)
    whole = copy.deepcopy(model)
    optimizer = sgd(whole)
    loss(whole, batch).backward()
    optimizer.step()
    Accumulator(model, sgd(model), loss, micro_batch_size).step(batch)
    torch.testing.assert_close(flat(model), flat(whole), rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:1 BatchNorm layer")
@pytest.mark.parametrize(("batch", "loss"), [(rows(4), views), (rows(2), noisy)], ids=["views", "noisy"])
def test_dropout_batch_norm_and_noise_are_no_reason_to_refuse(batch: Any, loss: Any) -> None:
    model = made(lambda: autoencoder(nn.BatchNorm1d(5), nn.Dropout(0.5)))
    assert Accumulator(model, sgd(model), loss, 4).step(batch).is_applied


def test_a_window_of_such_lists_counts_by_their_items() -> None:
    window, model = Window([sequences()[:3], sequences()[3:]]), made(Recurrent)
    other = copy.deepcopy(model)
    with pytest.warns(BigBatchWarning, match="list of 3 items.*counts as 6 samples.*weight=len"):
        Accumulator(other, sgd(other), stacked).step(window)
    whole = copy.deepcopy(model)
    optimizer = sgd(whole)
    stacked(whole, sequences()).backward()
    optimizer.step()
    Accumulator(model, sgd(model), stacked, weight=len).step(window)
    torch.testing.assert_close(flat(model), flat(whole), rtol=0, atol=1e-12)
    assert not torch.allclose(flat(other), flat(whole), rtol=0, atol=1e-4)


def test_an_error_of_the_model_says_that_the_list_was_cut() -> None:
    """Images without a batch axis: cut along their channels, which the model refuses itself."""
    model = nn.Conv2d(3, 2, 3)
    images = [torch.randn(3, 8, 8) for _ in range(4)]
    with pytest.raises(RuntimeError, match="to have 3 channels") as caught:
        Accumulator(model, sgd(model), stacked, 2).step(images)
    assert "list of 4 items of the same shape" in caught.value.__notes__[0]
    assert "stack them" in caught.value.__notes__[0]
