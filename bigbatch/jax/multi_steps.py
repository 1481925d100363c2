"""An optax optimizer that takes one micro-batch at a time and steps when the window is full."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Never, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..core.errors import LossError, OptionError, StateError, WeightError
from ..core.options import check_choice, check_known, positive
from ..core.weight import Reduction, check_reduction, counted, is_number, share
from .checks import check_gradients, checked_weight, is_finite
from .internals import is_traced

_NonFinite = Literal["window", "micro_batch", "keep"]
_Steps = int | Callable[[jax.Array], Any]


class _MultiStepsState(NamedTuple):
    """The state of `multi_steps`: arrays only, so it can be saved, sharded and donated like any other.

    `weight`, `value` and `sums` belong to the current window. When it ends you can still read them, until the next
    window begins; `value` is then the loss of the whole batch.
    """

    step: jax.Array
    """How many windows have ended, applied or not."""
    micro_step: jax.Array
    """How many micro-batches the current window has; 0 if none is open."""
    weight: jax.Array
    """The total weight."""
    value: jax.Array
    """The weighted mean of `value=…`, if it was passed with every micro-batch."""
    sums: Any
    """Σ w·g, in at least float32."""
    inner_state: Any
    """The state of the inner optimizer."""
    is_applied: jax.Array
    """Whether the last call stepped."""
    num_skipped: jax.Array
    """How many windows changed nothing, because their gradient was not finite or their weight was zero."""
    num_dropped: jax.Array
    """How many micro-batches were left out by non_finite="micro_batch"."""


class _MultiSteps(optax.GradientTransformationExtraArgs):
    """What `multi_steps` returns: `init` and `update` as in optax, and `flush`."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise OptionError(f"{name} cannot be changed after the optimizer was made: call multi_steps() again")

    def flush(self, state: _MultiStepsState, params: Any = None, **extra: Any) -> tuple[Any, _MultiStepsState]:
        """Ends the open window, however short. If none is open, the updates are zeros and nothing changes.

            updates, state = optimizer.flush(state, params)

        An optimizer inside of another one (optax.chain) cannot be flushed like this: call `update` with gradients of
        zero, weight=0 and flush=True instead.

        Args:
            state: The state that the last `update` returned.
            params: The parameters, as for `update`.
            extra: Further arguments for the inner optimizer.

        Returns:
            The updates to apply, and the next state.
        """
        zeros = jax.tree.map(jnp.zeros_like, state.sums if params is None else _trained(params))
        return self.update(zeros, state, params, **{"value": 0.0, "grad": zeros, **extra}, weight=0, flush=True)


def multi_steps(
    optimizer: optax.GradientTransformation,
    accumulation_steps: _Steps | None = None,
    *,
    reduction: Reduction = "mean",
    non_finite: _NonFinite = "window",
    **unknown: Never,
) -> _MultiSteps:
    """Wraps an optimizer for micro-batches that come one at a time: it steps on the gradient of the whole batch.

        optimizer = multi_steps(optax.adam(1e-3), accumulation_steps=4)
        state = optimizer.init(params)
        for x, y in loader:
            grads = jax.grad(loss)(params, x, y)                                  # of the micro-batch's mean
            updates, state = optimizer.update(grads, state, params, weight=len(y))
            params = optax.apply_updates(params, updates)                         # zeros until the window is full
        updates, state = optimizer.flush(state, params)                           # the last, shorter window

    `update` stands for

        sums += weight * grads
        total += weight
        micro_step += 1
        if micro_step == accumulation_steps:
            updates, inner_state = inner.update(sums / total, inner_state, params)
            sums = total = micro_step = 0

    The inner optimizer runs once per window, so its schedules count steps. A window whose weight is zero, negative or
    not finite changes nothing.

    Args:
        optimizer: The inner optimizer, any of optax.
        accumulation_steps: How many micro-batches a window has: a number, or a function of the step number (a
            batch-size ramp) that works in `jit`.
        reduction: "mean", or "sum" to add gradients up undivided; they need no weight then.
        non_finite: What happens to gradients that are not finite. "window" skips their window, "micro_batch" leaves
            out the micro-batch with its weight, "keep" passes them to the inner optimizer.

    Besides optax's arguments, `update` takes:

    Args:
        weight: How many samples or tokens the loss averages over: a number, or an array to add up. A micro-batch of
            weight zero is left out, even if its gradient is NaN.
        flush: True ends the window with this micro-batch.
        value: The micro-batch's mean loss. The inner optimizer gets that of the window.
        grad: The micro-batch's gradient, for inner optimizers that take one. They get that of the window.
        extra: Other arguments. The inner optimizer gets those of the last micro-batch of the window, so a `value_fn`
            has to be the loss of the whole batch.

    Returns:
        An optimizer with `init` and `update` as in optax, and `flush(state, params)`, which ends a shorter window.
    """
    check_known(unknown, multi_steps)
    check_reduction(reduction)
    check_choice("non_finite", non_finite, get_args(_NonFinite))
    steps: _Steps = (
        accumulation_steps if callable(accumulation_steps) else positive("accumulation_steps", accumulation_steps)
    )
    if not isinstance(optimizer, optax.GradientTransformation):
        raise OptionError(f"the optimizer is a {type(optimizer).__name__}: pass one of optax, such as optax.adam(1e-3)")
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> _MultiStepsState:
        return _MultiStepsState(
            step=jnp.zeros([], jnp.int32),
            micro_step=jnp.zeros([], jnp.int32),
            weight=jnp.zeros([], float),
            value=jnp.zeros([], float),
            sums=jax.tree.map(lambda p: jnp.zeros_like(p, _wide(p)), _trained(params)),
            inner_state=inner.init(params),
            is_applied=jnp.zeros([], bool),
            num_skipped=jnp.zeros([], jnp.int32),
            num_dropped=jnp.zeros([], jnp.int32),
        )

    def update(
        grads: Any, state: _MultiStepsState, params: Any = None, *, weight: Any = None, **extra: Any
    ) -> tuple[Any, _MultiStepsState]:
        if not isinstance(state, _MultiStepsState):
            raise StateError(f"the state is a {type(state).__name__}: pass the one that init() or update() returned")
        remedy = "pass the gradient with respect to the parameters that init() was given"
        check_gradients(grads, state.sums, "update() was given", remedy)
        total = _checked_weight(weight, reduction)
        function = traced if is_traced((grads, state, params, extra)) or not _are_arrays(extra) else compiled
        return function(grads, state, params, total, **extra)

    def traced(
        grads: Any,
        state: _MultiStepsState,
        params: Any,
        weight: jax.Array,
        *,
        value: Any = None,
        flush: Any = False,
        **extra: Any,
    ) -> tuple[Any, _MultiStepsState]:
        grads = jax.tree.map(_as_inexact, grads)
        is_dropped = jnp.array(False)
        if non_finite == "micro_batch":
            is_dropped = (weight != 0) & ~(jnp.isfinite(weight) & is_finite(grads))

        is_open = state.micro_step > 0
        is_idle = flush & ~is_open & (weight == 0)
        num = state.micro_step + 1
        is_full = (num >= _steps_at(steps, state.step)) | flush
        is_end = is_full & ~is_idle

        window = _with_micro_batch(state, is_open | is_idle, grads, jnp.where(is_dropped, 0, weight), value, reduction)

        def apply(gradient: Any, inner_state: Any) -> tuple[Any, Any]:
            of_window = {"value": window.value.astype(_wide(value))} if value is not None else {}
            of_window |= {"grad": gradient} if "grad" in extra else {}
            updates, new = inner.update(gradient, inner_state, params, **{**extra, **of_window})
            return updates, jax.tree.map(lambda new, old: jnp.asarray(new, old.dtype), new, inner_state)

        zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(apply, grads, state.inner_state)[0])

        def mean(sums: jax.Array, gradient: jax.Array) -> jax.Array:  # in the dtype of the micro-batch's gradient
            return (sums if reduction == "sum" else share(sums, window.weight, jnp.where)).astype(gradient.dtype)

        def close(inner_state: Any) -> tuple[Any, Any, jax.Array]:
            gradient = jax.tree.map(mean, window.sums, grads)
            is_applied = (window.weight > 0) & jnp.isfinite(window.weight)
            if non_finite != "keep":
                is_applied &= is_finite(gradient)
            return *jax.lax.cond(is_applied, apply, lambda _, old: (zeros, old), gradient, inner_state), is_applied

        updates, inner_state, is_applied = jax.lax.cond(
            is_end, close, lambda old: (zeros, old, jnp.array(False)), state.inner_state
        )
        return updates, window._replace(
            step=state.step + is_end,
            micro_step=jnp.where(is_end | is_idle, 0, num),
            inner_state=inner_state,
            is_applied=is_applied,
            num_skipped=state.num_skipped + (is_end & ~is_applied),
            num_dropped=state.num_dropped + is_dropped,
        )

    compiled = jax.jit(traced)  # outside of jit a `lax.cond` is compiled anew at every call
    return _MultiSteps(init, update)


def _trained(params: Any) -> Any:
    """The parameters that have gradients; optax.lookahead adds slow ones."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params


def _with_micro_batch(
    state: _MultiStepsState, is_open: jax.Array, grads: Any, weight: jax.Array, value: Any, reduction: Reduction
) -> _MultiStepsState:
    """The window with one more micro-batch; if none is open, it begins at zero."""
    before, loss, sums = jax.tree.map(
        lambda old: jnp.where(is_open, old, jnp.zeros_like(old)), (state.weight, state.value, state.sums)
    )
    is_mean = reduction == "mean"
    factor = weight if is_mean else (weight != 0).astype(weight.dtype)

    def plus(total: jax.Array, gradient: jax.Array) -> jax.Array:
        return (total + counted(gradient.astype(total.dtype), factor, jnp.where)).astype(total.dtype)

    total = before + weight
    if value is not None:
        if not _is_array(value) or jnp.shape(value):
            found = f"has the shape {jnp.shape(value)}" if _is_array(value) else f"is {value!r}"
            raise LossError(f"value {found}: pass the micro-batch's mean loss, a scalar")
        added = counted(value, factor, jnp.where)
        mean = share(loss * before + added, total, jnp.where) if is_mean else loss + added
        loss = jnp.where(weight == 0, loss, mean).astype(loss.dtype)
    return state._replace(weight=total, value=loss, sums=jax.tree.map(plus, sums, grads))


def _steps_at(accumulation_steps: _Steps, step: jax.Array) -> Any:
    if not callable(accumulation_steps):
        return accumulation_steps
    steps = accumulation_steps(step)
    return steps if isinstance(steps, jax.Array | np.ndarray) else positive("accumulation_steps(step)", steps)


def _checked_weight(weight: Any, reduction: Reduction) -> jax.Array:
    """The weight of a micro-batch as one number. A traced weight that is wrong becomes NaN: its window is skipped."""
    if weight is None and reduction == "mean":
        raise OptionError(
            "update() needs weight=…: how many samples or tokens the loss averages over; "
            "weight=1 if that is the same for all micro-batches; Flax's TrainState.apply_gradients does not pass it "
            "on, docs/jax.md shows a TrainState that does"
        )
    if isinstance(weight, tuple | list):
        raise WeightError(
            f"the weight has {len(weight)} terms but the gradient is already their sum: pass one number, or use "
            "value_and_grad() for a loss whose terms have different weights"
        )
    weight = checked_weight(1 if weight is None else weight, jnp.result_type(float), of="this micro-batch")
    return jnp.asarray(weight, float)


def _are_arrays(tree: Any) -> bool:
    """Whether a compiled function can take all of it; it cannot take a `value_fn`."""
    return all(_is_array(leaf) for leaf in jax.tree.leaves(tree))


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic) or is_number(leaf)


def _as_inexact(gradient: Any) -> jax.Array:
    """Integers as floats, since their mean is not an integer."""
    return jnp.asarray(gradient, None if jnp.issubdtype(jnp.result_type(gradient), jnp.inexact) else float)


def _wide(value: Any) -> Any:
    """The dtype in which something is added up: at least float32."""
    return jnp.promote_types(jnp.result_type(value), jnp.float32)
