"""Negative controls: other tools on ranks that share a batch unevenly."""

import pytest
import torch
from torch import Tensor, nn

from tests.torch.training import flat, make_loss, make_model, sgd

from .shared import Work, error_of, train_together, train_whole

LONG, SHORT = (60, 55, 60, 58), (3, 2, 4, 3)


def with_accelerate(work: Work, rank: int, num_micro_batches: int) -> Tensor:
    """The loop of its documentation. Every rank has equally many micro-batches, because otherwise it would hang."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=num_micro_batches)
    plain = make_model(work.problem)
    if work.problem.kind == "tokens":
        plain.length.requires_grad_(False)
    before = flat(plain)
    model: nn.Module
    model, optimizer = accelerator.prepare(plain, sgd(plain))
    loss = make_loss(work.problem)
    for batch in work.own(rank):
        assert batch is not None
        for k in range(num_micro_batches):
            micro_batch = {name: tensor.tensor_split(num_micro_batches)[k] for name, tensor in batch.items()}
            with accelerator.accumulate(model):
                accelerator.backward(loss(model, micro_batch))
                optimizer.step()
                optimizer.zero_grad()
    return flat(plain) - before


@pytest.mark.parametrize(("name", "least"), [("even", None), ("16 against 5", 0.1), ("tokens, 20 times as many", 0.3)])
@pytest.mark.filterwarnings("ignore")
def test_accelerate(rank: int, size: int, name: str, least: float | None) -> None:
    """accelerate is right for equal ranks, and wrong if sizes or tokens differ, where bigbatch is exact."""
    work = {
        "even": Work("samples", [[16] * size]),
        "16 against 5": Work("samples", [[16 if each % 2 == 0 else 5 for each in range(size)]]),
        "tokens, 20 times as many": Work("tokens", [[LONG if each % 2 == 0 else SHORT for each in range(size)]]),
    }[name]
    expected, _ = train_whole(work)
    error = error_of(with_accelerate(work, rank, 4), expected)
    assert error_of(train_together(work, "ddp", "batch")[0], expected) <= 1e-12
    print(f"accelerate, {name}: {error:.2g} off")
    assert error < 1e-12 if least is None else error > least


def test_the_mean_over_ranks_of_ddp_alone(rank: int, size: int) -> None:
    """DDP gives every rank the same weight, however much it has."""
    work = Work("samples", [[16 if each % 2 == 0 else 5 for each in range(size)]])
    plain = make_model(work.problem)
    before = flat(plain)
    model = nn.parallel.DistributedDataParallel(plain)
    optimizer = sgd(model)
    make_loss(work.problem)(model, work.own(rank)[0]).backward()
    optimizer.step()
    assert error_of(flat(plain) - before, train_whole(work)[0]) > 0.1
    assert torch.isfinite(flat(plain)).all()
