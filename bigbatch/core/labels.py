"""The labels of a batch: where they are, and what the messages of the ready-made weights say about them."""

from collections.abc import Callable, Mapping
from typing import Any

from .errors import WeightError, warn

IGNORED = -100
"""The label that PyTorch's cross-entropy and Hugging Face leave out by default."""

Where = str | int | Callable[[Any], Any]
"""Where a batch keeps something: its key or attribute, its index in a tuple, or a function of the batch."""


def find(batch: Any, where: Where, remedy: str) -> Any:
    """What the batch keeps there; raises WeightError if it has nothing of that name.

    Args:
        batch: A mapping, a tuple, a list, or an object with attributes.
        where: The key or attribute, the index, or a function of the batch.
        remedy: An example of how to name something else.
    """
    if callable(where):
        return where(batch)
    found = None
    if isinstance(batch, Mapping):
        found = batch.get(where)
    elif isinstance(where, str):
        found = getattr(batch, where, None)
    elif isinstance(batch, tuple | list) and -len(batch) <= where < len(batch):
        found = batch[where]
    if found is None:
        name = f'"{where}"' if isinstance(where, str) else f"item {where}"
        raise WeightError(
            f"the batch ({_described(batch)}) has no {name}, which the weight needs: pass another key, index or "
            f"function, as in {remedy}"
        )
    return found


def find_labels(batch: Any, where: Where, *, shift: bool) -> Any:
    """The labels of the batch; raises WeightError if it has none there."""
    return find(batch, where, 'tokens("y", shift=True)' if shift else 'tokens("y")')


def find_weights(batch: Any, where: Where) -> Any:
    """The sample weights, or the mask, of the batch; raises WeightError if it has none there."""
    return find(batch, where, 'sample_weights("mask")')


def _described(batch: Any) -> str:
    kind = type(batch).__name__
    if isinstance(batch, Mapping):
        return f"a {kind} with {', '.join(map(repr, batch))}"
    return f"a {kind} of {len(batch)}" if isinstance(batch, tuple | list) else f"a {kind}"


def check_labels(dtype: Any, shape: Any, *, is_integer: bool, shift: bool) -> None:
    """Raises WeightError unless labels are integers, and have an axis of time if they are shifted along it."""
    if not is_integer:
        raise WeightError(
            f"the labels are of {dtype}, but labels that can be ignored are integers: pass the key of the integer "
            "labels, or count a mask with sample_weights(…)"
        )
    if shift and len(shape) < 2:
        raise WeightError(
            f"the labels have the shape {tuple(shape)}, without an axis of time to shift them along: pass labels of "
            "shape (samples, time), or shift=False"
        )


def check_table(shape: Any, *, is_good: bool) -> None:
    """Raises WeightError unless there is one finite weight of at least 0 for each class."""
    if len(shape) != 1 or not shape[0]:
        raise WeightError(f"the class weights have the shape {tuple(shape)}: pass one number for each class")
    if not is_good:
        raise WeightError("the class weights have a number that is negative or not finite: pass numbers of at least 0")


def out_of_range(low: int, high: int, num_classes: int) -> WeightError:
    """The error if a label has no class weight; `low` and `high` are the extremes of the labels that count."""
    wrong = low if low < 0 else high
    return WeightError(
        f"one of the labels is {wrong}, but there are {num_classes} class weights, for the labels 0 to "
        f"{num_classes - 1}: pass as many weights as classes, and ignore_index= if {wrong} should not count"
    )


def may_be_uncounted(batch: Any) -> Any:
    """What the batch calls "labels", or None: the caller looks for IGNORED in it, and calls `warn_of_uncounted`."""
    return batch.get("labels") if isinstance(batch, Mapping) else getattr(batch, "labels", None)


def warn_of_uncounted(module: str) -> None:
    """Warns that labels are ignored although micro-batches count by their samples."""
    warn(
        f'the batch has "labels" with {IGNORED} in them but no weight was given, so micro-batches count by their '
        f"samples: pass weight={module}.weights.causal_lm_tokens if the model shifts the labels (Hugging Face's causal "
        f'models do), weight={module}.weights.tokens() if it does not, or weight=lambda batch: len(batch["labels"]) '
        "if the loss is a mean over samples"
    )
