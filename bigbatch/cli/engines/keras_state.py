"""Saves and loads the variables of a Keras model and its optimizer, by their order: not all have a unique name."""

from typing import Any

import numpy as np

from ...core.checkpoint.kinds import check_kinds, check_order, kind_of, order_of
from ...core.errors import StateError

_REMEDY = "continue with the task as it was, or start again without --resume"


def state_of_variables(model: Any, optimizer: Any, **more: list[Any]) -> dict[str, Any]:
    """The values of all variables, in order, for `load_variables`; `more` are lists of other variables, by name."""
    arrays = {name: [np.array(v) for v in found] for name, found in (_variables(model, optimizer) | more).items()}
    return {**arrays, "kinds": {"optimizer": kind_of(optimizer)}, "order": order_of(model.trainable_variables)}


def load_variables(state: dict[str, Any], model: Any, optimizer: Any, **more: list[Any]) -> None:
    """Assigns all variables; raises StateError before anything is changed if one of them does not fit."""
    if not model.trainable_variables:
        raise StateError("the model has no variables before its first batch: give its layers an Input to resume")
    check_kinds(state["kinds"], {"optimizer": kind_of(optimizer)})
    check_order(state["order"], order_of(model.trainable_variables))
    pairs: list[tuple[Any, np.ndarray]] = []
    for name, variables in (_variables(model, optimizer) | more).items():
        if len(variables) != len(state[name]):
            raise StateError(
                f"the saved state has {len(state[name])} variables of the {name} but the task has {len(variables)}: "
                f"{_REMEDY}"
            )
        pairs += zip(variables, map(np.asarray, state[name]), strict=True)
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
    """With the seeds of random layers, without the variables of metrics, which every step resets."""
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    of_metrics = {id(variable) for metric in getattr(model, "metrics", ()) for variable in metric.variables}
    return {
        "model": [variable for variable in model.variables if id(variable) not in of_metrics],
        "optimizer": list(optimizer.variables),
    }
