"""Several processes of PyTorch that train one model."""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import default_convert

from ...core.errors import BatchError, OptionError, RankError, StateError
from ...torch import batch as nest
from ..run.ranks import Ranks


class TorchRanks(Ranks):
    """Every rank goes through the same batches and takes its share of each."""

    def join(self, device: torch.device) -> torch.device:
        if device == torch.device("cuda"):
            if self.local_rank >= (num := torch.cuda.device_count()):
                raise OptionError(
                    f"torchrun started more processes than the {num} GPUs that are here: pass --nproc-per-node {num}, "
                    "or --device cpu"
                )
            device = torch.device("cuda", self.local_rank)
        elif device.type == "cuda":
            raise OptionError(
                f"--device {device} is one GPU for {self.num} processes: leave it out, and each takes a GPU of its own"
            )
        if device.type == "cuda":
            torch.cuda.set_device(device)
        with others_may_end():  # numbers travel over the host, so gloo is always there
            dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        return device

    def together(self, model: nn.Module) -> nn.Module:
        with others_may_end():
            # what a task leaves unused it may leave unused here too; it costs one walk through the graph a step
            return Together(model, find_unused_parameters=True)

    def share(self, batch: Any) -> Any:
        return nest.share(batch, self.rank, self.num)

    @contextmanager
    def own_random(self, seed: int, step: int) -> Iterator[None]:
        """Seeded anew for each step, so nothing has to be saved; batches are drawn from what all have in common."""
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with others_may_end(), torch.random.fork_rng(devices):
            torch.manual_seed(int(np.random.SeedSequence([seed, step, self.rank]).generate_state(1, np.uint64)[0]))
            yield

    def agree(self, is_wanted: bool, *of_all: Any) -> bool:
        mark = zlib.crc32(repr([marks(part) for part in of_all]).encode())
        told = torch.tensor([is_wanted, mark, -mark])
        with others_may_end():
            dist.all_reduce(told, dist.ReduceOp.MAX)
        is_any, largest, smallest = told.tolist()
        if largest != -smallest:
            raise BatchError(
                f"batches() did not give all {self.num} ranks the same batches: give every rank all of the data in the "
                "same order, for example shuffled by seed and epoch; each takes its share of every batch"
            )
        return bool(is_any)

    def check_place(self, num_steps: int) -> None:
        told = torch.tensor([num_steps, -num_steps])
        with others_may_end():
            dist.all_reduce(told, dist.ReduceOp.MAX)
        most, fewest = told.abs().tolist()
        if most != fewest:
            raise StateError(
                f"one rank found a checkpoint of {most} steps and another one of {fewest}: see that all machines see "
                "the same run folder"
            )

    def end(self) -> None:
        self.agree(False)  # nobody leaves while another still hears what was said last
        dist.destroy_process_group()


class Together(DistributedDataParallel):
    """Has all that the model has: a loss may use more of it than its forward pass."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def marks(part: Any) -> Any:
    """A little of everything in a batch, to tell it from others."""
    tensors = [tensor for tensor in nest.tensors(default_convert(part)) if tensor.layout is torch.strided]
    if not tensors:
        return part if isinstance(part, bool) else None
    return [(*tensor.shape, tensor.flatten()[:: 1 + tensor.numel() // 64].tolist()) for tensor in tensors]


@contextmanager
def others_may_end() -> Iterator[None]:
    """What torch says when another rank is gone, as a sentence."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise RankError(f"another rank has ended, so this one cannot go on ({str(error).splitlines()[0]})") from error
