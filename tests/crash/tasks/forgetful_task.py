"""The negative control: a run that goes on with other random numbers than those that were saved."""

import torch

from bigbatch.cli.run.train import Training
from tests.crash.tasks.torch_task import batches, defaults, loss, model, optimizer  # noqa: F401

resume = Training.resume


def resume_forgetfully(training):
    resume(training)
    torch.manual_seed(99)


Training.resume = resume_forgetfully
