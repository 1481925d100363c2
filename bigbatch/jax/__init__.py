"""bigbatch for JAX."""

from ..core.errors import MissingExtraError

try:
    import jax as _jax  # noqa: F401
    import optax as _optax  # noqa: F401
except ImportError as error:
    raise MissingExtraError('bigbatch.jax needs JAX and Optax: pip install "bigbatch[jax]"') from error

from . import weights
from .checkpoints import Checkpoints
from .multi_steps import multi_steps
from .pad import pad
from .value_and_grad import grad, value_and_grad
from .verify.verify import verify

__all__ = ["Checkpoints", "grad", "multi_steps", "pad", "value_and_grad", "verify", "weights"]
