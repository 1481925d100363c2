"""States that all ranks save with torch.distributed.checkpoint, also in the middle of a window, and load again."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from bigbatch import StateError
from bigbatch.torch import Accumulator
from tests.torch.training import make_model

from .shared import Work, error_of, whole, wrapped

STEPS = 3
KINDS = ["ddp", "fsdp, micro_batch"]


class Run:
    """Windows of two micro-batches with different sizes on every rank; momentum and a scaler."""

    def __init__(self, wrap: str, size: int) -> None:
        self.work = Work("samples", [[8 + 2 * each for each in range(size)]] * 3)
        self.model, how = wrapped(make_model(self.work.problem), wrap)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
        self.accumulator = Accumulator(self.model, self.optimizer, accumulation_steps=2, scaler=scaler, **how)

    def feed(self, first: int, last: int) -> None:
        """Feeds the micro-batches first to last; a batch has two of them."""
        for number in range(first, last):
            batch = self.work.own(dist.get_rank())[number // 2]
            assert batch is not None
            half = len(batch["y"]) // 2
            x, y = (batch[name].split(half)[number % 2] for name in "xy")
            with self.accumulator.micro_batch(weight=len(y)) as micro:
                micro.backward(F.cross_entropy(self.model(x), y))

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "accumulator": self.accumulator.state_dict()}

    def load(self, folder: Path, **options: Any) -> "Run":
        state = self.state()
        dcp.load(state, checkpoint_id=folder, **options)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.accumulator.load_state_dict(state["accumulator"])
        return self


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The same on every rank."""
    found = [tmp_path]
    dist.broadcast_object_list(found)
    return found[0]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # torch.distributed.checkpoint's own
@pytest.mark.parametrize("wrap", KINDS)
@pytest.mark.parametrize("stop", [2, 3])
def test_resumes_bit_for_bit(size: int, folder: Path, wrap: str, stop: int) -> None:
    """With DDP and more than two ranks, up to rounding: in its first step, other buckets add in another order."""
    undisturbed = Run(wrap, size)
    undisturbed.feed(0, 6)
    stopped = Run(wrap, size)
    stopped.feed(0, stop)
    dcp.save(stopped.state(), checkpoint_id=folder)
    resumed = Run(wrap, size).load(folder)
    assert resumed.accumulator.num_steps == 1
    resumed.feed(stop, 6)
    found, expected = whole(resumed.model), whole(undisturbed.model)
    if wrap == "ddp" and size > 2:
        assert error_of(found, expected) < 1e-14
    else:
        assert torch.equal(found, expected)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("wrap", KINDS)
def test_negative_control_without_the_accumulators_state_the_result_differs(size: int, folder: Path, wrap: str) -> None:
    undisturbed = Run(wrap, size)
    undisturbed.feed(0, 4)
    stopped = Run(wrap, size)
    stopped.feed(0, 3)
    state = stopped.state()
    other = Run(wrap, size)
    set_state_dict(other.model, other.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    other.feed(3, 4)
    other.accumulator.flush()
    assert not torch.allclose(whole(other.model), whole(undisturbed.model))


def save_with_other_ranks(num_ranks: int, wrap: str, folder: Path) -> None:
    """Rank 0 starts another job with this number of ranks, and all ranks wait for it.

    The job saves after its first step, and in the middle of the next window.
    """
    if dist.get_rank() == 0:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
        plain = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "PYTEST"))}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            plain.pop(name, None)
        subprocess.run([*command, "-m", "tests.ranks.test_state", wrap, str(folder)], check=True, env=plain, timeout=50)
    dist.barrier()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_another_number_of_ranks(size: int, folder: Path) -> None:
    """After a step training continues. In the middle of a window it is refused, and nothing changes."""
    others = 3 if size == 2 else 2
    more = {"planner": DefaultLoadPlanner(allow_partial_load=True)} if size > others else {}
    save_with_other_ranks(others, "ddp", folder)
    resumed = Run("ddp", size).load(folder / "after", **more)
    assert resumed.accumulator.num_steps == 1
    resumed.feed(2, 4)
    assert resumed.accumulator.num_steps == 2
    fresh = Run("ddp", size)
    if dist.get_rank() < others:
        message = f"in the middle of a window by {others} ranks but {size} load it"
        with pytest.raises(StateError, match=message):
            fresh.load(folder / "within", **more)
    else:
        fresh.load(folder / "within", **more)
    assert (fresh.accumulator.num_steps == 0) is (dist.get_rank() < others)


def test_states_of_other_kinds(rank: int, size: int) -> None:
    run = Run("ddp", size)
    run.feed(0, 3)
    state = run.accumulator.state_dict()
    run.accumulator.load_state_dict(state)
    with pytest.raises(StateError, match=f"is that of rank {size} but this is rank {rank}"):
        run.accumulator.load_state_dict({**state, "window": {f"rank {size}": state["window"][f"rank {rank}"]}})
    with pytest.raises(StateError, match=f"by 1 rank but {size} load it"):
        run.accumulator.load_state_dict({"num_steps": 1, "scaler": state["scaler"], "window": {"weights": []}})
    run.accumulator.load_state_dict({"num_steps": 1, "scaler": state["scaler"], "window": None})
    assert run.accumulator.flush() is None


def test_gradients_inside_the_model_are_not_saved(size: int) -> None:
    run = Run("fsdp, window", size)
    run.feed(0, 3)
    with pytest.raises(StateError, match="of 1 micro-batches are inside of the model"):
        run.accumulator.state_dict()
    run.feed(3, 4)
    assert run.accumulator.state_dict()["num_steps"] == 2


if __name__ == "__main__":
    dist.init_process_group("gloo")
    job = Run(sys.argv[1], dist.get_world_size())
    job.feed(0, 2)
    dcp.save(job.state(), checkpoint_id=Path(sys.argv[2]) / "after")
    job.feed(2, 3)
    dcp.save(job.state(), checkpoint_id=Path(sys.argv[2]) / "within")
    dist.barrier()
    os._exit(0)  # gloo aborts if it releases a tensor while Python shuts down (torch 2.13)
