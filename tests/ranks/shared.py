"""A model that all ranks train, each on its part of the batch, and the same model trained on the whole batch."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from bigbatch import Step, Window
from bigbatch.torch import Accumulator
from bigbatch.torch import batch as nest
from tests import problems
from tests.problems import Problem
from tests.torch.training import Batch, flat, make_loss, make_model, make_weight, sgd

MICRO_BATCH_SIZE = 4
NAMES = ("replicate", "shard")


def cpu_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    options.setdefault("mesh", cpu_mesh())
    for child in model.children():
        if list(child.parameters()):
            fully_shard(child, **options)
    return fully_shard(model, **options)


def hybrid(model: nn.Module) -> nn.Module:
    return sharded(model, mesh=init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=NAMES))


DDP = {
    "ddp": DistributedDataParallel,
    "ddp, small buckets": lambda model: DistributedDataParallel(model, bucket_cap_mb=0.001),
    "ddp, unused looked for": lambda model: DistributedDataParallel(model, find_unused_parameters=True),
    "ddp, buckets as views": lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True),
}
FSDP = {
    "fsdp, window": (sharded, "window"),
    "fsdp, micro_batch": (sharded, "micro_batch"),
    "hsdp, window": (hybrid, "window"),
    "hsdp, micro_batch": (hybrid, "micro_batch"),
}
WRAPS: dict[str, tuple[Callable[[nn.Module], nn.Module], dict[str, Any]]] = {
    **{name: (wrap, {}) for name, wrap in DDP.items()},
    **{name: (wrap, {"reduce": reduce}) for name, (wrap, reduce) in FSDP.items()},
}


def wrapped(model: nn.Module, wrap: str) -> tuple[nn.Module, dict[str, Any]]:
    """The model as the ranks share it, and the options of the accumulator for that."""
    shared, options = WRAPS[wrap]
    return shared(model), options


class Work:
    """Steps on batches that are the union of the parts of all ranks."""

    def __init__(self, kind: str, shares: Sequence[Sequence[Any]], clip_norm: float | None = None) -> None:
        """`shares[step][rank]` is the rank's number of samples, or the lengths of its texts for tokens."""
        self.shares = shares
        if kind == "samples":
            batches = problems.samples(*(sum(step) for step in shares))
            self.sizes = [list(step) for step in shares]
        else:
            width = max(length for step in shares for texts in step for length in texts)
            batches = tuple(problems.tokens(*(n for texts in step for n in texts), width=width) for step in shares)
            self.sizes = [[len(texts) for texts in step] for step in shares]
        self.problem = Problem("shared", kind, batches, MICRO_BATCH_SIZE, clip_norm)  # type: ignore[arg-type]
        self.batches = [{name: torch.as_tensor(array) for name, array in batch.items()} for batch in batches]

    def own(self, rank: int) -> list[Batch | None]:
        """This rank's part of every batch; None if it has no data."""
        found: list[Batch | None] = []
        for batch, sizes in zip(self.batches, self.sizes, strict=True):
            start = sum(sizes[:rank])
            part = {name: tensor[start : start + sizes[rank]] for name, tensor in batch.items()}
            found.append(part if sizes[rank] else None)
        return found


def train_whole(work: Work) -> tuple[Tensor, list[float]]:
    """Trains on the plain full batch in one process; returns the update and the losses."""
    model = make_model(work.problem)
    before = flat(model)
    optimizer = sgd(model)
    losses = []
    for batch in work.batches:
        optimizer.zero_grad()
        loss = make_loss(work.problem)(model, batch)
        loss = sum(loss) if isinstance(loss, tuple) else loss
        loss.backward()
        if work.problem.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), work.problem.clip_norm)
        optimizer.step()
        losses.append(loss.item())
    return flat(model) - before, losses


def train_together(work: Work, wrap: str, way: str, **options: Any) -> tuple[Tensor, list[Step]]:
    model = make_model(work.problem)
    before = flat(model)
    if work.problem.kind == "tokens" and wrap != "ddp, unused looked for":
        model.length.requires_grad_(False)  # this loss does not use it
    model, how = wrapped(model, wrap)
    accumulator = Accumulator(
        model,
        sgd(model),
        make_loss(work.problem),
        micro_batch_size=MICRO_BATCH_SIZE,
        accumulation_steps=1000,
        weight=make_weight(work.problem),
        clip_norm=work.problem.clip_norm,
        **how,
        **options,
    )
    steps = [FEED[way](accumulator, part, work) for part in work.own(dist.get_rank())]
    return whole(model) - before, steps


def by_batch(accumulator: Accumulator, batch: Batch | None, work: Work) -> Step:
    return accumulator.step(batch)


def by_window(accumulator: Accumulator, batch: Batch | None, work: Work) -> Step:
    return accumulator.step(Window([] if batch is None else nest.cut(batch, MICRO_BATCH_SIZE)[0]))


def by_micro_batch(accumulator: Accumulator, batch: Batch | None, work: Work) -> Step:
    weigh = make_weight(work.problem) or (lambda micro_batch: len(micro_batch["y"]))
    loss = make_loss(work.problem)
    for micro_batch in [] if batch is None else nest.cut(batch, MICRO_BATCH_SIZE)[0]:
        with accumulator.micro_batch(weight=weigh(micro_batch)) as micro:
            micro.backward(loss(accumulator.model, micro_batch))
    steps = list(accumulator.flushed())
    assert len(steps) == 1
    return steps[0]


FEED = {"batch": by_batch, "window": by_window, "micro_batch": by_micro_batch}


def whole(model: nn.Module) -> Tensor:
    """All parameters, on every rank."""
    found = [p.detach() for p in model.parameters()]
    return torch.cat([(p.full_tensor() if hasattr(p, "full_tensor") else p).flatten() for p in found]).clone()


def error_of(update: Tensor, reference: Tensor) -> float:
    return float((update - reference).norm() / reference.norm())
