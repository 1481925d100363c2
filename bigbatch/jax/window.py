"""A window: a batch is cut into micro-batches, each is weighed, their gradients add up and are reduced once."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..core.errors import LossError
from ..core.weight import Reduction, as_terms, check_terms, choose, counted, is_number, share, shares
from .arguments import ArgumentLayout, Arrays, num_rows
from .auxiliary import AuxSpec
from .checks import checked_weight
from .distributed import Axes, Shard, add_up, mark_varying
from .internals import varying
from .keys import Rng, for_micro_batch
from .loop import Cut
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
    """In units of the reference."""
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
        axes: The axes of the mesh over which devices share the batch, if this is inside of a `shard_map`.
    """

    def __init__(self, spec: Spec, layout: ArgumentLayout, arrays: Arrays, axes: Axes = ()) -> None:
        self.spec = spec
        self.layout = layout
        self.arrays = arrays
        self.axes = axes
        num_samples = num_rows(arrays)
        size = min(spec.micro_batch_size, num_samples)
        self.cut = Cut(num_samples, size, num_parts=size)
        self._num_samples = num_samples * (int(lax.axis_size(axes)) if axes else 1)  # on all devices
        self._reference = size if spec.weight is None else 1  # what weights are measured by until the total is known

    def result(self, parameters: Any, shards: list[Shard] | None = None) -> Result:
        """The loss, its gradient and aux of the whole batch.

        Args:
            parameters: The arguments to differentiate by.
            shards: Which part of each parameter, and so of its gradient, this device keeps.
        """
        shards = shards or [Shard.inside(leaf, self.axes) for leaf in jax.tree.leaves(parameters)]
        parameters = mark_varying(parameters, self.axes)
        self.inspect(parameters)
        totals = self._totals()

        def body(sums: _Sums, number: Any, size: int) -> tuple[_Sums, list[Any]]:
            micro_batch = self.micro_batch(number, size)  # cut
            weights = self.weights(micro_batch)
            return self._add(sums, parameters, micro_batch, weights, totals)  # the gradient, times its share

        sums, rows = self.cut.loop(body, self._zeros(parameters))
        sums = self._reduce(sums, shards)  # over the devices, once
        return self._finish(sums, totals, self.cut.join(rows), parameters)  # divide by the total

    # --- before the loop -------------------------------------------------------------------------------------

    def inspect(self, parameters: Any) -> None:
        """Traces the loss without running it: finds out what it returns, and raises if it cannot be accumulated."""
        micro_batch = self.micro_batch(0, self.cut.size)

        def loss(parameters: Any, rows: list[Any]) -> Any:
            return self.loss(parameters, micro_batch._replace(rows=rows))

        def trace(num_samples: int) -> Any:
            rows = [jax.ShapeDtypeStruct((num_samples, *row.shape[1:]), row.dtype) for row in self.arrays.rows]
            return jax.jit(loss).trace(parameters, rows)

        is_cut = self.cut.size < self._num_samples
        if is_cut:
            for num in {self.cut.num_samples, self._num_samples}:
                check_uncut(self.layout, self.arrays, num, trace)
        self._terms_like, self._aux_like = jax.eval_shape(self.loss, parameters, micro_batch)
        if is_cut:
            warn_if_recurrent(lambda size: trace(size).jaxpr.jaxpr, self.cut.size)
        self._check_loss(self._terms_like)
        self.num_terms = len(self._terms_like)
        self.terms_dtype = jnp.result_type(*(term.dtype for term in self._terms_like))
        self._dtype = jnp.promote_types(self.terms_dtype, jnp.float32)
        aux_of_more = trace(2 * self.cut.size).out_info[1] if self.spec.has_aux else None
        self.combine = self.spec.aux.combine(self._aux_like, aux_of_more, self.cut.size)
        is_mean = self.spec.reduction == "mean"
        self._has_totals = self.spec.weight is not None and self.num_terms > 1 and is_mean
        self._is_divided = is_mean and not self._has_totals
        weights = jax.eval_shape(lambda: [jnp.asarray(weight) for weight in self.weights(micro_batch)])
        self._weights_vary = varying(weights) | set(self.axes)

    def _check_loss(self, terms: tuple[Any, ...]) -> None:
        if not terms:
            raise LossError("the loss returned 0 terms: return a mean over the micro-batch, or a tuple of them")
        for term in terms:
            if not hasattr(term, "shape") or term.shape or not jnp.issubdtype(term.dtype, jnp.floating):
                kind = jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", term)
                raise LossError(
                    f"the loss returned {kind}: return a mean over the micro-batch, a real scalar, or a "
                    "tuple of them; or (loss, aux) with has_aux=True"
                )
        is_seen = varying(self.arrays.rows)  # empty with check_vma=False
        if reduced := [axis for axis in self.axes if axis in is_seen and axis not in varying(terms)]:
            raise LossError(
                f"the loss is the same on all devices of {reduced[0]!r}, so it was reduced over them already: "
                "return the mean over the device's own micro-batch"
            )

    def _totals(self) -> tuple[Any, ...]:
        """The total weight of each term, if there are several: each is divided by its own before they are added."""
        if not self._has_totals:
            return ()

        def body(totals: tuple[Any, ...], number: Any, size: int) -> tuple[tuple[Any, ...], list[Any]]:
            weights = self.weights(self.micro_batch(number, size))
            return tuple(_plus(t, jnp.asarray(w, self._dtype)) for t, w in zip(totals, weights, strict=True)), []

        zeros = (mark_varying(jnp.zeros((), self._dtype), self._weights_vary),) * self.num_terms
        totals, _ = self.cut.loop(body, zeros)
        return add_up(totals, self.axes)

    def _zeros(self, parameters: Any) -> _Sums:
        def like(parameter: Any) -> Any:
            dtype = self.spec.accumulate_dtype or jnp.promote_types(parameter.dtype, jnp.float32)
            return jnp.zeros_like(parameter, jnp.promote_types(parameter.dtype, dtype))

        def zeros(leaf: Any, dtype: Any) -> Any:
            return mark_varying(jnp.zeros(leaf.shape, dtype), self._weights_vary | varying(leaf))

        def aux_dtype(leaf: Any, way: str) -> Any:
            if _is_exact(leaf):
                return jnp.promote_types(leaf.dtype, jnp.int32) if way == "sum" else self._dtype
            return jnp.promote_types(leaf.dtype, jnp.float32)

        return _Sums(
            [like(p) for p in jax.tree.leaves(parameters)],
            [zeros(term, self._dtype) for term in self._terms_like],
            mark_varying(jnp.zeros((), self._dtype), self._weights_vary),
            [zeros(leaf, aux_dtype(leaf, way)) for leaf, way in self.combine.added(self._aux_like)],
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
        found = self.spec.loss(*args, **kwargs)
        try:
            found = jax.tree.map(jnp.asarray, found)
        except (TypeError, ValueError) as error:
            raise LossError(f"the loss returned {found!r}: return nothing but numbers and arrays") from error
        if not self.spec.has_aux:
            return as_terms(found), None
        if not (isinstance(found, tuple) and len(found) == 2):
            raise LossError("with has_aux=True the loss must return (loss, aux), but it returned something else")
        return as_terms(found[0]), found[1]

    def weights(self, micro_batch: Arrays) -> tuple[Any, ...]:
        """How much this micro-batch counts, for each term: its samples, or what the user's `weight` returns."""
        if self.spec.weight is None:
            return (num_rows(micro_batch),) * self.num_terms
        found = as_terms(self.spec.weight(*self.layout.batch(micro_batch)))
        check_terms(self.num_terms, len(found))
        return tuple(checked_weight(w, self._dtype) for w in found)

    def _add(
        self, sums: _Sums, parameters: Any, micro_batch: Arrays, weights: tuple[Any, ...], totals: tuple[Any, ...]
    ) -> tuple[_Sums, list[Any]]:
        """The sums with one more micro-batch, and the leaves of aux with a row for each sample.

        If totals are known, losses are multiplied by w_k / W before the gradient is taken. If not, gradients are
        multiplied by w_k / reference, in the dtype in which they add up, and divided after the loop.
        """
        before = shares(weights, totals, where=jnp.where) if totals else (1.0,) * self.num_terms
        terms, aux, gradient = self._gradient(parameters, micro_batch, before)
        weight = share(weights[0], self._reference)
        after = weight if self._is_divided else 1.0
        added = _Sums(
            [_counted(g, after, s.dtype) for g, s in zip(jax.tree.leaves(gradient), sums.gradient, strict=True)],
            [_counted(term, b * after, self._dtype) for term, b in zip(terms, before, strict=True)],
            jnp.asarray(weight, self._dtype),
            [_counted(leaf, weight if way == "mean" else 1, s.dtype)
             for (leaf, way), s in zip(self.combine.added(aux), sums.aux, strict=True)],
        )  # fmt: skip
        return jax.tree.map(_plus, sums, added), self.combine.rows(aux)

    def _gradient(self, parameters: Any, micro_batch: Arrays, by: tuple[Any, ...]) -> tuple[Any, Any, Any]:
        """The terms, aux, and the gradient of the sum of the terms, each multiplied by its share."""

        def loss(parameters: Any, by: tuple[Any, ...]) -> tuple[Any, Any]:
            terms, aux = self.loss(parameters, micro_batch)
            return sum(_counted(term, b, self.terms_dtype) for term, b in zip(terms, by, strict=True)), (terms, aux)

        gradient_of = jax.grad(loss, has_aux=True)
        gradient, (terms, aux) = gradient_of(parameters, by)
        if not self._has_totals:
            return terms, aux, gradient

        def one_by_one() -> Any:
            """Term by term, if one counts 0: it may be 0/0, and 0 times its loss would still have a NaN gradient."""
            found = []
            for k, b in enumerate(by):
                alone = tuple(b if term == k else 0 for term in range(self.num_terms))
                found.append(jax.tree.map(lambda g, b=b: jnp.where(b == 0, 0, g), gradient_of(parameters, alone)[0]))
            return jax.tree.map(lambda *gradients: sum(gradients), *found)

        has_zero = jnp.any(jnp.stack([b == 0 for b in by]))
        return terms, aux, lax.cond(has_zero, one_by_one, lambda: gradient)

    # --- after the loop --------------------------------------------------------------------------------------

    def _reduce(self, sums: _Sums, shards: list[Shard]) -> _Sums:
        """The sums of all devices: the one reduction of a window."""
        gradient = [shard.reduce(g) for shard, g in zip(shards, sums.gradient, strict=True)]
        return _Sums(gradient, *add_up(sums[1:], self.axes))

    def _finish(self, sums: _Sums, totals: tuple[Any, ...], rows: list[Any], parameters: Any) -> Result:
        """The means, in the dtypes of the full batch. If the total weight is 0 the loss is NaN and its gradient 0."""
        total = sums.weight if self.spec.weight is not None else share(self._num_samples, self._reference)

        def mean(sums: Any) -> Any:
            return share(sums, total, _where(total)) if self._is_divided else sums

        value = mean(sum(sums.terms))
        if self.spec.reduction == "mean":
            value = jnp.where(sum(totals or (total,)) == 0, jnp.nan, value)
        gradient = [mean(g).astype(p.dtype) for g, p in zip(sums.gradient, jax.tree.leaves(parameters), strict=True)]
        added = []
        for leaf, (like, way) in zip(sums.aux, self.combine.added(self._aux_like), strict=True):
            if way == "mean":
                leaf = jnp.where(total == 0, jnp.nan, share(leaf, total, _where(total)))
            added.append(leaf if _is_exact(like) else leaf.astype(like.dtype))
        return Result(value.astype(self.terms_dtype), gradient, rows, added)


def _where(value: Any) -> Any:
    """The `where` for core/weight.py: plain numbers are compared while tracing."""
    return choose if is_number(value) else jnp.where


def _counted(value: Any, by: Any, dtype: Any) -> Any:
    """The value times its share, in this dtype."""
    return jnp.asarray(counted(value.astype(dtype), by, _where(by)), dtype)


def _plus(sums: Any, added: Any) -> Any:
    return sums + mark_varying(added, varying(sums))


def _is_exact(leaf: Any) -> bool:
    """Whether these are integers or booleans."""
    return not jnp.issubdtype(leaf.dtype, jnp.inexact)
