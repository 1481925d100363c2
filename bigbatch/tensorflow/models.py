"""What an accumulator trains: a model, several models together, or a list of variables."""

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from ..core.errors import OptionError
from . import checks
from .distributed.replicas import as_tf_variable


def trained(model: Any, variables: Sequence[Any] | None = None) -> Any:
    """One object with `variables` and `trainable_variables`: the model itself, or `Models`.

    Args:
        model: What the user passed: a model, or a list, tuple or dict of models.
        variables: The variables to train, if they are not all that are trainable.
    """
    is_several = isinstance(model, Mapping | list | tuple)
    models = [model] if not is_several else list(model.values()) if isinstance(model, Mapping) else list(model)
    if is_several and not models:
        raise OptionError(f"model is {model!r}, which has no model in it: pass at least one")
    for each in models if variables is None or is_several else ():
        checks.check_model(each)
    return model if variables is None and not is_several else Models(models, variables)


class Models(tf.Module):
    """Several models, or some variables of one, trained as one model.

    Args:
        models: The models.
        variables: The variables to train. None for all that are trainable.
    """

    def __init__(self, models: Sequence[Any], variables: Sequence[Any] | None) -> None:
        super().__init__(name="models")
        self.models = [model for model in models if hasattr(model, "trainable_variables")]
        self.own = None if variables is None else list(variables)
        for variable in self.own or ():
            if not getattr(variable, "trainable", False):
                kind = type(variable).__name__
                raise OptionError(f"variables has a {kind} that is not trainable: pass model.trainable_variables")

    @property
    def trainable_variables(self) -> list[Any]:
        """The variables to train, each once, even if models share it."""
        if self.own is not None:
            return list(self.own)
        return _once([v for model in self.models for v in model.trainable_variables])

    @property
    def variables(self) -> list[Any]:
        """All variables."""
        return _once([v for model in self.models for v in model.variables] + [*(self.own or ())])

    @property
    def weights(self) -> list[Any]:
        """All variables but the seeds of random layers, as Keras has it."""
        of_each = [v for model in self.models for v in getattr(model, "weights", model.variables)]
        return _once([*of_each, *(self.own or ())])


def _once(variables: Sequence[Any]) -> list[Any]:
    return list({id(as_tf_variable(v)): v for v in variables}.values())
