"""Full batch against accumulation, on the user's own loss."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..core.audit import Loop, audit, audit_loop
from ..core.verification import Verification
from ..core.weight import Reduction, check_reduction
from ..core.window import positive
from .arguments import as_numbers, take_apart
from .keys import Rng
from .outputs import Asked
from .trial import Trial
from .window import Loss, Window


def verify(
    parameters: Any,
    batch: Any,
    loss: Loss,
    micro_batch_size: int = 8,
    *,
    weight: Callable[..., Any] | None = None,
    has_aux: bool = False,
    reduction: Reduction = "mean",
    rng: Rng = "per_micro_batch",
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    batch_argnums: int | tuple[int, ...] | None = None,
    step: Loop | None = None,
    tolerance: float = 1e-9,
) -> Verification:
    """Compares the gradient of the full batch with the accumulated one, in float64, and says why where they differ.

    The loss is called as `loss(parameters, batch, *args, **kwargs)`. With `step`, somebody else's accumulation is
    compared: `step(parameters, micro_batches)` returns its gradient.
    """
    micro_batch_size = positive("micro_batch_size", micro_batch_size)
    check_reduction(reduction)
    numbers = None if batch_argnums is None else as_numbers("batch_argnums", batch_argnums)
    with jax.enable_x64(True):
        given = widened((parameters, batch, *args))
        form, (parameters,), arrays = take_apart(given, widened(dict(kwargs or {})), (0,), numbers)
        window = Window(loss, micro_batch_size, weight, has_aux, reduction, Asked.of("auto"), rng, None)
        trial = Trial(window, form, parameters, arrays)
        return audit(trial, tolerance) if step is None else audit_loop(trial, step, tolerance)


def widened(tree: Any) -> Any:
    """A copy with all that is floating in float64."""

    def wide(leaf: Any) -> Any:
        kind = getattr(leaf, "dtype", None)
        if kind is None or not jnp.issubdtype(kind, jnp.inexact):
            return leaf
        return jnp.asarray(leaf, jnp.promote_types(kind, jnp.float64))

    return jax.tree.map(wide, tree)
