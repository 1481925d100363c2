"""Handwritten digits with a small convolutional net that has BatchNorm, so accumulation is not exact.

BatchNorm normalises by the statistics of the micro-batch, not of the batch. The net learns as well (98% to 99% of the
held-out digits), but not what it would learn with the full batch.
"""

from torch import nn

from bigbatch.tasks.torch.digits import batches, defaults, evaluate, loss

__all__ = ["batches", "defaults", "evaluate", "loss", "model"]


def model() -> nn.Module:
    layers: list[nn.Module] = [nn.Unflatten(1, (1, 8))]
    for before, after, stride, padding in ((1, 16, 1, 1), (16, 16, 1, 1), (16, 32, 2, 0)):
        layers += [nn.Conv2d(before, after, 3, stride, padding, bias=False), nn.BatchNorm2d(after), nn.GELU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(3 * 3 * 32, 10))
