"""Full batch against accumulation, on the user's own loss."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ...core.errors import BigBatchError
from ...core.options import positive
from ...core.verify.compare import Loop, audit, audit_loop
from ...core.verify.result import Verification
from ...core.weight import Reduction, check_reduction
from ..aux import Asked
from ..batch import as_numbers, take_apart
from ..keys import Rng
from ..window import Loss, Window
from .trial import Trial


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
    tolerance: float | None = None,
) -> Verification:
    """Compares the gradient of the full batch with the accumulated one, in float64, and says why where they differ.

    The loss is called as `loss(parameters, batch, *args, **kwargs)`. With `step`, somebody else's accumulation is
    compared: `step(parameters, micro_batches)` returns its gradient. A loss that only runs in float32 is compared in
    float32, and the result says so. The tolerance is 1e-9 in float64, and follows from the size of the sums in float32,
    unless it is given.
    """
    micro_batch_size = positive("micro_batch_size", micro_batch_size)
    check_reduction(reduction)
    numbers = None if batch_argnums is None else as_numbers("batch_argnums", batch_argnums)
    window = Window(loss, micro_batch_size, weight, has_aux, reduction, Asked.of("auto"), rng, None)

    def compare(given: Any) -> Verification:
        positional, named = given
        form, (own,), arrays = take_apart(positional, named, (0,), numbers)
        trial = Trial(window, form, own, arrays)
        return audit(trial, tolerance) if step is None else audit_loop(trial, step, tolerance)

    given = (parameters, batch, *args), dict(kwargs or {})
    try:
        with jax.enable_x64(True):
            return compare(widened(given))
    except BigBatchError:
        raise
    except (TypeError, ValueError) as error:  # JAX refuses to mix dtypes, in the carry of a scan or in a convolution
        reason = str(error).partition("\n")[0].rstrip(".:")
    found = compare(given)
    note = f"the loss does not run in float64 ({reason}), so it was compared in its own dtypes"
    return replace(found, causes=(note, *found.causes))


def widened(tree: Any) -> Any:
    """A copy with all that is floating in float64."""

    def wide(leaf: Any) -> Any:
        kind = getattr(leaf, "dtype", None)
        if kind is None or not jnp.issubdtype(kind, jnp.inexact):
            return leaf
        return jnp.asarray(leaf, jnp.promote_types(kind, jnp.float64))

    return jax.tree.map(wide, tree)
