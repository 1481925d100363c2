"""Train with the batch you want on the memory you have, and get exactly the same gradient."""

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
    "Verification",
    "WeightError",
    "Window",
    "__version__",
    "windows",
]
