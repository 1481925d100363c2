"""Compiled graphs, kept: one for each kind of batch, and few for batches whose shapes vary."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

Specs = Sequence[tf.TypeSpec]


class Graphs:
    """The graphs that were made, each with what it was made of, which must not be forgotten before it.

    A second shape of the same kind of batch gets a graph in which the axes that differ may have any size, as with
    tf.function(reduce_retracing=True). So there are at most as many graphs as axes, however many shapes there are.
    A plain dict would be taken into checkpoints by tf.Module.
    """

    def __init__(self) -> None:
        self.made: dict[Any, Any] = {}
        self._widest: dict[Any, tuple[Specs, Any]] = {}
        """Of each kind, the graph that takes the most shapes, and those."""

    def graph(
        self,
        kind: Any,
        shapes: Any,
        specs: Callable[[], Iterable[tf.TypeSpec]],
        compiled: Callable[[Specs], Any],
        made_of: Any,
    ) -> Any:
        """The graph for batches of this kind and these shapes; made by `compiled` if there is none yet."""
        key = kind, shapes
        if key not in self.made:
            self.made[key] = self._made(kind, tuple(specs()), compiled), made_of
        return self.made[key][0]

    def _made(self, kind: Any, specs: Specs, compiled: Callable[[Specs], Any]) -> Any:
        if kind not in self._widest:
            self._widest[kind] = specs, compiled(specs)
            return self._widest[kind][1]
        before, graph = self._widest[kind]
        wide = tuple(one.most_specific_common_supertype([other]) for one, other in zip(before, specs, strict=True))
        if None in wide:
            return compiled(specs)
        if wide == before:
            return graph
        try:
            self._widest[kind] = wide, compiled(wide)
        except (TypeError, ValueError):  # a model or a loss that wants to know the size
            return compiled(specs)
        return self._widest[kind][1]
