"""The update over ranks is that of one process with the whole batch, however the ranks share it."""

from typing import Any

import pytest

from .shared import DDP, FSDP, Work, error_of, train_together, train_whole

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")


def by_rank(size: int, *shares: Any) -> list[Any]:
    """Repeats the given shares until every rank has one."""
    return [shares[rank % len(shares)] for rank in range(size)]


def works(size: int) -> dict[str, Work]:
    long, short = (60, 55, 60, 58, 60), (3, 2, 4, 3, 3)  # 20 times as many tokens
    return {
        "even": Work("samples", [by_rank(size, 16), by_rank(size, 16)]),
        "16 against 5": Work("samples", [by_rank(size, 16, 5), by_rank(size, 5, 16)]),
        "different numbers of micro-batches": Work("samples", [by_rank(size, 4, 13), by_rank(size, 21, 2)]),
        "a rank with none": Work("samples", [by_rank(size, 9, 0), by_rank(size, 9, 6), by_rank(size, 0, 9)]),
        "tokens, 20 times as many": Work("tokens", [by_rank(size, long, short), by_rank(size, short, long)]),
        "two terms": Work("terms", [by_rank(size, (3, 60), (17, 40, 5, 9, 8)), by_rank(size, (1,), (30, 2))]),
        "clipped": Work("samples", [by_rank(size, 16, 5)], clip_norm=0.1),
    }


NAMES = list(works(2))


def check(name: str, size: int, wrap: str, way: str) -> None:
    work = works(size)[name]
    expected, losses = train_whole(work)
    update, steps = train_together(work, wrap, way)
    assert error_of(update, expected) <= 1e-12
    assert [step.loss for step in steps] == pytest.approx(losses, rel=1e-12)
    assert all(step.is_applied for step in steps)


@pytest.mark.parametrize("way", ["batch", "micro_batch"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wrap", DDP)
def test_data_parallel(name: str, size: int, wrap: str, way: str) -> None:
    check(name, size, wrap, way)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wrap", ["ddp", "fsdp, window"])
def test_windows(name: str, size: int, wrap: str) -> None:
    check(name, size, wrap, "window")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wrap", FSDP)
def test_sharded(name: str, size: int, wrap: str) -> None:
    check(name, size, wrap, "batch")


@pytest.mark.parametrize("name", ["even", "tokens, 20 times as many"])
@pytest.mark.parametrize("wrap", FSDP)
def test_sharded_one_micro_batch_at_a_time(name: str, size: int, wrap: str) -> None:
    check(name, size, wrap, "micro_batch")
