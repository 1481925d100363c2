"""A whole window: one `lax.scan` over its full micro-batches, then what is left over, then one reduction."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..core.errors import LossError
from ..core.weight import Reduction, as_terms, check_terms, is_number
from .aux import Asked, Combine, combine
from .batch import Arrays, Form, checked_weight, num_rows
from .distributed import Axes, Shard, vary, varying
from .keys import Rng, for_micro_batch
from .verify.time_major import warn_if_recurrent
from .verify.uncut import check_uncut

Loss = Callable[..., Any]
Body = Callable[[Any, Any, int], tuple[Any, list[Any]]]


@dataclass(frozen=True)
class Window:
    """Stands for

        sums = total = 0
        for micro_batch in micro_batches(batch):
            sums += weight(micro_batch) * jax.grad(loss)(parameters, micro_batch)
            total += weight(micro_batch)
        gradient = sums / total

    as one compiled loop, and for the loss and what it returns beside it likewise.
    """

    loss: Loss
    micro_batch_size: int
    weight: Callable[..., Any] | None
    has_aux: bool
    reduction: Reduction
    aux: Asked
    rng: Rng
    accumulate_dtype: Any


class Sums(NamedTuple):
    """What is added up over the micro-batches."""

    gradient: list[Any]
    terms: list[Any]
    count: Any
    aux: list[Any]


class Result(NamedTuple):
    """Of the whole batch."""

    value: Any
    gradient: list[Any]
    """By the leaves of the parameters."""
    aux_rows: list[Any]
    aux_added: list[Any]


class Run:
    """One trace of a window: on every device with its part of the batch, where `axes` are those of several."""

    def __init__(self, window: Window, form: Form, arrays: Arrays, axes: Axes = ()) -> None:
        self.window = window
        self.form = form
        self.arrays = arrays
        self.axes = axes
        self.num_samples = num_rows(arrays)
        self.size = min(window.micro_batch_size, self.num_samples)
        self.num_full = self.num_samples // self.size

    def result(self, parameters: Any, shards: list[Shard] | None = None) -> Result:
        """What is reduced over devices is reduced here, once; `shards` are the parts of parameters that they keep."""
        shards = shards or [Shard.inside(leaf, self.axes) for leaf in jax.tree.leaves(parameters)]
        parameters = vary(parameters, self.axes)
        self.look(parameters)
        totals = self.totals() if self.has_totals else ()

        def body(sums: Sums, number: Any, size: int) -> tuple[Sums, list[Any]]:
            micro_batch = self.micro_batch(number, size)
            weights = self.weights(micro_batch)
            scales = [share(*pair) for pair in zip(weights, totals, strict=True)] if totals else [1] * self.num_terms
            terms, aux, gradient = self.gradient(parameters, micro_batch, scales)
            count = weights[0] if weights else size / self.size
            factor = count if self.is_divided else 1
            found = Sums(
                [times(g, factor, s.dtype) for g, s in zip(jax.tree.leaves(gradient), sums.gradient, strict=True)],
                [times(term, scale * factor, self.dtype) for term, scale in zip(terms, scales, strict=True)],
                jnp.asarray(count, self.dtype),
                [times(leaf, count if way == "mean" else 1, s.dtype)
                 for (leaf, way), s in zip(self.combine.added(aux), sums.aux, strict=True)],
            )  # fmt: skip
            return jax.tree.map(plus, sums, found), self.combine.rows(aux)

        sums, rows = self.loop(body, self.zeros(parameters))
        sums = Sums([shard.reduce(g) for shard, g in zip(shards, sums.gradient, strict=True)],
                    *(lax.psum(sums[1:], self.axes) if self.axes else sums[1:]))  # fmt: skip
        return self.finished(sums, totals, rows, parameters)

    # --- before the loop -------------------------------------------------------------------------------------

    def look(self, parameters: Any) -> None:
        """What the loss returns, from a trace that never runs."""
        micro_batch = self.micro_batch(0, self.size)

        def trace(num_samples: int) -> Any:
            return self.trace(parameters, micro_batch, num_samples)

        num_all = self.num_samples * (lax.axis_size(self.axes) if self.axes else 1)
        is_cut = self.size < num_all
        if is_cut:
            for num in {self.num_samples, num_all}:
                check_uncut(self.form, self.arrays, num, trace)
        self.terms_like, self.aux_like = jax.eval_shape(self.loss, parameters, micro_batch)
        if is_cut:
            warn_if_recurrent(lambda size: trace(size).jaxpr.jaxpr, self.size)
        terms = self.terms_like
        if not terms:
            raise LossError("the loss returned 0 terms: return a mean over the micro-batch, or a tuple of them")
        for term in terms:
            if not hasattr(term, "shape") or term.shape or not jnp.issubdtype(term.dtype, jnp.floating):
                raise LossError(
                    f"the loss returned {described(term)}: return a mean over the micro-batch, a real scalar, or a "
                    "tuple of them; or (loss, aux) with has_aux=True"
                )
        self.check_unreduced(terms)
        self.num_terms = len(terms)
        self.terms_dtype = jnp.result_type(*(term.dtype for term in terms))
        self.dtype = jnp.promote_types(self.terms_dtype, jnp.float32)
        of_more = trace(2 * self.size).out_info[1] if self.window.has_aux else None
        self.combine: Combine = combine(self.window.aux, self.aux_like, of_more, self.size)
        self.has_totals = self.window.weight is not None and self.num_terms > 1 and self.window.reduction == "mean"
        self.is_divided = self.window.reduction == "mean" and not self.has_totals
        weights = jax.eval_shape(lambda: [jnp.asarray(weight) for weight in self.weights(micro_batch)])
        self.weights_vary = varying(weights) | set(self.axes)

    def trace(self, parameters: Any, micro_batch: Arrays, num_samples: int) -> Any:
        """The loss traced with so many samples."""

        def loss(parameters: Any, rows: list[Any]) -> Any:
            return self.loss(parameters, micro_batch._replace(rows=rows))

        rows = [jax.ShapeDtypeStruct((num_samples, *row.shape[1:]), row.dtype) for row in self.arrays.rows]
        return jax.jit(loss).trace(parameters, rows)

    def totals(self) -> tuple[Any, ...]:
        """The total weight of each term; where there are several, each is divided by its own before it is added."""

        def body(totals: tuple[Any, ...], number: Any, size: int) -> tuple[tuple[Any, ...], list[Any]]:
            weights = self.weights(self.micro_batch(number, size))
            return tuple(plus(t, jnp.asarray(w, self.dtype)) for t, w in zip(totals, weights, strict=True)), []

        zeros = (vary(jnp.zeros((), self.dtype), self.weights_vary),) * self.num_terms
        totals, _ = self.loop(body, zeros)
        return lax.psum(totals, self.axes) if self.axes else totals

    def zeros(self, parameters: Any) -> Sums:
        def like(parameter: Any) -> Any:
            dtype = self.window.accumulate_dtype or jnp.promote_types(parameter.dtype, jnp.float32)
            return jnp.zeros_like(parameter, jnp.promote_types(parameter.dtype, dtype))

        def beside(leaf: Any, dtype: Any) -> Any:
            return vary(jnp.zeros(leaf.shape, dtype), self.weights_vary | varying(leaf))

        return Sums(
            [like(p) for p in jax.tree.leaves(parameters)],
            [beside(term, self.dtype) for term in self.terms_like],
            vary(jnp.zeros((), self.dtype), self.weights_vary),
            [beside(leaf, self.wide(leaf, way)) for leaf, way in self.combine.added(self.aux_like)],
        )

    def wide(self, leaf: Any, way: str) -> Any:
        """The dtype in which leaves of aux are added up."""
        if is_whole(leaf):
            return jnp.promote_types(leaf.dtype, jnp.int32) if way == "sum" else self.dtype
        return jnp.promote_types(leaf.dtype, jnp.float32)

    # --- one micro-batch -------------------------------------------------------------------------------------

    def micro_batch(self, number: Any, size: int) -> Arrays:
        """The micro-batch of this number; all before it are full.

        A full one takes every `num_full`th sample, so that where devices share the batch each has a part of it.
        """
        is_only = self.size == self.num_samples and not self.axes
        keys = self.arrays.keys if is_only else for_micro_batch(self.arrays.keys, self.window.rng, number, self.axes)
        end = self.num_full * self.size

        def taken(row: Any) -> Any:
            if size < self.size:
                return row[end:]
            strided = row[:end].reshape(self.size, self.num_full, *row.shape[1:])
            return lax.dynamic_index_in_dim(strided, number, 1, keepdims=False)

        return Arrays([taken(row) for row in self.arrays.rows], keys, self.arrays.whole)

    def loss(self, parameters: Any, micro_batch: Arrays) -> tuple[tuple[Any, ...], Any]:
        """The terms of the loss, and aux."""
        args, kwargs = self.form.bind(parameters, micro_batch)
        found = self.window.loss(*args, **kwargs)
        try:
            found = jax.tree.map(jnp.asarray, found)
        except (TypeError, ValueError) as error:
            raise LossError(
                f"the loss returned {found!r}: return numbers alone, as arrays or as Python has them"
            ) from error
        if not self.window.has_aux:
            return as_terms(found), None
        if not (isinstance(found, tuple) and len(found) == 2):
            raise LossError("with has_aux the loss returns (loss, aux), but this one returned something else")
        return as_terms(found[0]), found[1]

    def weights(self, micro_batch: Arrays) -> tuple[Any, ...]:
        """Over how many each term is a mean; nothing where that is the samples."""
        if self.window.weight is None:
            return ()
        found = as_terms(self.window.weight(*self.form.batch(micro_batch)))
        check_terms(self.num_terms, len(found))
        return tuple(checked_weight(w, self.dtype) for w in found)

    def gradient(self, parameters: Any, micro_batch: Arrays, scales: list[Any]) -> tuple[Any, Any, Any]:
        """The terms, aux, and the gradient of the sum of the scaled terms."""

        def scaled(parameters: Any, scales: list[Any]) -> tuple[Any, Any]:
            terms, aux = self.loss(parameters, micro_batch)
            return sum(times(term, s, self.terms_dtype) for term, s in zip(terms, scales, strict=True)), (terms, aux)

        gradient_of = jax.grad(scaled, has_aux=True)
        gradient, (terms, aux) = gradient_of(parameters, scales)
        if not self.has_totals:
            return terms, aux, gradient

        def one_by_one() -> Any:
            """A term that counts zero may be 0/0, and the zero that it is multiplied by does not help its gradient."""
            found = [
                jax.tree.map(lambda g, s=scale: jnp.where(s == 0, 0, g), gradient_of(parameters, only(scales, k))[0])
                for k, scale in enumerate(scales)
            ]
            return jax.tree.map(lambda *gradients: sum(gradients), *found)

        has_zero = jnp.any(jnp.stack([scale == 0 for scale in scales]))
        return terms, aux, lax.cond(has_zero, one_by_one, lambda: gradient)

    def check_unreduced(self, terms: tuple[Any, ...]) -> None:
        is_seen = varying(self.arrays.rows)  # nothing is, with check_vma=False
        if done := [axis for axis in self.axes if axis in is_seen and axis not in varying(terms)]:
            raise LossError(
                f"the loss is the same on all devices of {done[0]!r}, so it was reduced over them already: "
                "return the mean over the device's own micro-batch"
            )

    # --- the loop, and what comes after it ---------------------------------------------------------------------

    def loop(self, body: Body, carry: Any) -> tuple[Any, list[Any]]:
        """Runs `body(carry, number, size) -> carry, rows` for each micro-batch, and joins the rows."""
        if self.num_full == 1:
            carry, rows = body(carry, 0, self.size)
        else:
            carry, rows = lax.scan(lambda carry, k: body(carry, k, self.size), carry, jnp.arange(self.num_full))
            rows = [row.swapaxes(0, 1).reshape(-1, *row.shape[2:]) for row in rows]
        if rest := self.num_samples % self.size:  # shapes are fixed in JAX, so the scan has no short micro-batch
            carry, last = body(carry, self.num_full, rest)
            rows = [jnp.concatenate(pair) for pair in zip(rows, last, strict=True)]
        return carry, rows

    def finished(self, sums: Sums, totals: tuple[Any, ...], rows: list[Any], parameters: Any) -> Result:
        """Sums divided once, in the dtypes that the full batch has."""
        count = sums.count
        if self.window.weight is None:
            num_devices = lax.axis_size(self.axes) if self.axes else 1
            count = self.num_samples / self.size * num_devices
        gradient = [
            (share(g, count) if self.is_divided else g).astype(p.dtype)
            for g, p in zip(sums.gradient, jax.tree.leaves(parameters), strict=True)
        ]
        value = sum(sums.terms)
        if self.is_divided:
            value = value / count
        elif totals:
            value = jnp.where(sum(totals) == 0, jnp.nan, value)
        added = [
            (leaf / count if way == "mean" else leaf).astype(leaf.dtype if is_whole(like) else like.dtype)
            for leaf, (like, way) in zip(sums.aux, self.combine.added(self.aux_like), strict=True)
        ]
        return Result(value.astype(self.terms_dtype), gradient, rows, added)


def described(value: Any) -> Any:
    """Arrays as JAX writes them in its own messages: float32[8,2]."""
    return jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", value)


def plus(sums: Any, found: Any) -> Any:
    return sums + vary(found, varying(sums))


def times(value: Any, factor: Any, dtype: Any) -> Any:
    """The product in this dtype; what counts zero is zero, even if it is not a number (0/0)."""
    value = value.astype(dtype)
    if is_number(factor):
        return value if factor == 1 else value * factor if factor else jnp.zeros_like(value)
    return jnp.where(factor == 0, 0, value * factor).astype(dtype)


def share(part: Any, whole: Any) -> Any:
    """part / whole, and nothing of nothing is nothing."""
    if is_number(whole):
        return part / whole if whole else 0 * part
    return jnp.where(whole == 0, 0, part / jnp.where(whole == 0, 1, whole))


def only(scales: list[Any], number: int) -> list[Any]:
    return [scale if k == number else 0 for k, scale in enumerate(scales)]


def is_whole(leaf: Any) -> bool:
    """Whether these are integers or truth values."""
    return not jnp.issubdtype(leaf.dtype, jnp.inexact)
