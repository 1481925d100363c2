"""bigbatch for Keras, on all of its backends."""

from typing import TYPE_CHECKING

from ..core.elsewhere import elsewhere as _elsewhere
from ..core.errors import MissingExtraError

try:
    import keras as _keras
except ImportError as error:
    raise MissingExtraError('bigbatch.keras needs Keras: pip install "bigbatch[keras]"') from error

if tuple(map(int, _keras.__version__.split(".")[:2])) < (3, 8):
    raise MissingExtraError(
        f"bigbatch.keras needs Keras 3.8 or later, but Keras {_keras.__version__} is installed: "
        'pip install --upgrade "bigbatch[keras]"'
    )

from .accumulate import accumulate
from .recalibrate import recalibrate
from .verify import verify

__all__ = ["accumulate", "recalibrate", "verify"]

_ACCUMULATE = "call accumulate(model, micro_batch_size), then model.fit as before"
if not TYPE_CHECKING:  # or a type checker would take any name to be there
    __getattr__ = _elsewhere(
        __name__, dict.fromkeys(("Accumulator", "train_with_accumulation", "value_and_grad"), _ACCUMULATE)
    )
