"""bigbatch for JAX."""

from ..core.errors import MissingExtraError

try:
    import jax as _jax  # noqa: F401
except ImportError as error:
    raise MissingExtraError('bigbatch.jax needs JAX: pip install "bigbatch[jax]"') from error

from .padding import pad
from .value_and_grad import grad, value_and_grad
from .verify import verify

__all__ = ["grad", "pad", "value_and_grad", "verify"]
