"""BatchNorm in training mode where a batch does not divide into micro-batches."""

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import BatchError, BigBatchWarning
from bigbatch.torch import Accumulator, verify

from .training import sgd

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
    for p, q in zip(model.state_dict().values(), by_hand.state_dict().values(), strict=True):
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
