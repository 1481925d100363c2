"""The variables of a model and an optimizer of Keras, of which all have an order but not all a name of their own."""

from typing import Any

import numpy as np

from ...core.errors import StateError
from ..run.compatible import check_array, check_number


def state_of_variables(model: Any, optimizer: Any) -> dict[str, Any]:
    return {
        of: [[name_of(variable), np.asarray(variable)] for variable in variables]
        for of, variables in variables_of(model, optimizer).items()
    }


def load_variables(state: dict[str, Any], model: Any, optimizer: Any) -> None:
    """Refuses what does not fit before anything is assigned."""
    if not model.trainable_variables:
        raise StateError("the model has no variables before its first batch: give its layers an Input to resume")
    pairs = []
    for of, variables in variables_of(model, optimizer).items():
        check_number(f"variables of the {of}", len(variables), len(state[of]))
        for variable, (_, array) in zip(variables, state[of], strict=True):
            check_array(name_of(variable), np.asarray(variable), array)
            pairs.append((variable, array))
    for variable, array in pairs:
        variable.assign(array)


def variables_of(model: Any, optimizer: Any) -> dict[str, list[Any]]:
    """Seeds of random layers too, but not those of metrics, which begin anew with each step."""
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    of_metrics = {id(variable) for metric in getattr(model, "metrics", ()) for variable in metric.variables}
    return {
        "model": [variable for variable in model.variables if id(variable) not in of_metrics],
        "optimizer": list(optimizer.variables),
    }


def name_of(variable: Any) -> str:
    return str(getattr(variable, "path", variable.name))
