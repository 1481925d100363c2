"""`verify`: accumulation against the full batch, on the user's own loss."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Never

import jax
import jax.numpy as jnp

from ...core.errors import BigBatchError
from ...core.options import check_known, positive
from ...core.verify.compare import audit
from ...core.verify.result import Verification
from ...core.verify.trial import Loop
from ...core.weight import Reduction, check_reduction
from ..arguments import as_numbers, split_arguments
from ..auxiliary import AuxSpec
from ..keys import Rng
from ..window import Loss, Spec
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
    **unknown: Never,
) -> Verification:
    """Compares the accumulated gradient with that of the full batch, and names the cause if they differ.

        full = jax.grad(loss)(parameters, batch)
        accumulated = grad(loss, micro_batch_size)(parameters, batch)
        error = |accumulated - full| / |full|            # for each parameter

    Both are computed in float64. A loss that only runs in float32 is compared in float32, and the result says so.

    Args:
        parameters: The parameters: the first argument of the loss.
        batch: A batch that fits into memory as a whole: the second argument of the loss.
        loss: `loss(parameters, batch, *args, **kwargs)` returns the mean over the batch, or a tuple of means.
        micro_batch_size: The number of samples in a micro-batch.
        weight: `weight(batch)` returns how many samples or tokens the loss averages over; for a tuple of means, a
            tuple of the same length. None: the number of samples.
        has_aux: Whether the loss returns `(loss, aux)`.
        reduction: "mean", or "sum" if the loss adds up.
        rng: What happens to PRNG keys among the arguments. "per_micro_batch" folds in the number of the micro-batch;
            "per_sample" passes the loss one key for each sample; None passes keys as they are.
        args: Further arguments of the loss, by position.
        kwargs: Further arguments of the loss, by keyword.
        batch_argnums: The numbers of the arguments to cut, if not all are cut.
        step: Your own accumulation, to check instead: `step(parameters, micro_batches)` returns its gradient.
        tolerance: The largest relative error that counts as exact. None: 1e-9 in float64; in float32 it follows from
            the number of samples and micro-batches.

    Returns:
        The verdict, true if it is exact. Printed, it is a table with the causes in sentences below.
    """
    check_known(unknown, verify)
    micro_batch_size = positive("micro_batch_size", micro_batch_size)
    check_reduction(reduction)
    numbers = None if batch_argnums is None else as_numbers("batch_argnums", batch_argnums)
    spec = Spec(loss, micro_batch_size, weight, has_aux, reduction, AuxSpec.of("auto"), rng, None)

    def compare(given: Any) -> Verification:
        positional, named = given
        layout, (own,), arrays = split_arguments(positional, named, (0,), numbers)
        trial = Trial(spec, layout, own, arrays)
        return audit(trial, tolerance, step)

    given = (parameters, batch, *args), dict(kwargs or {})
    try:
        with jax.enable_x64(True):
            return compare(_in_float64(given))
    except BigBatchError:
        raise
    except (TypeError, ValueError) as error:  # JAX refuses to mix dtypes, in the carry of a scan or in a convolution
        reason = str(error).partition("\n")[0].rstrip(".:")
    found = compare(given)
    note = f"the loss does not run in float64 ({reason}), so it was compared in its own dtypes"
    return replace(found, causes=(note, *found.causes))


def _in_float64(tree: Any) -> Any:
    """A copy with every floating-point array in float64."""

    def wide(leaf: Any) -> Any:
        kind = getattr(leaf, "dtype", None)
        if kind is None or not jnp.issubdtype(kind, jnp.inexact):
            return leaf
        return jnp.asarray(leaf, jnp.promote_types(kind, jnp.float64))

    return jax.tree.map(wide, tree)
