"""Train with the batch you want on the memory you have, and get exactly the same gradient."""

from typing import TYPE_CHECKING

from .core.elsewhere import elsewhere as _elsewhere
from .core.errors import (
    BatchError,
    BigBatchError,
    BigBatchWarning,
    CaptureError,
    GradientError,
    Interrupted,
    LossError,
    MissingExtraError,
    NonFiniteError,
    OptionError,
    OrderError,
    RankError,
    StateError,
    WeightError,
)
from .core.history import History
from .core.step import Step
from .core.tensorboard import TensorBoard
from .core.verify.result import Verification
from .core.window import Window, windows

__version__ = "0.1.0"

__all__ = [
    "BatchError",
    "BigBatchError",
    "BigBatchWarning",
    "CaptureError",
    "GradientError",
    "History",
    "Interrupted",
    "LossError",
    "MissingExtraError",
    "NonFiniteError",
    "OptionError",
    "OrderError",
    "RankError",
    "StateError",
    "Step",
    "TensorBoard",
    "Verification",
    "WeightError",
    "Window",
    "__version__",
    "windows",
]

_HOMES = {
    "Accumulator": "torch or .tensorflow; for Keras use bigbatch.keras.accumulate, for JAX bigbatch.jax.value_and_grad",
    "Checkpoints": "torch, .tensorflow or .jax",
    "MicroBatch": "torch",
    "train_with_accumulation": "torch or .tensorflow",
    "verify": "torch, .tensorflow, .keras or .jax",
    "accumulate": "keras",
    "value_and_grad": "jax",
    "grad": "jax",
    "multi_steps": "jax",
    "pad": "jax",
    "micro_batch_stats": "jax",
    "pooled_batch_stats": "jax",
}
if not TYPE_CHECKING:  # or a type checker would take any name to be there
    __getattr__ = _elsewhere(__name__, {name: f"import it from bigbatch.{home}" for name, home in _HOMES.items()})
