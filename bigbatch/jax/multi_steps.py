"""An optax optimizer that is fed one micro-batch at a time, and steps when the window is full."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..core.errors import GradientError, LossError, OptionError, StateError, WeightError
from ..core.options import positive
from ..core.weight import Reduction, check_reduction, check_weight, is_number
from .batch import is_real, is_traced

NonFinite = Literal["window", "micro_batch", "keep"]
Steps = int | Callable[[jax.Array], Any]


class MultiStepsState(NamedTuple):
    """What `multi_steps` knows: arrays only, so that it is saved, sharded and donated like any other.

    `weight`, `value` and `sums` are those of the window so far; after its end they stay until the next one begins, so
    that they can be read: `value` is then the loss of the whole batch.
    """

    step: jax.Array
    """How many windows are done, applied or not."""
    micro_step: jax.Array
    """How many micro-batches the open window has; 0 if none is open."""
    weight: jax.Array
    value: jax.Array
    """The weighted mean of `value=…`, if every micro-batch came with one."""
    sums: Any
    """Σ w·g, in at least float32."""
    inner_state: Any
    is_applied: jax.Array
    """Whether the last call stepped."""
    num_skipped: jax.Array
    """How many windows changed nothing: their gradient was not finite, or their weight zero."""
    num_dropped: jax.Array
    """How many micro-batches were left out with non_finite="micro_batch"."""


class MultiSteps(optax.GradientTransformationExtraArgs):
    """What `multi_steps` returns: `init` and `update` as in optax, and `flush`."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise OptionError(f"{name} cannot be changed after the optimizer was made: call multi_steps() again")

    def flush(self, state: MultiStepsState, params: Any = None, **extra: Any) -> tuple[Any, MultiStepsState]:
        """Ends the window that is open, however short; nothing changes, and the updates are zeros, if none is.

            updates, state = optimizer.flush(state, params)

        The same as `update` with gradients and a weight of zero and flush=True, which is for optimizers inside of
        others (optax.chain), where there is no `flush`.
        """
        nothing = jax.tree.map(jnp.zeros_like, state.sums if params is None else _trained(params))
        return self.update(nothing, state, params, **{"value": 0.0, "grad": nothing, **extra}, weight=0, flush=True)


def multi_steps(
    optimizer: optax.GradientTransformation,
    accumulation_steps: Steps,
    *,
    reduction: Reduction = "mean",
    non_finite: NonFinite = "window",
) -> MultiSteps:
    """Stands for `optimizer` where micro-batches come one at a time, and steps on the gradient of the whole batch.

        optimizer = multi_steps(optax.adam(1e-3), accumulation_steps=4)
        state = optimizer.init(params)
        for x, y in loader:
            grads = jax.grad(loss)(params, x, y)                                  # of the micro-batch's mean
            updates, state = optimizer.update(grads, state, params, weight=len(y))
            params = optax.apply_updates(params, updates)                         # zeros until the window is full
        updates, state = optimizer.flush(state, params)                           # the last, shorter window

    `weight` says over how many samples or tokens the loss is a mean; an array is added up. What counts zero is left
    out, even if it is not a number. With reduction "sum" gradients are added up undivided and need no weight.
    `accumulation_steps` is a number, or a function of the step number (a batch-size ramp) that works in jit.
    flush=True ends the window with this micro-batch.

    The inner optimizer runs once a window, so its schedules count steps. `value=…`, the micro-batch's mean loss,
    reaches it as that of the window, and so does `grad=…`; other extra arguments reach it as the window's last
    micro-batch has them. A `value_fn=…` therefore has to be that of the whole batch.

    A window whose weight is zero, or which has a weight that is negative or not finite, changes nothing. `non_finite`
    says what becomes of gradients that are not finite: "window" skips their window, "micro_batch" leaves out only the
    micro-batch, with its weight, and "keep" hands them to the inner optimizer.
    """
    check_reduction(reduction)
    if non_finite not in get_args(NonFinite):
        raise OptionError(f'non_finite={non_finite!r} is unknown: pass "window", "micro_batch" or "keep"')
    if not callable(accumulation_steps):
        accumulation_steps = positive("accumulation_steps", accumulation_steps)
    if not isinstance(optimizer, optax.GradientTransformation):
        raise OptionError(f"the optimizer is a {type(optimizer).__name__}: pass one of optax, such as optax.adam(1e-3)")
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> MultiStepsState:
        return MultiStepsState(
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
        grads: Any, state: MultiStepsState, params: Any = None, *, weight: Any = None, **extra: Any
    ) -> tuple[Any, MultiStepsState]:
        if not isinstance(state, MultiStepsState):
            raise StateError(f"the state is a {type(state).__name__}: pass the one that init() or update() returned")
        _check_gradients(grads, state.sums)
        given = _weight_of(weight, reduction)
        function = traced if is_traced((grads, state, params, extra)) or not _are_numbers(extra) else compiled
        return function(grads, state, params, given, **extra)

    def traced(
        grads: Any,
        state: MultiStepsState,
        params: Any,
        given: jax.Array,
        *,
        value: Any = None,
        flush: Any = False,
        **extra: Any,
    ) -> tuple[Any, MultiStepsState]:
        grads = jax.tree.map(_as_inexact, grads)
        is_good = jnp.array(True)
        if non_finite == "micro_batch":
            is_good = (given == 0) | (jnp.isfinite(given) & _is_finite(grads))
        counted = jnp.where(is_good, given, 0)

        is_open = state.micro_step > 0
        is_idle = flush & ~is_open & (given == 0)
        num = state.micro_step + 1
        is_full = (num >= _steps_at(accumulation_steps, state.step)) | flush
        is_end = is_full & ~is_idle

        window = _begun(state, is_open | is_idle)
        window = window._replace(
            weight=window.weight + counted,
            value=_value_with(window, counted, value, reduction),
            sums=_sums_with(window.sums, counted, grads, reduction),
        )

        def apply(gradient: Any, inner_state: Any) -> tuple[Any, Any]:
            of_window = {"value": window.value.astype(_wide(value))} if value is not None else {}
            of_window |= {"grad": gradient} if "grad" in extra else {}
            updates, new = inner.update(gradient, inner_state, params, **{**extra, **of_window})
            return updates, jax.tree.map(lambda new, old: jnp.asarray(new, old.dtype), new, inner_state)

        zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(apply, grads, state.inner_state)[0])

        def close(inner_state: Any) -> tuple[Any, Any, jax.Array]:
            gradient = _gradient(window, grads, reduction)
            is_applied = (window.weight > 0) & jnp.isfinite(window.weight)
            if non_finite != "keep":
                is_applied &= _is_finite(gradient)
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
            num_dropped=state.num_dropped + ~is_good,
        )

    compiled = jax.jit(traced)  # outside of jit a `lax.cond` is compiled anew at every call
    return MultiSteps(init, update)


def _trained(params: Any) -> Any:
    """The parameters that gradients are taken of: optax.lookahead has slow ones beside them."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params


def _begun(state: MultiStepsState, is_going_on: jax.Array) -> MultiStepsState:
    """The state, without what the window before left in it."""
    weight, value, sums = jax.tree.map(
        lambda old: jnp.where(is_going_on, old, jnp.zeros_like(old)), (state.weight, state.value, state.sums)
    )
    return state._replace(weight=weight, value=value, sums=sums)


def _sums_with(sums: Any, weight: jax.Array, grads: Any, reduction: Reduction) -> Any:
    factor = weight if reduction == "mean" else jnp.ones_like(weight)

    def added(total: jax.Array, gradient: jax.Array) -> jax.Array:
        share = jnp.where(weight == 0, 0, factor * gradient.astype(total.dtype))
        return (total + share).astype(total.dtype)

    return jax.tree.map(added, sums, grads)


def _value_with(window: MultiStepsState, weight: jax.Array, value: Any, reduction: Reduction) -> jax.Array:
    """The mean loss of the window with one more micro-batch; with reduction "sum" the sum."""
    if value is None:
        return window.value
    if not _is_array(value):
        raise LossError(f"value is {value!r}: pass the micro-batch's mean loss, a scalar")
    if jnp.shape(value):
        raise LossError(f"value has the shape {jnp.shape(value)}: pass the micro-batch's mean loss, a scalar")
    added = window.value + value
    if reduction == "mean":
        added = (window.value * window.weight + weight * value) / _divisor(window.weight + weight, reduction)
    return jnp.where(weight == 0, window.value, added).astype(window.value.dtype)


def _gradient(window: MultiStepsState, grads: Any, reduction: Reduction) -> Any:
    """The finished gradient, in the dtype that the micro-batches' have."""
    divisor = _divisor(window.weight, reduction)
    return jax.tree.map(lambda sums, g: (sums / divisor).astype(g.dtype), window.sums, grads)


def _divisor(total: jax.Array, reduction: Reduction) -> jax.Array:
    """The total weight; 1 where nothing is divided."""
    return jnp.ones_like(total) if reduction == "sum" else jnp.where(total == 0, 1, total)


def _steps_at(accumulation_steps: Steps, step: jax.Array) -> Any:
    if not callable(accumulation_steps):
        return accumulation_steps
    steps = accumulation_steps(step)
    return steps if isinstance(steps, jax.Array | np.ndarray) else positive("accumulation_steps(step)", steps)


def _weight_of(weight: Any, reduction: Reduction) -> jax.Array:
    """One number for a micro-batch; not a number where it is bad and cannot be read, so that its window is skipped."""
    if weight is None and reduction == "mean":
        raise OptionError(
            "update() needs weight=…: over how many samples or tokens the loss is a mean; "
            "weight=1 if that is the same for all micro-batches; Flax's TrainState.apply_gradients does not pass it "
            "on, docs/jax.md shows a TrainState that does"
        )
    if isinstance(weight, tuple | list):
        raise WeightError(
            f"the weight has {len(weight)} terms but a gradient has them mixed: pass one number, and give losses whose "
            "terms have counts of their own to value_and_grad()"
        )
    if isinstance(weight, np.ndarray):
        check_weight(tuple(weight.ravel().tolist()), of="this micro-batch")
    if isinstance(weight, jax.Array | np.ndarray):
        if not is_real(weight.dtype):
            raise WeightError(f"the weight is an array of {weight.dtype}: pass a number of at least 0")
        weights = jnp.asarray(weight, float)
        return jnp.where(jnp.all(jnp.isfinite(weights) & (weights >= 0)), jnp.sum(weights), jnp.nan)
    (number,) = check_weight((1 if weight is None else weight,), of="this micro-batch")
    return jnp.asarray(number, float)


def _check_gradients(grads: Any, sums: Any) -> None:
    """Refuses gradients that are not those of the parameters that `init` saw."""
    remedy = "pass the gradient with respect to the parameters that init() was given"
    ours, theirs = jax.tree.structure(sums), jax.tree.structure(grads)
    if ours != theirs:
        raise GradientError(f"the gradients are {theirs} but the parameters {ours}: {remedy}")
    for (path, g), s in zip(jax.tree.leaves_with_path(grads), jax.tree.leaves(sums), strict=True):
        if jnp.shape(g) != s.shape:
            raise GradientError(
                f"the gradient of {jax.tree_util.keystr(path)} has the shape {jnp.shape(g)} but the parameter "
                f"{s.shape}: {remedy}"
            )
        dtype = jnp.result_type(g)
        is_none = dtype == jax.dtypes.float0  # what allow_int=True gives for integers
        if is_none or (_is_complex(dtype) and not _is_complex(s.dtype)):
            kind = "float0" if is_none else dtype.name
            raise GradientError(
                f"the gradient of {jax.tree_util.keystr(path)} is an array of {kind} but is added up in "
                f"{s.dtype.name}: {remedy}, and leave out what nobody can differentiate by"
            )


def _is_complex(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.complexfloating))


def _are_numbers(tree: Any) -> bool:
    """Whether a compiled function can take all of it; not so a `value_fn`."""
    return all(_is_array(leaf) for leaf in jax.tree.leaves(tree))


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic) or is_number(leaf)


def _is_finite(tree: Any) -> jax.Array:
    return jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)], bool).all()


def _as_inexact(gradient: Any) -> jax.Array:
    """Integers as floats, since their mean is none."""
    return jnp.asarray(gradient, None if jnp.issubdtype(jnp.result_type(gradient), jnp.inexact) else float)


def _wide(value: Any) -> Any:
    """The dtype in which something is added up: at least float32."""
    return jnp.promote_types(jnp.result_type(value), jnp.float32)
