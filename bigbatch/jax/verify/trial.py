"""A loss, a batch, and the ways to take its gradient."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...core.errors import LossError
from ...core.verify import trial
from ...core.verify.result import total_error_of
from ...core.verify.trial import Array, Gradient, Loop, Rows, scales_of
from ..arguments import ArgumentLayout, Arrays, num_rows
from ..checks import check_gradients, parameter_name
from ..internals import calls, dropout_off
from ..keys import for_micro_batch, for_samples
from ..window import Spec, WindowTrace

_DRAWING = ("random_bits", "threefry2x32", "rng_bit_generator")


class Trial(trial.Trial):
    """Dropout is switched off for the comparison, and a note says so."""

    is_random = False

    def __init__(self, spec: Spec, layout: ArgumentLayout, parameters: Any, arrays: Arrays) -> None:
        if spec.rng == "per_sample":
            layout, arrays = for_samples(layout, arrays, ())
        self.reduction = spec.reduction
        self.parameters = parameters
        self.arrays = arrays
        self.window = WindowTrace(spec, layout, arrays, (parameters,))
        numbers, sizes = jnp.arange(num_rows(arrays)), self.window.cut.sizes
        self.micro_batches = [self.window.micro_batch(k, size) for k, size in enumerate(sizes)]
        self.parts = [self.window.cut.take(numbers, k, size).tolist() for k, size in enumerate(sizes)]
        dtypes = [self.window.terms_dtype, *(leaf.dtype for leaf in jax.tree.leaves(parameters))]
        self.epsilon = max(float(jnp.finfo(dtype).eps) for dtype in dtypes)
        self._compiled: dict[int | None, Any] = {}
        self.has_dropout = False
        self.is_random = len(self.micro_batches) > 1 and bool(arrays.keys) and self._draws()
        if self.is_random:
            self.has_dropout = True
            self.is_random = self._draws()
            self.has_dropout = not self.is_random

    def _draws(self) -> bool:
        """Whether another key gives another gradient."""
        other = self.arrays._replace(keys=for_micro_batch(self.arrays.keys, "per_micro_batch", 1, ()))
        found = zip(self._of(self.arrays).values(), self._of(other).values(), strict=True)
        return any(not np.array_equal(a, b, equal_nan=True) for a, b in found)

    def full(self) -> Gradient:
        found = self._mix() if self.is_random else self._of(self.arrays)
        if not any(map(np.any, found.values())):
            raise LossError(
                "the gradient of the whole batch is zero everywhere, so nothing can be compared: use the parameters "
                "that are passed to the loss"
            )
        return found

    def _mix(self) -> Gradient:
        """The gradient of the weighted mean of the micro-batches' losses, as one function."""
        right = self.right_scales()

        def loss(parameters: Any) -> Any:
            return sum(
                scale * term
                for micro_batch, row in zip(self.micro_batches, right, strict=True)
                for term, scale in zip(self.window.loss((parameters,), micro_batch)[0], row, strict=True)
                if scale
            )

        return self._gradient_of(loss)

    def accumulated(self) -> Gradient:
        with self._settled():
            found = jax.jit(lambda parameters: self.window.at((parameters,)).result().gradient)(self.parameters)
        return self._named(jax.tree.unflatten(jax.tree.structure(self.parameters), found))

    def gradient_of(self, rows: Rows, term: int | None = None) -> tuple[Gradient, float]:
        def loss(parameters: Any, rows: list[Any]) -> Any:
            terms = self.window.loss((parameters,), self.arrays._replace(rows=rows))[0]
            return sum(terms) if term is None else terms[term]

        if term not in self._compiled:  # once for each number of rows
            self._compiled[term] = jax.jit(jax.value_and_grad(loss))
        index = np.asarray(rows)
        with self._settled():
            value, found = self._compiled[term](self.parameters, [row[index] for row in self.arrays.rows])
        return self._named(found), float(value)

    def by_loop(self, loop: Loop, order: Rows | None = None) -> tuple[Gradient, Gradient]:
        picked = [self.micro_batches[k] for k in (range(len(self.parts)) if order is None else order)]

        def once() -> Gradient:  # on copies, since a loop may pop from a dict, or donate its arguments
            parameters, micro_batches = jax.tree.map(jnp.array, (self.parameters, picked))
            batches = [self.window.layout.batch(micro_batch) for micro_batch in micro_batches]
            found = loop(parameters, [batch[0] if len(batch) == 1 else batch for batch in batches])
            remedy = "return the gradient of the window with respect to the parameters, in their form"
            check_gradients(found, self.parameters, "step returned", remedy)
            return self._named(found)

        return once(), once()

    def right_scales(self) -> Array:
        weights = [tuple(map(float, self.window.weights(micro_batch))) for micro_batch in self.micro_batches]
        return scales_of(weights, self.reduction)

    def notes(self) -> list[str]:
        if self.has_dropout:
            return [
                "dropout, and every other mask of jax.random.bernoulli, was switched off for the comparison; if such a "
                "mask chooses what the loss is a mean over, that was not compared; in training each micro-batch draws "
                'its own masks, as good as the full batch\'s but not the same; rng="per_sample" makes them the same'
            ]
        if self.is_random:
            return [
                "the loss draws random numbers, and each micro-batch has its own key: the full batch was compared "
                "with the same draws, micro-batch by micro-batch, so neither a wrong weight nor a loss that couples "
                'samples would show; with rng="per_sample" each sample has its own key, and they would'
            ]
        return []

    def explained(self) -> list[str]:
        is_exact = total_error_of(self._of(self.arrays), self.accumulated()) < self.epsilon
        if is_exact or self.is_random or self.has_dropout or not self._draws_inside():
            return []
        return [
            "the loss draws random numbers with a key that is not among its arguments, so each micro-batch draws the "
            "same numbers, and the whole batch draws others: pass the key as an argument"
        ]

    def cut_elsewhere(self, is_mean: Callable[[Gradient, Gradient, Gradient], bool]) -> str | None:
        rows = self.arrays.rows
        if any(row.ndim < 2 for row in rows) or len({row.shape[1] for row in rows}) > 1 or rows[0].shape[1] < 2:
            return None
        middle = rows[0].shape[1] // 2
        halves = [[row[:, :middle] for row in rows], [row[:, middle:] for row in rows]]
        try:
            first, second = (self._of(self.arrays._replace(rows=half)) for half in halves)
        except Exception:  # the loss does not run when cut like this
            return None
        if not is_mean(self._of(self.arrays), first, second):
            return None
        return (
            "the leading axis of the batch, which is cut, is probably time, and its second axis the samples: cut along "
            "the second axis the gradient is right; put the samples first, and swap the axes in the loss"
        )

    def _draws_inside(self) -> bool:
        loss = jax.make_jaxpr(lambda parameters: self.window.loss((parameters,), self.arrays)[0])
        return calls(loss(self.parameters).jaxpr, _DRAWING)

    def _of(self, arrays: Arrays) -> Gradient:
        return self._gradient_of(lambda parameters: sum(self.window.loss((parameters,), arrays)[0]))

    def _gradient_of(self, loss: Callable[[Any], Any]) -> Gradient:
        with self._settled():
            return self._named(jax.jit(jax.grad(loss))(self.parameters))

    def _settled(self) -> AbstractContextManager[Any]:
        return dropout_off() if self.has_dropout else nullcontext()

    def _named(self, gradient: Any) -> Gradient:
        return {parameter_name(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(gradient)}
