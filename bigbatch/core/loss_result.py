"""What a loss returned: the terms of the loss, and aux.

A loss returns a scalar, a tuple of terms, or a mapping with "loss", such as the output of a Hugging Face model. With
`has_aux=True` it returns the pair `(loss, aux)`, or a mapping whose other items are aux.
"""

from collections.abc import Callable, Mapping
from typing import Any

from .errors import LossError
from .weight import Terms, as_terms


def split(
    returned: Any, num_weights: int | None, *, has_aux: bool, shape_of: Callable[[Any], Any]
) -> tuple[Terms, Any]:
    """The terms of a loss, and aux (None without `has_aux`). The terms are not checked any further.

    Args:
        returned: What the loss returned.
        num_weights: How many terms the loss is expected to have; None if that is not known.
        has_aux: The option of the accumulator.
        shape_of: Returns the shape of a tensor as a tuple, and None for anything else.
    """
    if not has_aux:
        terms = as_terms(_loss_of(returned))
        _check_no_aux(terms, num_weights, shape_of)
        return terms, None
    if isinstance(returned, Mapping):
        return as_terms(_loss_of(returned)), {key: returned[key] for key in returned if key != "loss"}
    if isinstance(returned, tuple | list) and len(returned) == 2:
        return as_terms(_loss_of(returned[0])), returned[1]
    found = f"a {type(returned).__name__}"
    if isinstance(returned, tuple | list):
        found += f" of {len(returned)}"
    raise LossError(f"with has_aux=True the loss must return the pair (loss, aux), but it returned {found}")


def _loss_of(returned: Any) -> Any:
    """The loss in a mapping; anything else is the loss itself."""
    if not isinstance(returned, Mapping):
        return returned
    loss = returned.get("loss")
    if loss is not None:
        return loss
    if "loss" in returned or hasattr(returned, "loss"):  # a Hugging Face output leaves out what is None
        raise LossError(f"the output has no loss ({_named(returned)}): pass labels to the model")
    raise LossError(f'the loss returned a {type(returned).__name__} without "loss" ({_named(returned)}): add it')


def _named(returned: Mapping[Any, Any]) -> str:
    names = [str(key) for key in returned if key != "loss"]
    return f"it has {', '.join(names)}" if names else "it is empty"


def _check_no_aux(terms: Terms, num_weights: int | None, shape_of: Callable[[Any], Any]) -> None:
    """Raises LossError if a tuple is not one of terms, but probably the loss and something else."""
    for number, term in enumerate(terms[1:], 2):
        shape = shape_of(term)
        if shape is None or any(size != 1 for size in shape):
            what = f"is a {type(term).__name__}" if shape is None else f"has the shape {tuple(shape)}"
            raise LossError(
                f"item {number} of {len(terms)} that the loss returned {what}, so it is no term of the loss: return "
                "the pair (loss, aux) and pass has_aux=True, then aux arrives in step.aux"
            )
    if num_weights is not None and len(terms) > num_weights:
        raise LossError(
            f"the loss has {len(terms)} terms but the weight has {num_weights}: let `weight` return one number for "
            "each term of the loss, in the same order; if only the first is the loss, return the pair (loss, aux) and "
            "pass has_aux=True"
        )
