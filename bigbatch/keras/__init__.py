"""bigbatch for Keras, on all of its backends."""

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
