"""Handwritten digits with a small convolutional net that has BatchNorm, so accumulation is not exact.

BatchNorm normalises by what it is fed: the micro-batch, not the batch. That can train as well (98% to 99% of the
held-out digits), but it is another training than that of the full batch.
"""

from torch import nn

from bigbatch.tasks.torch.digits import batches, defaults, evaluate, loss

__all__ = ["batches", "defaults", "evaluate", "loss", "model"]


def model() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)),
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.GELU(),
        nn.Conv2d(16, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.GELU(),
        nn.Conv2d(16, 32, 3, stride=2, bias=False),
        nn.BatchNorm2d(32),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(3 * 3 * 32, 10),
    )
