"""`micro.skip()`: a micro-batch that is left out of its window."""

import copy
from collections.abc import Iterable

import pytest
import torch
from torch import nn

from bigbatch import OrderError
from bigbatch.torch import Accumulator

from .test_accumulator import assert_exact_step, assert_untouched, loss, make, make_batch, snapshot

SIZES = (3, 1, 4, 2, 1)


def parts():
    """Five micro-batches of other sizes; the second and the last have a loss of NaN."""
    x, y = make_batch()
    x = x.clone()
    x[3] = torch.nan
    x[10] = torch.nan
    return list(zip(x.split(SIZES), y.split(SIZES), strict=True))


def feed(accumulator: Accumulator, batch, *, counts_skipped: bool = False):
    with accumulator.micro_batch(weight=len(batch[1])) as micro:
        value = loss(accumulator.model, batch)
        if value.isfinite():
            micro.backward(value)
        elif counts_skipped:  # what one does without skip()
            micro.backward(0 * sum(p.sum() for p in accumulator.model.parameters()))
        else:
            micro.skip()
    return micro.step


def full_norm(model: nn.Module, samples: Iterable[int] = (0, 1, 2, 4, 5, 6, 7, 8, 9)) -> torch.Tensor:
    """The norm of the gradient of these samples in one pass."""
    x, y = make_batch()
    gradients = torch.autograd.grad(loss(model, (x[[*samples]], y[[*samples]])), [*model.parameters()])
    return torch.linalg.vector_norm(torch.cat([g.flatten() for g in gradients]))


def test_the_step_is_that_of_the_others() -> None:
    accumulator = make(accumulation_steps=3)
    norm = full_norm(accumulator.model).item()
    made = [feed(accumulator, part) for part in parts()]
    assert [step is not None for step in made] == [False, False, False, True, False]  # the third that was fed
    assert made[3].weight == 9
    assert made[3].num_micro_batches == 3
    assert made[3].grad_norm == pytest.approx(norm, rel=1e-12)
    assert accumulator.num_fed == 0
    assert accumulator.flush() is None


def test_a_loss_of_zero_instead_is_another_gradient() -> None:
    """The negative control: the weight of the micro-batch still counts."""
    accumulator = make(accumulation_steps=5)
    norm = full_norm(accumulator.model).item()
    steps = [feed(accumulator, part, counts_skipped=True) for part in parts()]
    assert steps[-1].grad_norm == pytest.approx(norm * 9 / 11, rel=1e-12)


def test_a_window_of_skipped_micro_batches_makes_no_step() -> None:
    accumulator = make(accumulation_steps=2)
    before = snapshot(accumulator)
    for _ in range(4):
        assert feed(accumulator, parts()[1]) is None
    assert accumulator.flush() is None
    assert accumulator.num_steps == 0
    assert_untouched(accumulator, before)


def test_a_skipped_micro_batch_may_have_any_weight_and_leaves_no_reference() -> None:
    accumulator = make(accumulation_steps=2)
    with accumulator.micro_batch(weight=1e300) as micro:
        micro.skip()
    norm = full_norm(accumulator.model, range(11)).item()
    for part in zip(*(t.split([7, 4]) for t in make_batch()), strict=True):
        step = feed(accumulator, part)
    assert step.grad_norm == pytest.approx(norm, rel=1e-12)


def test_a_skipped_micro_batch_opens_no_window() -> None:
    accumulator = make(accumulation_steps=2)
    with accumulator.micro_batch(weight=(1, 2)) as micro:  # of a loss with two terms
        micro.skip()
    assert_exact_step(accumulator)
    with accumulator.micro_batch(weight=(1, 2)) as micro:
        micro.skip()
    feed(accumulator, make_batch())
    assert accumulator.flush().weight == 11


def test_random_numbers_that_were_drawn_stay_drawn() -> None:
    accumulator = make(accumulation_steps=2)
    torch.manual_seed(3)
    with accumulator.micro_batch(weight=1) as micro:
        first = torch.rand(())
        micro.skip()
    second = torch.rand(())
    torch.manual_seed(3)
    assert torch.equal(torch.rand(2), torch.stack([first, second]))


@pytest.mark.filterwarnings("ignore::bigbatch.BigBatchWarning")
@pytest.mark.parametrize("place", [0, 1, 3])
def test_running_statistics_leave_it_out(place: int) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 4)).double()
    x, y = torch.randn(9, 6, dtype=torch.float64), torch.randint(0, 4, (9,))
    found = []
    for skips in (False, True):
        model = copy.deepcopy(plain)
        accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), 0.1), accumulation_steps=100)

        def skip(accumulator: Accumulator = accumulator) -> None:
            with accumulator.micro_batch(weight=3) as micro:
                accumulator.model(100 * x)
                micro.skip()

        for number, (a, b) in enumerate(zip(x.split(3), y.split(3), strict=True)):
            if skips and place == number:
                skip()
            with accumulator.micro_batch(weight=3) as micro:
                micro.backward(nn.functional.cross_entropy(model(a), b))
        if skips and place == 3:
            skip()
        accumulator.flush()
        found.append(model[0].running_var)
    assert torch.equal(*found)


def test_after_backward_it_is_refused() -> None:
    accumulator = make(accumulation_steps=2)
    with (
        pytest.raises(OrderError, match=r"micro\.skip was called after micro\.backward"),
        accumulator.micro_batch(weight=11) as micro,
    ):
        micro.backward(loss(accumulator.model, make_batch()))
        micro.skip()
    assert accumulator.num_fed == 0  # as after any error behind backward


def test_backward_after_it_is_refused_and_the_window_stays() -> None:
    accumulator = make(accumulation_steps=2)
    feed(accumulator, make_batch())
    with (
        pytest.raises(OrderError, match=r"micro\.backward was called after micro\.skip\(\)"),
        accumulator.micro_batch(weight=11) as micro,
    ):
        micro.skip()
        micro.backward(loss(accumulator.model, make_batch()))
    assert accumulator.num_fed == 1
    assert feed(accumulator, make_batch()).num_micro_batches == 2


def test_after_its_block_it_is_refused() -> None:
    accumulator = make(accumulation_steps=2)
    feed(accumulator, make_batch())
    with accumulator.micro_batch(weight=11) as micro:
        micro.skip()
        micro.skip()  # twice is once
    with pytest.raises(OrderError, match="after its block"):
        micro.skip()
