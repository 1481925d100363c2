"""bigbatch for PyTorch."""

from typing import TYPE_CHECKING

from ..core.elsewhere import elsewhere as _elsewhere
from ..core.errors import MissingExtraError

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise MissingExtraError('bigbatch.torch needs PyTorch: pip install "bigbatch[torch]"') from error

from . import weights
from .accumulator import Accumulator
from .checkpoints import Checkpoints
from .recalibrate import recalibrate
from .train import train_with_accumulation
from .verify.verify import verify
from .window import MicroBatch

__all__ = ["Accumulator", "Checkpoints", "MicroBatch", "recalibrate", "train_with_accumulation", "verify", "weights"]

if not TYPE_CHECKING:  # or a type checker would take any name to be there
    __getattr__ = _elsewhere(
        __name__,
        {
            "accumulate": "use Accumulator(model, optimizer, loss, micro_batch_size)",
            "value_and_grad": "use Accumulator(model, optimizer, loss, micro_batch_size)",
            "multi_steps": "use Accumulator(model, optimizer, accumulation_steps=…) and its micro_batch()",
            "micro_batch": "it is a method, accumulator.micro_batch(weight=…)",
        },
    )
