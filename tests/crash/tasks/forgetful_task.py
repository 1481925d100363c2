"""The negative control: a run that goes on with other random numbers than those that were saved."""

import torch

from bigbatch.cli.run.checkpoints import RunCheckpoints
from tests.crash.tasks.torch_task import batches, defaults, loss, model, optimizer  # noqa: F401

set_random = RunCheckpoints._set_random


def set_forgetfully(checkpoints, *given):
    set_random(checkpoints, *given)
    torch.manual_seed(99)


RunCheckpoints._set_random = set_forgetfully
