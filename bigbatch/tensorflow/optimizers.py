"""Several optimizers with some variables each, which step together like one."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import tensorflow as tf

from ..core.errors import OptionError
from .checks import name_of
from .distributed.replicas import as_tf_variable
from .gradients import Gradient
from .optimizer import Optimizer

_REMEDY = "pass pairs: [(optimizer, variables), …]"


def of(optimizer: Any, strategy: tf.distribute.Strategy) -> "AnyOptimizer":
    """An `Optimizer`, or `Optimizers` if the user passed a list of them."""
    return Optimizers(optimizer, strategy) if isinstance(optimizer, list | tuple) else Optimizer(optimizer, strategy)


class _Part:
    """The variables that one of the optimizers steps, as it wants to see a model."""

    def __init__(self, trainable_variables: Sequence[Any]) -> None:
        self.trainable_variables = trainable_variables


class Optimizers(tf.Module):
    """Steps several optimizers, all or none, each on its own variables; has the methods of `Optimizer`.

        Accumulator(model, [(muon, matrices), (adamw, others)], loss, 8)

    stands for

        muon.apply_gradients(gradients of the matrices)
        adamw.apply_gradients(gradients of the others)

    Args:
        pairs: Each optimizer with its variables, or with a model or layer whose trainable variables it steps. An
            optimizer of Keras that was built already has its variables, and may stand alone.
        strategy: The strategy that the model was made under.
    """

    runs_in_graph = True
    is_scaling = False

    def __init__(self, pairs: Sequence[Any], strategy: tf.distribute.Strategy) -> None:
        super().__init__(name="optimizers")
        if not pairs:
            raise OptionError(f"optimizer is {pairs!r}, which has no optimizer in it: {_REMEDY}")
        parts: list[tuple[Optimizer, Any]] = []
        for pair in pairs:
            optimizer, owner = pair if isinstance(pair, list | tuple) and len(pair) == 2 else (pair, None)
            part = Optimizer(optimizer, strategy)
            name = type(optimizer).__name__
            if not part.runs_in_graph or part.is_scaling or hasattr(optimizer, "inner_optimizer"):
                raise OptionError(f"{name} can only be the one optimizer of an accumulator: use one of Keras in a list")
            if owner is None and not getattr(optimizer, "built", False):
                raise OptionError(f"{name} does not know its variables yet: {_REMEDY}")
            parts.append((part, optimizer if owner is None else owner))
        self._parts = tuple(parts)
        self.optimizers = [part.optimizer for part, _ in parts]
        """The user's optimizers."""

    @property
    def saved(self) -> Any:
        """What a checkpoint saves as the optimizer."""
        return self

    def _divided(self, model: Any) -> list[tuple[Optimizer, list[int]]]:
        """Each optimizer with the numbers of its variables; raises OptionError unless each variable has one."""
        number = {id(as_tf_variable(v)): k for k, v in enumerate(model.trainable_variables)}
        divided = [
            (optimizer, [number[key] for v in _variables_of(owner) if (key := id(as_tf_variable(v))) in number])
            for optimizer, owner in self._parts
        ]
        for k, variable in enumerate(model.trainable_variables):
            num = sum(k in numbers for _, numbers in divided)
            if num != 1:
                raise OptionError(
                    f"{name_of(variable)} belongs to {num} of the {len(divided)} optimizers: give each variable that "
                    "is trained to one of them, or freeze it"
                )
        return divided

    def _each(self, model: Any) -> Iterator[tuple[Optimizer, _Part, list[int]]]:
        variables = model.trainable_variables
        for optimizer, numbers in self._divided(model):
            yield optimizer, _Part([variables[k] for k in numbers]), numbers

    def num_steps(self) -> Any:
        """How often the first one has stepped."""
        return self._parts[0][0].num_steps()

    def build(self, model: Any) -> None:
        """Creates the variables of all of them."""
        for optimizer, part, _ in self._each(model):
            optimizer.build(part)

    def check_knows(self, model: Any) -> None:
        """Raises OptionError unless each of them knows its variables."""
        if model.trainable_variables:
            for optimizer, part, _ in self._each(model):
                optimizer.check_knows(part)

    def scaled(self, value: tf.Tensor) -> tf.Tensor:
        """The value itself: none of them scales the loss."""
        return value

    def apply(self, gradients: Sequence[Gradient], model: Any) -> None:
        """One step of each."""
        for optimizer, part, numbers in self._each(model):
            own = [gradients[k] for k in numbers]
            if any(g is not None for g in own):
                optimizer.apply(own, part)

    @contextmanager
    def without_reduction(self) -> Iterator[None]:
        """In this block none of them sums the gradient over replicas a second time."""
        with ExitStack() as stack:
            for optimizer, _ in self._parts:
                stack.enter_context(optimizer.without_reduction())
            yield


AnyOptimizer = Optimizer | Optimizers


def _variables_of(owner: Any) -> Sequence[Any]:
    """The variables that an optimizer was paired with, or built for."""
    for name in ("trainable_variables", "_trainable_variables"):
        if hasattr(owner, name) and not isinstance(owner, list | tuple):
            return list(getattr(owner, name))
    return list(owner)
