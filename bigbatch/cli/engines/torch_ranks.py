"""Several PyTorch processes that train one model."""

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
from ..run.ranks import Launch


class TorchLaunch(Launch):
    """Several processes: each draws the same batches and takes its part of every batch."""

    def join(self, device: torch.device) -> torch.device:
        if device == torch.device("cuda"):
            if self.local_rank >= (num := torch.cuda.device_count()):
                raise OptionError(
                    f"torchrun started more processes than this machine has GPUs ({num}): pass --nproc-per-node {num}, "
                    "or --device cpu"
                )
            device = torch.device("cuda", self.local_rank)
        elif device.type == "cuda":
            raise OptionError(
                f"--device {device} is one GPU for {self.num} processes: leave it out, and each takes its own GPU"
            )
        if device.type == "cuda":
            torch.cuda.set_device(device)
        with _report_ended_ranks():  # gloo is always there, because numbers are reduced on the host
            dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        return device

    def wrap(self, model: nn.Module) -> nn.Module:
        with _report_ended_ranks():
            # a task may leave parameters unused; finding them costs one walk through the graph per step
            return _TransparentDDP(model, find_unused_parameters=True)

    def own_part(self, batch: Any) -> Any:
        return nest.part_of_rank(batch, self.rank, self.num)

    @contextmanager
    def own_random(self, seed: int, step: int) -> Iterator[None]:
        """Seeds torch anew in each step, so no random state has to be saved. Batches are drawn outside of it."""
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with _report_ended_ranks(), torch.random.fork_rng(devices):
            torch.manual_seed(int(np.random.SeedSequence([seed, step, self.rank]).generate_state(1, np.uint64)[0]))
            yield

    def agree(self, is_wanted: bool, *of_all: Any) -> bool:
        checksum = zlib.crc32(repr([_sample(part) for part in of_all]).encode())
        is_any, largest, smallest = _largest(is_wanted, checksum, -checksum)
        if largest != -smallest:
            raise BatchError(
                f"batches() did not give all {self.num} ranks the same batches: give every rank all the data in the "
                "same order, for example shuffled by seed and epoch; each rank takes its part of every batch"
            )
        return bool(is_any)

    def check_position(self, num_steps: int) -> None:
        most, fewest = _largest(num_steps, -num_steps)
        if most != -fewest:
            raise StateError(
                f"one rank found a checkpoint of {most} steps and another one of {-fewest}: make sure that all "
                "machines see the same run folder"
            )

    def end(self) -> None:
        self.agree(False)  # no rank leaves while another still waits for the last reduction
        dist.destroy_process_group()


class _TransparentDDP(DistributedDataParallel):
    """DistributedDataParallel with the attributes of the model, because a loss may use more than `model(x)`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def _largest(*numbers: int) -> list[int]:
    """The largest of each number on any rank."""
    found = torch.tensor(numbers)
    with _report_ended_ranks():
        dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.tolist()


def _sample(part: Any) -> Any:
    """A few numbers of every tensor in a batch, to tell it from other batches."""
    tensors = [tensor for tensor in nest.tensors(default_convert(part)) if tensor.layout is torch.strided]
    if not tensors:
        return part if isinstance(part, bool) else None
    return [(*tensor.shape, tensor.flatten()[:: 1 + tensor.numel() // 64].tolist()) for tensor in tensors]


@contextmanager
def _report_ended_ranks() -> Iterator[None]:
    """Raises RankError if torch fails because another rank has ended."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise RankError(
            f"another rank has ended, so this one cannot continue ({str(error).splitlines()[0]})"
        ) from error
