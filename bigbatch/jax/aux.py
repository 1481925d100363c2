"""What a loss returns beside its value: put together from the micro-batches."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr

from ..core.errors import OptionError
from .batch import is_typed_key

WAYS = ("auto", "concatenate", "sum", "mean")


@dataclass(frozen=True)
class Combine:
    """How each leaf of aux is put together."""

    structure: Any
    ways: tuple[str, ...]

    def rows(self, aux: Any) -> list[Any]:
        """The leaves that are concatenated."""
        return [leaf for leaf, way in self._with_ways(aux) if way == "concatenate"]

    def added(self, aux: Any) -> list[tuple[Any, str]]:
        """The leaves that are added up, and whether for a sum or for a mean."""
        return [(leaf, way) for leaf, way in self._with_ways(aux) if way != "concatenate"]

    def together(self, rows: list[Any], added: list[Any]) -> Any:
        """aux as the whole batch has it."""
        left = {True: iter(rows), False: iter(added)}
        return jax.tree.unflatten(self.structure, [next(left[way == "concatenate"]) for way in self.ways])

    def _with_ways(self, aux: Any) -> list[tuple[Any, str]]:
        return list(zip(jax.tree.leaves(aux), self.ways, strict=True))


@dataclass(frozen=True)
class Asked:
    """How the user wants it: a word for all of aux, or a nest with a word for each part."""

    structure: Any
    words: tuple[Any, ...]

    @classmethod
    def of(cls, nest: Any) -> "Asked":
        words, structure = jax.tree.flatten(nest)
        for word in words:
            if word not in WAYS:
                raise OptionError(f"aux={word!r} is unknown: pass {', '.join(map(repr, WAYS[:-1]))} or {WAYS[-1]!r}")
        return cls(structure, tuple(words))

    def each(self, like: Any) -> list[str]:
        """The word for each leaf of aux."""
        nest = jax.tree.unflatten(self.structure, self.words)
        try:
            return list(jax.tree.leaves(jax.tree.broadcast(nest, like)))
        except ValueError as error:
            raise OptionError(
                f"aux is {nest} but the loss returns {jax.tree.structure(like)}: "
                "pass one word for all of it, or a nest of the same form"
            ) from error


def combine(asked: Asked, like: Any, other: Any, size: int) -> Combine:
    """As asked; "auto" is: rows are concatenated, of the rest integers are added up and others meaned by weight.

    `like` and `other` are the shapes of aux for `size` samples and for twice as many, which tells what has rows.
    """
    leaves, structure = jax.tree.flatten_with_path(like)
    longer = jax.tree.leaves(other)
    parts = zip(leaves, longer, asked.each(like), strict=True)
    return Combine(
        structure, tuple(way_of(f"aux{keystr(path)}", leaf, more, word, size) for (path, leaf), more, word in parts)
    )


def way_of(name: str, leaf: Any, more: Any, word: str, size: int) -> str:
    """How one leaf is put together, if that can be."""
    has_rows = leaf.shape != more.shape
    if has_rows and (leaf.shape, more.shape) != ((size, *leaf.shape[1:]), (2 * size, *leaf.shape[1:])):
        raise OptionError(
            f"{name} has the shape {leaf.shape} for {size} samples and {more.shape} for {2 * size}: what grows with "
            "the batch has to have the samples, and nothing else, along its leading axis"
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
        raise OptionError(f"{name} is a key of one micro-batch, of which nothing is made for the whole: leave it out")
    if leaf.dtype == bool:
        raise OptionError(
            f"{name} is true or false for each micro-batch, and nobody knows what that makes of the whole: return a "
            'count, or pass aux="sum" to count those that are true'
        )
    return "mean" if jnp.issubdtype(leaf.dtype, jnp.inexact) else "sum"
