"""A window: cuts a batch into micro-batches, weighs each, adds up their gradients and reduces the sum once."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..core.errors import LossError
from ..core.weight import Reduction, as_terms, check_terms, counted, share, shares
from .arguments import ArgumentLayout, Arrays, num_rows
from .auxiliary import AuxSpec, Combine
from .checks import checked_weight
from .cut import Cut
from .distributed import Axes, ParameterShard, add_up, mark_varying
from .internals import varying
from .keys import Rng, for_micro_batch
from .time_major import warn_if_recurrent
from .uncut import check_uncut

Loss = Callable[..., Any]


@dataclass(frozen=True)
class Spec:
    """The options of `value_and_grad`, which documents them."""

    loss: Loss
    micro_batch_size: int
    weight: Callable[..., Any] | None
    has_aux: bool
    reduction: Reduction
    aux: AuxSpec
    rng: Rng
    accumulate_dtype: Any


class _Sums(NamedTuple):
    """The sums over the micro-batches."""

    gradient: list[Any]
    terms: list[Any]
    weight: Any
    """Divided by the unit of weight."""
    aux: list[Any]


class Result(NamedTuple):
    """The loss, its gradient and aux of the whole batch."""

    value: Any
    gradient: list[Any]
    """One for each leaf of the parameters."""
    aux_rows: list[Any]
    """The leaves of aux that are concatenated."""
    aux_added: list[Any]
    """The leaves of aux that are added up."""


class WindowTrace:
    """One trace of a window. If several devices share the batch, each traces its own part.

    `result` stands for

        for micro_batch in micro_batches(batch):
            sums += weight(micro_batch) * jax.grad(loss)(parameters, micro_batch)
            total += weight(micro_batch)
        gradient = sums / total

    Args:
        spec: The options.
        layout: The arguments of the loss, without their arrays.
        arrays: The arrays among the arguments.
        parameters: The arguments to differentiate by.
        axes: The axes of the mesh over which devices share the batch, if this is inside of a `shard_map`.
        shards: Which part of each parameter, and so of its gradient, this device keeps.
    """

    def __init__(
        self,
        spec: Spec,
        layout: ArgumentLayout,
        arrays: Arrays,
        parameters: tuple[Any, ...],
        axes: Axes = (),
        shards: list[ParameterShard] | None = None,
    ) -> None:
        self.spec = spec
        self.layout = layout
        self.arrays = arrays
        self.axes = axes
        num_samples = num_rows(arrays)
        size = min(spec.micro_batch_size, num_samples)
        self.cut = Cut(num_samples, size, is_strided=True)
        self._num_samples = num_samples * (int(lax.axis_size(axes)) if axes else 1)  # on all devices
        # without `weight`, counts are divided by the micro-batch size, so that sums stay as large as a mean
        self._weight_unit = size if spec.weight is None else 1
        self._shards = shards or [ParameterShard.inside(leaf, axes) for leaf in jax.tree.leaves(parameters)]
        self._parameters = mark_varying(parameters, axes)

        self._terms, self._aux, self.combine = self._trace_loss()  # the terms and aux have shapes and dtypes only
        self.terms_dtype = jnp.result_type(*(term.dtype for term in self._terms))
        self._sums_dtype = jnp.promote_types(self.terms_dtype, jnp.float32)
        is_mean = spec.reduction == "mean"
        # either each term is divided by its own total before they are added, or the sums are divided after the loop
        self._divides_terms_first = is_mean and spec.weight is not None and len(self._terms) > 1
        self._divides_at_end = is_mean and not self._divides_terms_first
        weights = jax.eval_shape(lambda: [jnp.asarray(weight) for weight in self.weights(self.micro_batch(0, size))])
        self._weight_axes = varying(weights) | set(axes)  # the axes over which weights differ from device to device

    def result(self) -> Result:
        """The loss, its gradient and aux of the whole batch."""
        totals = self._totals()

        def body(sums: _Sums, number: Any, size: int) -> tuple[_Sums, list[Any]]:
            micro_batch = self.micro_batch(number, size)
            return self._add(sums, micro_batch, self.weights(micro_batch), totals)

        sums, rows = self.cut.loop(body, self._zeros())
        sums = self._reduce(sums)  # over the devices, once
        return self._finish(sums, totals, self.cut.join(rows))  # divide by the total

    def at(self, parameters: tuple[Any, ...]) -> "WindowTrace":
        """The same window with other values of the parameters; the loss is not traced again."""
        other = copy.copy(self)
        other._parameters = mark_varying(parameters, self.axes)
        return other

    # --- before the loop -------------------------------------------------------------------------------------

    def _trace_loss(self) -> tuple[tuple[Any, ...], Any, Combine]:
        """Traces the loss without running it; raises if it cannot be accumulated."""
        size, micro_batch = self.cut.size, self.micro_batch(0, self.cut.size)

        def loss(parameters: Any, rows: list[Any]) -> Any:
            return self.loss(parameters, micro_batch._replace(rows=rows))

        def trace(num_samples: int) -> Any:
            rows = [jax.ShapeDtypeStruct((num_samples, *row.shape[1:]), row.dtype) for row in self.arrays.rows]
            return jax.jit(loss).trace(self._parameters, rows)

        is_cut = size < self._num_samples
        if is_cut:
            for num in {self.cut.num_samples, self._num_samples}:
                check_uncut(self.layout, self.arrays, num, trace)
        terms, aux = jax.eval_shape(self.loss, self._parameters, micro_batch)
        if is_cut:
            warn_if_recurrent(lambda num: trace(num).jaxpr.jaxpr, size)
        self._check_terms(terms)
        aux_of_more = trace(2 * size).out_info[1] if self.spec.has_aux else None
        return terms, aux, self.spec.aux.combine(aux, aux_of_more, size)

    def _check_terms(self, terms: tuple[Any, ...]) -> None:
        if not terms:
            raise LossError("the loss returned 0 terms: return a mean over the micro-batch, or a tuple of them")
        for term in terms:
            if not hasattr(term, "shape") or term.shape or not jnp.issubdtype(term.dtype, jnp.floating):
                kind = jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", term)
                raise LossError(
                    f"the loss returned {kind}: return a mean over the micro-batch, a real scalar, or a "
                    "tuple of them; or (loss, aux) with has_aux=True"
                )
        axes_of_rows = varying(self.arrays.rows)  # empty with check_vma=False
        if reduced := [axis for axis in self.axes if axis in axes_of_rows and axis not in varying(terms)]:
            raise LossError(
                f"the loss is the same on all devices of {reduced[0]!r}, so it is already reduced over them: "
                "return the mean over the device's own micro-batch"
            )

    def _totals(self) -> tuple[Any, ...]:
        """The total weight of each term; empty unless each term is divided by its own."""
        if not self._divides_terms_first:
            return ()

        def body(totals: tuple[Any, ...], number: Any, size: int) -> tuple[tuple[Any, ...], list[Any]]:
            weights = self.weights(self.micro_batch(number, size))
            return tuple(_plus(t, jnp.asarray(w, self._sums_dtype)) for t, w in zip(totals, weights, strict=True)), []

        zeros = (mark_varying(jnp.zeros((), self._sums_dtype), self._weight_axes),) * len(self._terms)
        totals, _ = self.cut.loop(body, zeros)
        return add_up(totals, self.axes)

    def _zeros(self) -> _Sums:
        def like(parameter: Any) -> Any:
            dtype = self.spec.accumulate_dtype or jnp.promote_types(parameter.dtype, jnp.float32)
            return jnp.zeros_like(parameter, jnp.promote_types(parameter.dtype, dtype))

        def zeros(leaf: Any, dtype: Any) -> Any:
            return mark_varying(jnp.zeros(leaf.shape, dtype), self._weight_axes | varying(leaf))

        def aux_dtype(leaf: Any, way: str) -> Any:
            if _is_exact(leaf):
                return jnp.promote_types(leaf.dtype, jnp.int32) if way == "sum" else self._sums_dtype
            return jnp.promote_types(leaf.dtype, jnp.float32)

        return _Sums(
            [like(p) for p in jax.tree.leaves(self._parameters)],
            [zeros(term, self._sums_dtype) for term in self._terms],
            mark_varying(jnp.zeros((), self._sums_dtype), self._weight_axes),
            [zeros(leaf, aux_dtype(leaf, way)) for leaf, way in self.combine.added(self._aux)],
        )

    # --- one micro-batch -------------------------------------------------------------------------------------

    def micro_batch(self, number: Any, size: int) -> Arrays:
        """The arrays of one micro-batch, with keys of its own."""
        is_only = self.cut.size == self.cut.num_samples and not self.axes
        keys = self.arrays.keys if is_only else for_micro_batch(self.arrays.keys, self.spec.rng, number, self.axes)
        return Arrays([self.cut.take(row, number, size) for row in self.arrays.rows], keys, self.arrays.whole)

    def loss(self, parameters: Any, micro_batch: Arrays) -> tuple[tuple[Any, ...], Any]:
        """The terms of the loss, and aux."""
        args, kwargs = self.layout.bind(micro_batch, parameters)
        returned = self.spec.loss(*args, **kwargs)
        try:
            returned = jax.tree.map(jnp.asarray, returned)
        except (TypeError, ValueError) as error:
            raise LossError(f"the loss returned {returned!r}: return only numbers and arrays") from error
        if not self.spec.has_aux:
            return as_terms(returned), None
        if not (isinstance(returned, tuple) and len(returned) == 2):
            raise LossError("with has_aux=True the loss must return (loss, aux), but it returned something else")
        return as_terms(returned[0]), returned[1]

    def weights(self, micro_batch: Arrays) -> tuple[Any, ...]:
        """How much this micro-batch counts, for each term: its samples, or what the user's `weight` returns."""
        if self.spec.weight is None:
            return (num_rows(micro_batch),) * len(self._terms)
        weights = as_terms(self.spec.weight(*self.layout.batch(micro_batch)))
        check_terms(len(self._terms), len(weights))
        return tuple(checked_weight(w, self._sums_dtype) for w in weights)

    def _add(
        self, sums: _Sums, micro_batch: Arrays, weights: tuple[Any, ...], totals: tuple[Any, ...]
    ) -> tuple[_Sums, list[Any]]:
        """Adds a micro-batch to the sums; also returns the leaves of aux with a row for each sample.

        If totals are known, losses are multiplied by w_k / W before the gradient is taken. If not, gradients are
        multiplied by w_k / unit, in the dtype in which they add up, and divided after the loop.
        """
        loss_factors = shares(weights, totals, where=jnp.where) if totals else (1.0,) * len(self._terms)
        terms, aux, gradient = self._gradient(micro_batch, loss_factors)
        weight = share(weights[0], self._weight_unit)
        gradient_factor = weight if self._divides_at_end else 1.0
        added = _Sums(
            [_counted(g, gradient_factor, s.dtype)
             for g, s in zip(jax.tree.leaves(gradient), sums.gradient, strict=True)],
            [_counted(term, factor * gradient_factor, self._sums_dtype)
             for term, factor in zip(terms, loss_factors, strict=True)],
            jnp.asarray(weight, self._sums_dtype),
            [_counted(leaf, weight if way == "mean" else 1, s.dtype)
             for (leaf, way), s in zip(self.combine.added(aux), sums.aux, strict=True)],
        )  # fmt: skip
        return jax.tree.map(_plus, sums, added), self.combine.rows(aux)

    def _gradient(self, micro_batch: Arrays, factors: tuple[Any, ...]) -> tuple[Any, Any, Any]:
        """The terms, aux, and the gradient of the sum of the terms, each multiplied by its factor."""

        def loss(parameters: Any, factors: tuple[Any, ...]) -> tuple[Any, Any]:
            terms, aux = self.loss(parameters, micro_batch)
            counted_terms = [_counted(t, factor, self.terms_dtype) for t, factor in zip(terms, factors, strict=True)]
            return sum(counted_terms), (terms, aux)

        gradient_of = jax.grad(loss, has_aux=True)
        gradient, (terms, aux) = gradient_of(self._parameters, factors)
        if not self._divides_terms_first:
            return terms, aux, gradient

        def one_by_one() -> Any:
            """Term by term if one counts 0: that term may be 0/0, and 0 times its loss still has a NaN gradient."""
            gradients = []
            for k, factor in enumerate(factors):
                alone = tuple(factor if term == k else 0 for term in range(len(factors)))
                own, _ = gradient_of(self._parameters, alone)
                gradients.append(jax.tree.map(lambda g, factor=factor: jnp.where(factor == 0, 0, g), own))
            return jax.tree.map(lambda *leaves: sum(leaves), *gradients)

        has_zero = jnp.any(jnp.stack([factor == 0 for factor in factors]))
        return terms, aux, lax.cond(has_zero, one_by_one, lambda: gradient)

    # --- after the loop --------------------------------------------------------------------------------------

    def _reduce(self, sums: _Sums) -> _Sums:
        """The sums of all devices: the one reduction of a window."""
        gradient = [shard.reduce(g) for shard, g in zip(self._shards, sums.gradient, strict=True)]
        return _Sums(gradient, *add_up(sums[1:], self.axes))

    def _finish(self, sums: _Sums, totals: tuple[Any, ...], rows: list[Any]) -> Result:
        """The means, in the dtypes of the full batch. If the total weight is 0 the loss is NaN and its gradient 0."""
        total = sums.weight if self.spec.weight is not None else share(self._num_samples, self._weight_unit)

        def mean(sums: Any) -> Any:
            return share(sums, total, jnp.where) if self._divides_at_end else sums

        value = mean(sum(sums.terms))
        if self.spec.reduction == "mean":
            value = jnp.where(sum(totals or (total,)) == 0, jnp.nan, value)
        leaves = jax.tree.leaves(self._parameters)
        gradient = [mean(g).astype(p.dtype) for g, p in zip(sums.gradient, leaves, strict=True)]
        added = []
        for leaf, (like, way) in zip(sums.aux, self.combine.added(self._aux), strict=True):
            if way == "mean":
                leaf = jnp.where(total == 0, jnp.nan, share(leaf, total, jnp.where))
            added.append(leaf if _is_exact(like) else leaf.astype(like.dtype))
        return Result(value.astype(self.terms_dtype), gradient, rows, added)


def _counted(value: Any, factor: Any, dtype: Any) -> Any:
    """The value times the factor, in this dtype."""
    return jnp.asarray(counted(value.astype(dtype), factor, jnp.where), dtype)


def _plus(sums: Any, added: Any) -> Any:
    return sums + mark_varying(added, varying(sums))


def _is_exact(leaf: Any) -> bool:
    """Whether these are integers or booleans."""
    return not jnp.issubdtype(leaf.dtype, jnp.inexact)
