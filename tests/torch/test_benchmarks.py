"""Contestants are timed only if they make the same update."""

import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks import tables
from benchmarks.comparison import Comparison, Found
from benchmarks.contestants import bigbatch_batch, by_hand, full_batch
from benchmarks.growth import Growth, spread
from benchmarks.work import Step, Work


def make_work() -> Work:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    return Work(model, loss, (torch.randn(16, 6), torch.randint(0, 4, (16,))), 4, sgd)


def undivided(model: nn.Module, work: Work) -> Step:
    """Forgets to divide by the number of micro-batches."""
    optimizer = work.optimizer(model)

    def step() -> None:
        for micro_batch in work.micro_batches():
            work.loss(model, micro_batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def test_contestants_with_the_same_update_are_measured() -> None:
    work = make_work()
    ways = {"full": full_batch, "hand": by_hand, "bigbatch": bigbatch_batch}
    found = Comparison({name: (make, work) for name, make in ways.items()}, "hand", rounds=3, warmup=1, steps=2).run()
    assert not found.failed
    assert {name: len(times) for name, times in found.times.items()} == dict.fromkeys(ways, 3)
    assert found.peaks.keys() == found.errors.keys() == ways.keys()
    assert Found.of(found.as_json() | {"about": "more"}) == found


def test_contestant_with_another_update_is_not_timed() -> None:
    work = make_work()
    entries = {"hand": (by_hand, work), "undivided": (undivided, work)}
    found = Comparison(entries, "hand", rounds=2, warmup=0, has_peaks=False).run()
    assert "first update is" in found.failed["undivided"]
    assert found.times.keys() == {"hand"}


def test_a_peer_that_is_not_installed_is_left_out() -> None:
    def absent(model: nn.Module, work: Work) -> Step:
        import no_such_peer  # type: ignore[import-not-found]

        return no_such_peer

    work = make_work()
    found = Comparison({"hand": (by_hand, work), "peer": (absent, work)}, "hand", rounds=2, warmup=0).run()
    assert found.missing.keys() == {"peer"}
    assert not found.failed
    assert found.times.keys() == {"hand"}


def test_cost_of_a_further_micro_batch_excludes_the_fixed_cost() -> None:
    times = {num: [1.0 + 0.5 * num] * 3 for num in (2, 4, 8)}
    growth = Growth("model", "way", times, {2: 100, 4: 100, 8: 101})
    assert growth.further == {4: 0.5, 8: 0.5}
    assert growth.each == {2: 1.0, 4: 0.75, 8: 0.625}
    assert abs(spread(growth.peaks.values()) - 0.01) < 1e-12


def test_commit_notes_a_changed_benchmark_but_not_a_written_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> None:
        who = ("-c", "user.name=x", "-c", "user.email=x@example.org")
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

    folder = tmp_path / "benchmarks"
    folder.mkdir()
    for name in ("overhead.py", "RESULTS.md"):
        (folder / name).write_text("before", encoding="utf-8")
    git("init")
    git("add", ".")
    git("commit", "-m", "all")
    monkeypatch.setattr(tables, "FOLDER", folder)
    (folder / "RESULTS.md").write_text("after", encoding="utf-8")
    assert "changes" not in tables.commit()
    (folder / "overhead.py").write_text("after", encoding="utf-8")
    assert tables.commit().endswith("with changes")
