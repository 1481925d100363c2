"""Whether the saved state of a torch task fits: torch itself copies what fits before it refuses what does not."""

from collections.abc import Mapping
from typing import Any

from ..run.compatible import check_array, check_names, check_number


def check_model(ours: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    check_names(ours, saved)
    for name, value in ours.items():
        check_array(name, value, saved[name])


def check_optimizer(ours: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    check_number("groups of parameters", len(ours["param_groups"]), len(saved["param_groups"]))
    for own, other in zip(ours["param_groups"], saved["param_groups"], strict=True):
        check_names((f"the option {name} of the optimizer" for name in own),
                    (f"the option {name} of the optimizer" for name in other))  # fmt: skip
        check_number("parameters in a group of the optimizer", len(own["params"]), len(other["params"]))
