"""What a loss returns beside its value: put together from the micro-batches."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..core.errors import OptionError

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


def combine(asked: Asked, like: Any, other: Any) -> Combine:
    """As asked; "auto" is: rows are concatenated, of the rest integers are added up and others meaned by weight.

    `like` and `other` are the shapes of aux for batches of two sizes: a leaf whose leading axis grows with the
    batch has rows.
    """
    leaves, structure = jax.tree.flatten_with_path(like)
    told = asked.each(like)
    ways = []
    for (path, leaf), longer, way in zip(leaves, jax.tree.leaves(other), told, strict=True):
        has_rows = leaf.shape[:1] != longer.shape[:1]
        ways.append(way_of(leaf, has_rows) if way == "auto" else way)
        if ways[-1] != "concatenate" and has_rows:
            raise OptionError(
                f"aux{jax.tree_util.keystr(path)} has a row for each sample, so a {ways[-1]} over micro-batches means "
                'nothing: pass aux="concatenate", or take it over the samples in the loss'
            )
        if ways[-1] == "concatenate" and not has_rows:
            raise OptionError(
                f"aux{jax.tree_util.keystr(path)} of shape {leaf.shape} has no row for each sample to concatenate: "
                'pass aux="mean" or aux="sum"'
            )
    return Combine(structure, tuple(ways))


def way_of(leaf: Any, has_rows: bool) -> str:
    if has_rows:
        return "concatenate"
    return "mean" if jnp.issubdtype(leaf.dtype, jnp.inexact) else "sum"
