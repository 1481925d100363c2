"""bigbatch for JAX."""

from typing import TYPE_CHECKING

from ..core.elsewhere import elsewhere as _elsewhere
from ..core.errors import MissingExtraError

try:
    import jax as _jax  # noqa: F401
    import optax as _optax  # noqa: F401
except ImportError as error:
    raise MissingExtraError('bigbatch.jax needs JAX and Optax: pip install "bigbatch[jax]"') from error

from . import weights
from .batch_norm import micro_batch_stats, pooled_batch_stats
from .checkpoints import Checkpoints
from .multi_steps import multi_steps
from .pad import pad
from .value_and_grad import grad, value_and_grad
from .verify.verify import verify

__all__ = [
    "Checkpoints",
    "grad",
    "micro_batch_stats",
    "multi_steps",
    "pad",
    "pooled_batch_stats",
    "value_and_grad",
    "verify",
    "weights",
]

_ONE_AT_A_TIME = "wrap your optimizer in multi_steps to feed one micro-batch at a time"
_LOOP = "value_and_grad(loss, micro_batch_size) returns the gradient for a loop of your own, which makes the step"
if not TYPE_CHECKING:  # or a type checker would take any name to be there
    __getattr__ = _elsewhere(
        __name__,
        {
            "Accumulator": f"{_LOOP}; or {_ONE_AT_A_TIME}",
            "accumulate": f"{_LOOP}; for model.fit use bigbatch.keras.accumulate",
            "train_with_accumulation": _LOOP,
            "micro_batch": _ONE_AT_A_TIME,
            "MicroBatch": _ONE_AT_A_TIME,
            "MultiSteps": "it is a function, multi_steps(optimizer, accumulation_steps)",
            "microbatch": "value_and_grad(loss, micro_batch_size) does what optax's microbatching does",
        },
    )
