"""bigbatch for TensorFlow."""

from ..core.errors import MissingExtraError

try:
    import tensorflow as _tensorflow  # noqa: F401
except ImportError as error:
    raise MissingExtraError('bigbatch.tensorflow needs TensorFlow: pip install "bigbatch[tensorflow]"') from error

from . import weights
from .accumulator import Accumulator
from .batch_norm import recalibrate
from .checkpoints import Checkpoints
from .train import train_with_accumulation
from .verify.verify import verify

__all__ = ["Accumulator", "Checkpoints", "recalibrate", "train_with_accumulation", "verify", "weights"]
