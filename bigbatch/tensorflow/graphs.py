"""A cache of traced graphs: one for each structure of a batch, and few if the shapes of batches vary."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

_Specs = Sequence[tf.TypeSpec]


class Graphs:
    """The graphs that were traced. (A tf.Module would save a plain dict in checkpoints.)

    A second shape of the same structure gets a graph in which the axes that differ may have any size, as with
    tf.function(reduce_retracing=True). So there are at most as many graphs as axes, however many shapes there are.
    """

    def __init__(self) -> None:
        self.made: dict[Any, Any] = {}
        self._widest: dict[Any, tuple[_Specs, Any]] = {}
        """For each structure, the shapes and the graph that takes most of them."""

    def get(
        self,
        structure: Any,
        shapes: Any,
        specs: Callable[[], Iterable[tf.TypeSpec]],
        compiled: Callable[[_Specs], Any],
        made_of: Any,
    ) -> Any:
        """The graph for batches of this structure and these shapes.

        If there is none, `compiled(specs())` traces it. `made_of` is kept as long as the graph.
        """
        key = structure, shapes
        if key not in self.made:
            self.made[key] = self._made(structure, tuple(specs()), compiled), made_of
        return self.made[key][0]

    def _made(self, structure: Any, specs: _Specs, compiled: Callable[[_Specs], Any]) -> Any:
        if structure not in self._widest:
            self._widest[structure] = specs, compiled(specs)
            return self._widest[structure][1]
        before, graph = self._widest[structure]
        wide = tuple(one.most_specific_common_supertype([other]) for one, other in zip(before, specs, strict=True))
        if None in wide:
            return compiled(specs)
        if wide == before:
            return graph
        try:
            self._widest[structure] = wide, compiled(wide)
        except (TypeError, ValueError):  # the model or the loss needs to know the size
            return compiled(specs)
        return self._widest[structure][1]
