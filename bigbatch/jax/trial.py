"""The parameters and a batch in float64, and the ways to take the gradient."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core.audit import Gradient, Loop, Rows
from ..core.diagnosis import Array
from ..core.verification import FLOOR
from ..core.weight import scales, totals
from ..core.window import cuts
from .arguments import Arrays, Form, num_rows
from .keys import for_micro_batch, for_samples
from .window import Run, Window


class Trial:
    """As core/audit.py wants it."""

    def __init__(self, window: Window, form: Form, parameters: Any, arrays: Arrays) -> None:
        if window.rng == "per_sample":
            form, arrays = for_samples(form, arrays, ())
        self.reduction = window.reduction
        self.parameters = parameters
        self.arrays = arrays
        self.run = Run(window, form, arrays)
        self.run.look((parameters,))
        sizes = [part.stop - part.start for part in cuts(num_rows(arrays), self.run.size)]
        self.micro_batches = [self.run.micro_batch(number, size) for number, size in enumerate(sizes)]
        numbered = Run(window, form, arrays._replace(rows=[jnp.arange(num_rows(arrays))]))
        self.parts = [numbered.micro_batch(number, size).rows[0].tolist() for number, size in enumerate(sizes)]
        self.epsilon, self.floor = float(np.finfo(np.float64).eps), FLOOR
        self._compiled: dict[int | None, Any] = {}
        self.has_dropout = False
        self.draws = len(sizes) > 1 and self._draws()
        if self.draws:
            self.has_dropout = True
            self.draws = self._draws()
            self.has_dropout = not self.draws

    def _draws(self) -> bool:
        """Whether another key gives another gradient."""
        other = self.arrays._replace(keys=for_micro_batch(self.arrays.keys, "per_micro_batch", 1, ()))
        found = zip(self._of(self.arrays).values(), self._of(other).values(), strict=True)
        return any(not np.array_equal(a, b, equal_nan=True) for a, b in found)

    def full(self) -> Gradient:
        if not self.draws:
            return self._of(self.arrays)
        right = self.right_scales()

        def loss(parameters: Any) -> Any:
            return sum(
                scale * term
                for micro_batch, row in zip(self.micro_batches, right, strict=True)
                for term, scale in zip(self.run.loss((parameters,), micro_batch)[0], row, strict=True)
                if scale
            )

        return self._named(jax.jit(jax.grad(loss))(self.parameters))

    def accumulated(self) -> Gradient:
        with self._settled():
            found = jax.jit(self.run.result)((self.parameters,)).gradient
        return self._named(jax.tree.unflatten(jax.tree.structure(self.parameters), found))

    def of(self, rows: Rows, term: int | None = None) -> tuple[Gradient, float]:
        def loss(parameters: Any, rows: list[Any]) -> Any:
            terms = self.run.loss((parameters,), self.arrays._replace(rows=rows))[0]
            return sum(terms) if term is None else terms[term]

        if term not in self._compiled:  # once for each size
            self._compiled[term] = jax.jit(jax.value_and_grad(loss))
        index = np.asarray(rows)
        with self._settled():
            value, found = self._compiled[term](self.parameters, [row[index] for row in self.arrays.rows])
        return self._named(found), float(value)

    def by_loop(self, loop: Loop, order: Rows | None = None) -> tuple[Gradient, Gradient]:
        order = range(len(self.parts)) if order is None else order
        batches = [self.run.form.batch(self.micro_batches[number]) for number in order]
        given = [batch[0] if len(batch) == 1 else batch for batch in batches]
        first, again = (self._named(loop(self.parameters, given)) for _ in range(2))
        return first, again

    def right_scales(self) -> Array:
        weights = [self._weights_of(micro_batch) for micro_batch in self.micro_batches]
        total = totals(weights)
        return np.array([scales(weight, total, self.reduction) for weight in weights])

    def _weights_of(self, micro_batch: Arrays) -> tuple[float, ...]:
        found = self.run.weights(micro_batch) or (num_rows(micro_batch),) * self.run.num_terms
        return tuple(map(float, found))

    def notes(self) -> list[str]:
        if self.has_dropout:
            return [
                "dropout, and every other mask of jax.random.bernoulli, was switched off for the comparison; if such a "
                "mask chooses what the loss is a mean over, that was not compared; in training each micro-batch draws "
                'masks of its own, as good as the full batch\'s but not the same; rng="per_sample" makes them the same'
            ]
        if self.draws:
            return [
                "the loss draws random numbers, and each micro-batch has a key of its own: the full batch was compared "
                "with the same draws, micro-batch by micro-batch, so neither a wrong weight nor a loss that couples "
                'samples would show; rng="per_sample" gives each sample its own key, and then they do'
            ]
        return []

    def layer_causes(self) -> list[str]:
        return []

    @contextmanager
    def quiet(self) -> Iterator[None]:
        yield

    without_dropout = without_hooks = quiet

    def blind_spots(self) -> list[str]:
        return []

    loop_causes = blind_spots

    def cut_elsewhere(self, is_mean: Callable[[Gradient, Gradient, Gradient], bool]) -> str | None:
        return None

    def carried_over(self) -> list[str]:
        return []

    has_hooks = False

    @property
    def is_random(self) -> bool:
        return self.draws

    def _of(self, arrays: Arrays) -> Gradient:
        with self._settled():
            found = jax.jit(jax.grad(lambda p: sum(self.run.loss((p,), arrays)[0])))(self.parameters)
        return self._named(found)

    def _settled(self) -> AbstractContextManager[Any]:
        return dropout_off() if self.has_dropout else nullcontext()

    def _named(self, gradient: Any) -> Gradient:
        return {name_of(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(gradient)}


def name_of(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".") or "parameters"


@contextmanager
def dropout_off() -> Iterator[None]:
    """Inside, every mask of Flax, Equinox and of `jax.random.bernoulli` itself keeps all.

    Nothing is compiled there: a function of the user's that is would remember what it saw.
    """
    bernoulli = jax.random.bernoulli

    def keep(key: Any, p: Any = 0.5, shape: Any = None, **options: Any) -> Any:
        return jnp.ones(jnp.shape(p) if shape is None else shape, bool)

    jax.random.bernoulli = keep
    try:
        with jax.disable_jit():
            yield
    finally:
        jax.random.bernoulli = bernoulli
