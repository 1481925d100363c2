"""Ready-made weights on a GPU: exact under capture, fetched together, and a bad label does not end the process."""

import functools
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import WeightError
from bigbatch.torch import Accumulator, weights

from .test_gpu import make_model

pytestmark = pytest.mark.gpu

CLASSES = torch.linspace(0.1, 4, 10)


@functools.cache
def classes() -> Tensor:
    return CLASSES.cuda()


def make_batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(53, 64, generator=generator)
    labels = torch.randint(0, 10, (53,), generator=generator)
    labels[8:20] = -100
    return {"x": x.cuda(), "labels": labels.cuda()}


def weighted_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["labels"], weight=classes())


def per_total(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["labels"].clamp(min=0), reduction="sum") / batch["total"]


def with_total(batch: Any) -> Any:
    return weights.with_total(batch, lambda batch: (batch["labels"] > 0).sum())


def close(model: nn.Module, loss: Any, batch: Any) -> bool:
    """Whether the model is where one plain step on the whole batch leaves it."""
    full = make_model()
    loss(full, batch).backward()
    for a, b in zip(model.parameters(), full.parameters(), strict=True):
        if (a - (b - 0.1 * b.grad)).norm() > 1e-5 * b.grad.norm():
            return False
    return True


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("kind", ["class weights", "total"])
def test_the_update_is_that_of_the_full_batch(kind: str, capture: bool) -> None:
    batch, model = make_batch(), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    if kind == "total":
        batch, loss, options = with_total(batch), per_total, {"reduction": "sum"}
        assert batch["total"].is_cuda
    else:
        loss, options = weighted_loss, {"weight": weights.class_weights(classes())}
    accumulator = Accumulator(model, optimizer, loss, 8, capture=capture, **options)  # type: ignore[arg-type]
    assert accumulator.step(batch).is_applied
    assert close(model, loss, batch)


@pytest.mark.filterwarnings("ignore")  # torch warns about each wait; the warnings are counted
def test_only_the_first_step_looks_at_labels() -> None:
    def waits(**options: Any) -> tuple[int, int]:
        model, batch = make_model(), make_batch()
        accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), weighted_loss, 20, **options)
        return num_waits(accumulator, batch), num_waits(accumulator, batch)

    waits()  # the first call waits more often
    first, second = waits()
    assert waits(weight=lambda batch: len(batch["labels"])) == (first - 1, second)


def num_waits(accumulator: Accumulator, batch: Any) -> int:
    accumulator.settle()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            accumulator.step(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in caught)


@pytest.mark.parametrize("kind", ["tokens", "classes"])
def test_weights_are_fetched_together(kind: str) -> None:
    weight = weights.tokens() if kind == "tokens" else weights.class_weights(classes())

    def waits(size: int) -> int:
        model, batch = make_model(), make_batch()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        accumulator = Accumulator(model, optimizer, weighted_loss, size, weight=weight)
        accumulator.step(batch)
        return num_waits(accumulator, batch)

    assert waits(2) == waits(27) >= 1


def test_a_label_out_of_range_is_refused_and_the_device_lives() -> None:
    model, batch = make_model(), make_batch()
    accumulator = Accumulator(
        model, torch.optim.SGD(model.parameters()), weighted_loss, 8, weight=weights.class_weights(classes()[:9])
    )
    with pytest.raises(WeightError, match=r"the weight of micro-batch \d+ is nan"):
        accumulator.step(batch)
    assert torch.ones(1, device="cuda").item() == 1
