"""bigbatch for TensorFlow."""

from ..core.errors import MissingExtraError

try:
    import tensorflow as _tensorflow  # noqa: F401
except ImportError as error:
    raise MissingExtraError('bigbatch.tensorflow needs TensorFlow: pip install "bigbatch[tensorflow]"') from error

from .accumulator import Accumulator



__all__ = ["Accumulator"]
