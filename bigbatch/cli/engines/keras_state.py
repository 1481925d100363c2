"""The variables of a model and an optimizer of Keras, which have an order but not all a name of their own."""

from typing import Any

import numpy as np

from ...core.errors import StateError

_REMEDY = "go on with the task as it was, or start anew without --resume"


def state_of_variables(model: Any, optimizer: Any, **more: list[Any]) -> dict[str, Any]:
    """What `load_variables` needs: the values of all variables, in order; `more` are lists of others."""
    return {of: [np.array(v) for v in found] for of, found in (_variables(model, optimizer) | more).items()}


def load_variables(state: dict[str, Any], model: Any, optimizer: Any, **more: list[Any]) -> None:
    """Assigns all variables; raises StateError before that if one of them does not fit."""
    if not model.trainable_variables:
        raise StateError("the model has no variables before its first batch: give its layers an Input to resume")
    pairs: list[tuple[Any, np.ndarray]] = []
    for of, variables in (_variables(model, optimizer) | more).items():
        if len(variables) != len(state[of]):
            raise StateError(
                f"the saved state has {len(state[of])} variables of the {of} but the task {len(variables)}: {_REMEDY}"
            )
        pairs += zip(variables, map(np.asarray, state[of]), strict=True)
    for variable, array in pairs:
        own = np.asarray(variable)
        if (own.shape, own.dtype) != (array.shape, array.dtype):
            raise StateError(
                f"{getattr(variable, 'path', variable.name)} is {array.dtype}{list(array.shape)} in the saved state "
                f"but {own.dtype}{list(own.shape)} in the task: {_REMEDY}"
            )
    for variable, array in pairs:
        variable.assign(array)


def _variables(model: Any, optimizer: Any) -> dict[str, list[Any]]:
    """Seeds of random layers too, but not those of metrics, which begin anew with each step."""
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    of_metrics = {id(variable) for metric in getattr(model, "metrics", ()) for variable in metric.variables}
    return {
        "model": [variable for variable in model.variables if id(variable) not in of_metrics],
        "optimizer": list(optimizer.variables),
    }
