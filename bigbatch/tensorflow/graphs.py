"""A cache of compiled graphs: one for each kind of batch, and few if the shapes of batches vary."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

_Specs = Sequence[tf.TypeSpec]


class Graphs:
    """The graphs that were made.

    A second shape of the same kind of batch gets a graph in which the axes that differ may have any size, as with
    tf.function(reduce_retracing=True). So there are at most as many graphs as axes, however many shapes there are.
    tf.Module would take a plain dict into checkpoints.
    """

    def __init__(self) -> None:
        self.made: dict[Any, Any] = {}
        self._widest: dict[Any, tuple[_Specs, Any]] = {}
        """Of each kind, the graph that takes the most shapes, and those shapes."""

    def get(
        self,
        kind: Any,
        shapes: Any,
        specs: Callable[[], Iterable[tf.TypeSpec]],
        compiled: Callable[[_Specs], Any],
        made_of: Any,
    ) -> Any:
        """The graph for batches of this kind and these shapes; a new one if there is none.

        Args:
            kind: Equal for batches that one graph could take.
            shapes: The shapes of the tensors.
            specs: Returns the types of the tensors.
            compiled: Makes a graph for these types.
            made_of: Kept as long as the graph.
        """
        key = kind, shapes
        if key not in self.made:
            self.made[key] = self._made(kind, tuple(specs()), compiled), made_of
        return self.made[key][0]

    def _made(self, kind: Any, specs: _Specs, compiled: Callable[[_Specs], Any]) -> Any:
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
        except (TypeError, ValueError):  # the model or the loss must know the size
            return compiled(specs)
        return self._widest[kind][1]
