"""Handwritten digits with a small convolutional net that has BatchNorm, so accumulation is not exact.

BatchNorm normalises by what it is fed: the micro-batch, not the batch. That can train as well (98% to 99% of the
held-out digits), but it is another training than that of the full batch.
"""

from bigbatch.tasks.keras.digits_batchnorm import model
from bigbatch.tasks.tensorflow.digits import batches, defaults, evaluate, loss

__all__ = ["batches", "defaults", "evaluate", "loss", "model"]
