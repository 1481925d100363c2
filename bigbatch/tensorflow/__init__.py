"""bigbatch for TensorFlow."""

from typing import TYPE_CHECKING

from ..core.elsewhere import elsewhere as _elsewhere
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

if not TYPE_CHECKING:  # or a type checker would take any name to be there
    __getattr__ = _elsewhere(
        __name__,
        {
            "accumulate": "use Accumulator(model, optimizer, loss); for model.fit use bigbatch.keras.accumulate",
            "value_and_grad": "use Accumulator(…).gradients(batch)",
            "multi_steps": "use Accumulator(model, optimizer, accumulation_steps=…) and its micro_batch()",
        },
    )
