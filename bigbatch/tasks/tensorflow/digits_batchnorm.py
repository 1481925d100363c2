"""Handwritten digits with a small convolutional net that has BatchNorm, so accumulation is not exact.

BatchNorm normalises by the statistics of the micro-batch, not of the batch. The net learns as well (98% to 99% of the
held-out digits), but not what it would learn with the full batch.
"""

from bigbatch.tasks.keras.digits_batchnorm import model
from bigbatch.tasks.tensorflow.digits import batches, defaults, evaluate, loss

__all__ = ["batches", "defaults", "evaluate", "loss", "model"]
