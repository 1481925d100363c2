"""bigbatch for PyTorch."""

from ..core.errors import MissingExtraError

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise MissingExtraError('bigbatch.torch needs PyTorch: pip install "bigbatch[torch]"') from error

from . import weights
from .accumulator import Accumulator
from .checkpoints import Checkpoints
from .train import train_with_accumulation
from .verify.verify import verify
from .window import MicroBatch

__all__ = ["Accumulator", "Checkpoints", "MicroBatch", "train_with_accumulation", "verify", "weights"]
