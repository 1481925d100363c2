"""The processes that torchrun starts to train one model together; here the one that is alone."""

import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ...core.errors import OptionError, RankError
from ..task import Task

if TYPE_CHECKING:
    import torch
    from torch import nn

OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
STARTS_OF_TORCHRUN = ("GROUP_", "ROLE_", "TORCHELASTIC_")


@dataclass(frozen=True)
class Ranks:
    """A run of one process, and what is asked of one of several; torch_ranks.py has those."""

    num: int = 1
    rank: int = 0
    local_rank: int = 0

    @property
    def is_first(self) -> bool:
        """Whether this one writes the run folder and shows the run."""
        return self.rank == 0

    def join(self, device: "torch.device") -> "torch.device":
        """Meets the others; returns the device of this rank."""
        return device

    def together(self, model: "nn.Module") -> "nn.Module":
        """The model as all ranks train it."""
        return model

    def share(self, batch: Any) -> Any:
        """The part of a batch that is this rank's; None if there is nothing for it."""
        return batch

    def own_random(self, seed: int, step: int) -> AbstractContextManager[None]:
        """Around a step: its dropout is this rank's own."""
        return nullcontext()

    def agree(self, is_wanted: bool, *of_all: Any) -> bool:
        """Whether any rank wants it; refuses batches that are not the same on all of them."""
        return is_wanted

    def check_place(self, num_steps: int) -> None:
        """Refuses to go on if the ranks have not all found the same checkpoint."""

    def end(self) -> None:
        """Parts with the others when all went well."""

    def let_others_speak(self, error: BaseException | None) -> None:
        """Waits before an error is told: torchrun ends this process if the rank whose error it is ends meanwhile."""
        if self.num > 1:
            time.sleep(10.0 if isinstance(error, RankError) else 0.0 if self.is_first else 3.0)

    def record(self, error: BaseException | None) -> None:
        """Leaves the error where torchrun looks for what it shows as the root cause."""
        if self.num > 1 and error is not None:
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            get_error_handler().record_exception(error)

    def leave(self, code: int) -> None:
        """Ends the process at once if there are others.

        Else Python would wait for reductions that nobody completes, and gloo abort if it lets go of a tensor meanwhile.
        """
        if self.num > 1:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def here() -> Ranks:
    """What torchrun says about this process."""
    num, rank, local_rank = (os.environ.get(name) for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"))
    return Ranks() if num in (None, "1") or rank is None else Ranks(int(num), int(rank), int(local_rank or rank))


def ranks_of(task: Task) -> Ranks:
    """The processes that train the task."""
    found = here()
    if found.num == 1:
        return found
    if task.framework != "torch":
        raise OptionError(
            f"torchrun started {found.num} processes but {task.name} is a task of {task.framework}: "
            "start it without torchrun, which is for tasks of torch"
        )
    from ..engines.torch_ranks import TorchRanks

    return TorchRanks(**asdict(found))


def refuse_several(command: str) -> None:
    """For what one process does."""
    if (num := here().num) > 1:
        raise OptionError(
            f"torchrun started {num} processes but bigbatch {command} needs one: call it without torchrun"
        )


def environment_of_one() -> dict[str, str]:
    """The environment for a process that is to be alone."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in OF_TORCHRUN and not name.startswith(STARTS_OF_TORCHRUN)
    }
