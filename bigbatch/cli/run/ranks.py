"""The processes that torchrun launches to train one model together."""

import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

from ...core.errors import OptionError, RankError
from ..task import Task


@dataclass(frozen=True)
class Launch:
    """How the run was launched: as one process. `engines/torch_ranks.py` overrides the methods for several."""

    num: int = 1
    rank: int = 0
    local_rank: int = 0

    @property
    def is_first(self) -> bool:
        """Whether this process writes the run folder and shows the run."""
        return self.rank == 0

    def join(self, device: Any) -> Any:
        """Connects to the other ranks; returns the device of this one."""
        return device

    def wrap(self, model: Any) -> Any:
        """Wraps the model, so that all ranks train it together."""
        return model

    def own_part(self, batch: Any) -> Any:
        """This rank's part of a batch; None if there is none."""
        return batch

    def own_random(self, seed: int, step: int) -> AbstractContextManager[None]:
        """Gives this rank random numbers of its own for a step, as for dropout."""
        return nullcontext()

    def agree(self, is_wanted: bool, *of_all: Any) -> bool:
        """Whether any rank wants it; raises BatchError if `of_all` is not the same on all ranks."""
        return is_wanted

    def check_position(self, num_steps: int) -> None:
        """Raises StateError unless all ranks found the same checkpoint."""

    def end(self) -> None:
        """Disconnects from the other ranks after a successful run."""

    def record(self, error: BaseException) -> None:
        """Writes the error where torchrun looks for the root cause.

        torchrun ends all processes when one ends, so a rank with a later error waits for the rank with the cause.
        """
        if self.num > 1:
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            time.sleep(30.0 if isinstance(error, RankError) else 0.0 if self.is_first else 3.0)
            get_error_handler().record_exception(error)

    def leave(self, code: int) -> None:
        """Ends the process at once if there are others.

        Python would wait for reductions that nobody completes, and gloo could abort.
        """
        if self.num > 1:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def here() -> Launch:
    """How torchrun launched this process, by its environment variables; raises OptionError for values not from it."""
    num, rank, local_rank = (os.environ.get(name) for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"))
    if rank is None and num in (None, "1"):
        return Launch()
    try:
        launch = Launch(int(num or ""), int(rank or ""), int(local_rank or rank or ""))
    except ValueError:
        launch = Launch(0)
    if not 0 <= launch.rank < launch.num or launch.local_rank < 0:
        raise OptionError(
            f"WORLD_SIZE is {num!r} and RANK is {rank!r} in the environment, which torchrun does not set: start with "
            "torchrun, or unset both"
        )
    return Launch() if launch.num == 1 else launch


def launch_of(task: Task) -> Launch:
    """How the task is trained: by this process, or by several that torchrun launched."""
    launch = here()
    if launch.num == 1:
        return launch
    if task.framework != "torch":
        raise OptionError(
            f"torchrun started {launch.num} processes but {task.name} is a task for {task.framework}: "
            "start it without torchrun, which is for PyTorch tasks"
        )
    from ..engines.torch_ranks import TorchLaunch

    return TorchLaunch(**asdict(launch))


def environment_of_one() -> dict[str, str]:
    """The environment for a process that trains alone: without torchrun's variables."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    starts = ("GROUP_", "ROLE_", "TORCHELASTIC_")
    return {name: value for name, value in os.environ.items() if name not in names and not name.startswith(starts)}
