"""The aux of a loss (`has_aux=True`): combines that of the micro-batches into that of the batch."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr

from ..core.errors import OptionError
from ..core.options import check_choice
from .arguments import is_typed_key

_WAYS = ("auto", "concatenate", "sum", "mean")


@dataclass(frozen=True)
class Combine:
    """How each leaf of aux is combined."""

    structure: Any
    ways: tuple[str, ...]

    def rows(self, aux: Any) -> list[Any]:
        """The leaves that are concatenated."""
        return [leaf for leaf, way in self._with_ways(aux) if way == "concatenate"]

    def added(self, aux: Any) -> list[tuple[Any, str]]:
        """The leaves that are added up, each with "sum" or "mean"."""
        return [(leaf, way) for leaf, way in self._with_ways(aux) if way != "concatenate"]

    def join(self, rows: list[Any], added: list[Any]) -> Any:
        """The aux of the whole batch."""
        left = {True: iter(rows), False: iter(added)}
        return jax.tree.unflatten(self.structure, [next(left[way == "concatenate"]) for way in self.ways])

    def _with_ways(self, aux: Any) -> list[tuple[Any, str]]:
        return list(zip(jax.tree.leaves(aux), self.ways, strict=True))


@dataclass(frozen=True)
class AuxSpec:
    """The option `aux`: one word for all of aux, or a pytree with a word for each part."""

    structure: Any
    words: tuple[Any, ...]

    @classmethod
    def of(cls, aux: Any) -> "AuxSpec":
        words, structure = jax.tree.flatten(aux)
        for word in words:
            check_choice("aux", word, _WAYS)
        return cls(structure, tuple(words))

    def combine(self, like: Any, longer: Any, size: int) -> Combine:
        """How to combine each leaf: `like` is aux for `size` samples, `longer` for twice as many.

        A leaf that is longer there has a row for each sample.
        """
        leaves, structure = jax.tree.flatten_with_path(like)
        aux = jax.tree.unflatten(self.structure, self.words)
        try:
            words = jax.tree.leaves(jax.tree.broadcast(aux, like))
        except ValueError as error:
            raise OptionError(
                f"aux is {aux} but the loss returns {structure}: pass one word for all of it, or a pytree of the same "
                "structure"
            ) from error
        each = zip(leaves, jax.tree.leaves(longer), words, strict=True)
        ways = [_way_of(f"aux{keystr(path)}", leaf, more, word, size) for (path, leaf), more, word in each]
        return Combine(structure, tuple(ways))


def _way_of(name: str, leaf: Any, more: Any, word: str, size: int) -> str:
    """How one leaf is combined; raises OptionError if it cannot be."""
    has_rows = leaf.shape != more.shape
    if has_rows and (leaf.shape, more.shape) != ((size, *leaf.shape[1:]), (2 * size, *leaf.shape[1:])):
        raise OptionError(
            f"{name} has the shape {leaf.shape} for {size} samples and {more.shape} for {2 * size}: an array that "
            "grows with the batch must have the samples, and nothing else, along its leading axis"
        )
    if has_rows and word in ("sum", "mean"):
        raise OptionError(
            f"{name} has a row for each sample, so a {word} over micro-batches means nothing: "
            'pass aux="concatenate", or take it over the samples in the loss'
        )
    if not has_rows and word == "concatenate":
        raise OptionError(
            f'{name} of shape {leaf.shape} has no row for each sample to concatenate: pass aux="mean" or aux="sum"'
        )
    if word != "auto":
        return word
    if has_rows:
        return "concatenate"
    if is_typed_key(leaf):
        raise OptionError(f"{name} is the PRNG key of one micro-batch, and the batch has none: leave it out")
    if leaf.dtype == bool:
        raise OptionError(
            f"{name} is true or false for each micro-batch, and there is no one value for the whole batch: return a "
            'number, or pass aux="sum" to count how many are true'
        )
    return "mean" if jnp.issubdtype(leaf.dtype, jnp.inexact) else "sum"
